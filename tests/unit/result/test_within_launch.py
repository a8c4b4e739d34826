from __future__ import annotations

import random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import theilslopes

from pytest_aorta.result.facts import DEPENDENT_STEPS, growth, rank_lags_ms, slope_bounds


def autocorrelated(rng: random.Random, count: int, rho: float = 0.6, deviation: float = 0.02) -> list[float]:
    error, values = 0.0, []
    for _ in range(count):
        error = rho * error + rng.gauss(0, deviation)
        values.append(1 + error)
    return values


@pytest.mark.parametrize("waits", [[], [[1.0, 2.0]], [[], []]], ids=["no ranks", "one rank", "no steps"])
def test_ranks_without_others_or_without_waits_have_no_lags(waits):
    assert rank_lags_ms(waits) == []


@given(st.integers(2, 7), st.integers(1, 9), st.randoms(use_true_random=False))
def test_lags_are_those_of_the_definition(num_ranks, num_steps, rng):
    waits = [[rng.choice([0.0, 1.0, rng.random()]) for _ in range(num_steps)] for _ in range(num_ranks)]
    for rank, lag in enumerate(rank_lags_ms(waits)):
        others = [
            median(waits[other][step] for other in range(num_ranks) if other != rank) - waits[rank][step]
            for step in range(num_steps)
        ]
        fewer, more = sorted([sum(other > 0 for other in others), sum(other < 0 for other in others)])
        assert lag == pytest.approx(median(others) if more >= 2 * fewer else 0.0, abs=1e-12)


def test_ramp_is_found_at_little_less_than_its_size():
    rng = random.Random(1)
    values = [value + 0.2 * step / 200 for step, value in enumerate(autocorrelated(rng, 200))]
    assert 0.1 < growth(values, DEPENDENT_STEPS) < 0.2


def test_decline_is_negative():
    assert growth([2.0 - step / 100 for step in range(100)], DEPENDENT_STEPS) < -0.4


def test_memory_that_leaks_is_found_from_ten_samples():
    assert growth([100.0 + sample for sample in range(10)]) == pytest.approx(9 / 104.5)


@pytest.mark.parametrize("values", [[], [1.0] * 9, list(range(1, 10)), [0.0, *range(1, 30)], [5.0] * 50])
def test_too_few_values_and_constant_ones_do_not_grow(values):
    assert growth(values) == 0


def test_too_few_dependent_steps_show_no_growth():
    assert growth([1 + step / 10 for step in range(34)], DEPENDENT_STEPS) == 0
    assert growth([1 + step / 10 for step in range(35)], DEPENDENT_STEPS) > 0


def test_one_stall_is_no_growth():
    assert growth([1.0] * 99 + [50.0], DEPENDENT_STEPS) == 0


@pytest.mark.parametrize("count", [20, 50, 100])
def test_autocorrelated_steps_rarely_look_like_growth(count):
    rng = random.Random(count)
    found = sum(growth(autocorrelated(rng, count), DEPENDENT_STEPS) != 0 for _ in range(400))
    # The stated rate is 1%, and up to 2% at 42 steps; at 2%, more than 16 of 400 have a chance of 1e-3.
    assert found <= 16


# Small integers have ties.
@given(
    st.lists(st.floats(1e-3, 1e9), min_size=7, max_size=16) | st.lists(st.integers(1, 4), min_size=7, max_size=16),
    st.sampled_from([0.9, 0.99, 0.999]),
)
def test_bounds_of_the_slope_are_those_of_scipy(values, confidence):
    known = theilslopes(values, alpha=confidence)
    assert slope_bounds(values, confidence) == (known.low_slope, known.high_slope)
