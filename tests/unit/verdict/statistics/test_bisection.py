"""The posterior over commits, and its confirmation."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu

from pytest_aorta.verdict.statistics.bisection import (
    LOOKS,
    NONE_PRIOR,
    Posterior,
    is_confirmed,
    next_commit,
    posterior_of_bits,
    posterior_of_pairs,
    suspects,
)
from pytest_aorta.verdict.statistics.variance import Variance

NOISE = 0.003
PRIOR = Variance(NOISE**2 / 2, 8)


def pairs(rng: random.Random, count: int, change: float = 0.0) -> list[float]:
    return [rng.gauss(change, NOISE) for _ in range(count)]


def total(posterior: Posterior) -> float:
    return math.fsum(posterior.first) + posterior.none


@given(st.integers(1, 200), st.data())
def test_probabilities_sum_to_one_and_rise_from_commit_to_commit(num_commits, data):
    probed = data.draw(st.sets(st.integers(1, num_commits), max_size=8)) | {num_commits}
    differences = {
        commit: data.draw(st.lists(st.floats(-0.5, 0.5), min_size=1, max_size=4)) for commit in sorted(probed)
    }
    posterior = posterior_of_pairs(num_commits, differences, PRIOR, 0.005)
    assert len(posterior.first) == num_commits
    assert total(posterior) == pytest.approx(1)
    rising = [posterior.has_change(commit) for commit in range(num_commits + 1)]
    assert rising == sorted(rising)
    assert posterior.low <= posterior.change <= posterior.high


@given(st.integers(1, 300), st.data())
def test_bits_name_the_commit_within_the_logarithm_of_the_commits(num_commits, data):
    planted = data.draw(st.integers(1, num_commits))
    changed = {num_commits: True}
    while True:
        posterior = posterior_of_bits(num_commits, changed)
        best = max(suspects(posterior, ()), key=lambda group: group.probability)
        if best.probability > 0.99:
            break
        begin = max((commit for commit, has_it in changed.items() if not has_it), default=0)
        end = min(commit for commit, has_it in changed.items() if has_it)
        commit = next_commit(posterior, (), range(begin + 1, end))
        changed[commit] = commit >= planted
    assert best.commits == (planted,)
    assert len(changed) - 1 <= math.ceil(math.log2(num_commits))


@given(st.integers(2, 100), st.data())
@settings(max_examples=50)
def test_bits_name_the_commits_that_skipped_ones_leave_open(num_commits, data):
    planted = data.draw(st.integers(1, num_commits))
    skipped = data.draw(st.sets(st.integers(1, num_commits - 1), max_size=num_commits // 2))
    starting = [commit for commit in range(1, num_commits + 1) if commit not in skipped]
    changed = {commit: commit >= planted for commit in starting}
    best = max(suspects(posterior_of_bits(num_commits, changed), skipped), key=lambda group: group.probability)
    assert planted in best.commits
    assert set(best.commits[:-1]) <= skipped
    assert best.commits[-1] in starting


def test_unprobed_commits_are_equally_likely_and_so_is_none():
    posterior = posterior_of_bits(4, {})
    assert posterior.first == pytest.approx([(1 - NONE_PRIOR) / 4] * 4)
    assert posterior.none == pytest.approx(NONE_PRIOR)


def test_pairs_without_a_change_at_the_last_commit_show_that_there_is_none():
    posterior = posterior_of_pairs(8, {8: pairs(random.Random(1), 4)}, PRIOR, 0.02)
    assert posterior.none > 0.99


@pytest.mark.parametrize("sign", [1, -1])
def test_change_and_its_interval_are_those_of_the_pairs(sign):
    rng = random.Random(2)
    differences = {8: pairs(rng, 6, sign * 0.02), 4: pairs(rng, 3, sign * 0.02), 3: pairs(rng, 3)}
    posterior = posterior_of_pairs(8, differences, PRIOR, sign * 0.005)
    assert posterior.first[3] > 0.99
    assert posterior.low < sign * 0.02 < posterior.high
    assert posterior.high - posterior.low < 4 * NOISE


def test_one_disturbed_launch_does_not_decide():
    rng = random.Random(3)
    ends = {8: pairs(rng, 4, 0.02)}
    for disturbed in (0.5, -0.5):
        posterior = posterior_of_pairs(8, ends | {4: [disturbed]}, PRIOR, 0.005)
        assert 0.1 < posterior.has_change(4) < 0.9


@pytest.mark.parametrize("deviation", [0.001, 0.003, 0.006])
def test_stated_probability_is_kept(deviation):
    rng = random.Random(4)
    wrong, trials = 0, 60
    for _ in range(trials):
        planted = rng.randint(1, 64)
        differences = {64: [rng.gauss(0.02, deviation) for _ in range(3)]}
        while True:
            posterior = posterior_of_pairs(64, differences, Variance(deviation**2 / 2, 4), 0.005)
            best = max(suspects(posterior, ()), key=lambda group: group.probability)
            if best.probability >= 0.99:
                break
            commit = next_commit(posterior, ())
            differences.setdefault(commit, []).append(rng.gauss(0.02 if commit >= planted else 0, deviation))
        wrong += best.commits != (planted,)
    # The expected number is 0.6 of 60.
    assert wrong <= 3


def test_twelve_pairs_of_the_ends_replace_the_prior_of_a_noisy_machine():
    noise = [-0.035, -0.028, -0.02, -0.012, -0.006, -0.001, 0.003, 0.008, 0.014, 0.02, 0.026, 0.031]
    changed, unchanged = [0.03, 0.06, 0.05, 0.07], [-0.02, 0.01, 0.02, 0.0]
    differences = {8: [0.05 + value for value in noise], 5: changed, 4: unchanged}
    posterior = posterior_of_pairs(8, differences, Variance(0.15**2, 8), 0.01)
    (best,) = [group for group in suspects(posterior, ()) if group.probability >= 0.99]
    assert best.commits == (5,)


def test_next_commit_keeps_a_distance_from_commits_that_do_not_start():
    posterior = posterior_of_bits(16, {16: True})
    assert next_commit(posterior, ()) == 8
    assert abs(next_commit(posterior, {8}) - 8) >= 2
    assert next_commit(posterior, set(range(1, 15))) == 15


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
