from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu

from pytest_aorta.verdict.statistics.bisection import LOOKS, is_confirmed

FINITE = st.floats(-1e6, 1e6)


def test_probabilities_of_an_error_add_up_to_at_most_1_percent():
    errors = []
    for count, most in LOOKS.items():
        # Two samples in which exactly ``most`` pairs are not in the order of the change.
        named, before = count * [0.0], [place + 0.5 for place in range(count)]
        full, rest = divmod(most, count)
        named = [-1.0] * full + [float(count - rest)] + [count + 1.0] * (count - full - 1)
        named = [value + 1e-6 * place for place, value in enumerate(named)]
        assert sum(here < there for here in named for there in before) == most
        errors.append(mannwhitneyu(named, before, alternative="greater", method="exact").pvalue)
    assert max(errors) < 0.005
    assert 0.009 < sum(errors) <= 0.01


def test_pairs_without_a_difference_are_confirmed_in_at_most_1_percent_of_trials():
    rng = random.Random(3)
    confirmed = 0
    for _ in range(2000):
        # Launches in two groups, as on a machine that other jobs use.
        pairs = [(rng.choice((10.0, 13.0)) + rng.random(), rng.choice((10.0, 13.0)) + rng.random()) for _ in range(20)]
        confirmed += any(is_confirmed(pairs[:count]) for count in range(1, 21))
    assert confirmed <= 35  # 20 expected at most; more than 35 have a probability of 0.1%


def test_clear_change_is_confirmed_at_the_first_look():
    pairs = [(2.0 + place, 1.0 - place) for place in range(5)]
    assert [is_confirmed(pairs[:count]) for count in range(6)] == [None] * 5 + [True]


def test_one_disturbed_launch_delays_the_confirmation():
    pairs = [(2.0, 9.0)] + [(2.0 + 0.01 * place, 1.0) for place in range(11)]
    answers = [is_confirmed(pairs[:count]) for count in range(13)]
    assert answers == [None] * 12 + [True]


def test_equal_launches_are_refused_after_the_last_look():
    answers = [is_confirmed([(1.0, 1.0)] * count) for count in range(max(LOOKS) + 1)]
    assert answers == [None] * max(LOOKS) + [False]


@given(st.lists(st.tuples(FINITE, FINITE), max_size=24))
def test_a_change_and_its_opposite_are_never_both_confirmed(pairs):
    opposite = [(there, here) for here, there in pairs]
    assert not (is_confirmed(pairs) and is_confirmed(opposite))


@pytest.mark.parametrize("shift", [1.0, 1e-9])
def test_size_of_the_change_does_not_matter(shift):
    assert is_confirmed([(1.0 + shift, 1.0)] * 5)
