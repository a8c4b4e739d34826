import random
from dataclasses import replace
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.verdict.statistics.variance import (
    Variance,
    VarianceComponents,
    baseline_estimate,
    median_variance,
    observed,
    pooled_variance,
    quantile,
)
from tests.unit.simulated import PRIOR

LOGS = st.lists(st.floats(-0.5, 0.5), min_size=2, max_size=6)
REVISION = st.lists(LOGS, min_size=2, max_size=4)


def draw(rng: random.Random, blocks: int, launches: int, within: float, between: float) -> list[list[float]]:
    centers = [rng.gauss(0, between) for _ in range(blocks)]
    return [[rng.gauss(center, within) for _ in range(launches)] for center in centers]


# The square of a quantile errs above the variance of launches, on the careful side, and more so with fewer launches.
# Side, number of blocks and of launches of each, deviation between blocks, and what the mean of estimates lies between.
DRAWN = [
    ("within", 1, 5, 0.05, 0.95e-4, 1.7e-4),
    ("within", 1, 20, 0.05, 0.95e-4, 1.2e-4),
    ("between", 6, 5, 0.03, 8.1e-4, 9.9e-4),
    ("between", 4, 5, 0.0, 0.0, 2e-5),
]


@pytest.mark.parametrize(("side", "blocks", "launches", "between", "least", "most"), DRAWN)
def test_variance_is_recovered_or_errs_above_it(side, blocks, launches, between, least, most):
    rng = random.Random(1)
    found = [getattr(observed([draw(rng, blocks, launches, 0.01, between)]), side).value for _ in range(400)]
    assert least <= mean(found) < most


@pytest.mark.parametrize("count", [8, 9, 10, 11, 25])
def test_one_outlier_launch_moves_the_variance_little(count):
    stable = [[0.001 * (number - count // 2) for number in range(count)]]
    spoilt = [[*stable[0][:-1], 3.0]]
    assert observed([spoilt]).within.value < 2 * observed([stable]).within.value
    assert baseline_estimate({"a": spoilt[0]}, [spoilt], PRIOR).center == pytest.approx(0.0, abs=2e-3)


def test_neighbours_visits_widen_the_slower_side_alone():
    rng = random.Random(4)
    values = [rng.gauss(0, 0.01) + (rng.random() < 0.3) * rng.uniform(0, 0.2) for _ in range(60)]
    found = observed([[values]])
    assert found.slower.value > 10 * found.faster.value


@pytest.mark.parametrize("revisions", [[], [[]], [[[0.1]]], [[[0.1], []]]])
def test_single_launches_give_no_variance(revisions):
    found = observed([[values for values in revision if values] for revision in revisions])
    assert (found.slower.df, found.faster.df, found.between.df) == (0, 0, 0)


def test_variance_between_blocks_is_assumed_at_least_half_of_that_of_launches():
    rng = random.Random(5)
    noisy = pooled_variance([draw(rng, 1, 20, 0.1, 0.0)], PRIOR)
    assert noisy.between.value == pytest.approx(noisy.faster.value / 2)
    assert noisy.between.df == PRIOR.between.df
    assert pooled_variance([[[0.0, 0.001, -0.001, 0.0005]]], PRIOR).between == PRIOR.between


def test_more_launches_outweigh_the_prior():
    rng = random.Random(6)
    values = [pooled_variance([draw(rng, 1, count, 0.05, 0)], PRIOR).within.value for count in (2, 5, 80)]
    assert abs(values[2] - 0.0025) < abs(values[1] - 0.0025) < abs(values[0] - 0.0025)


def test_revisions_with_different_centers_add_no_variance_between_blocks():
    rng = random.Random(7)
    first, second = (draw(rng, 4, 5, 0.01, 0.01) for _ in range(2))
    apart = [[value + 1.0 for value in values] for values in second]
    assert observed([first, apart]).between.value == pytest.approx(observed([first, second]).between.value)


def test_revisions_add_their_degrees_of_freedom():
    rng = random.Random(8)
    revision = draw(rng, 3, 4, 0.01, 0.01)
    once, twice = observed([revision]), observed([revision, revision])
    assert twice.between.df == 2 * once.between.df
    assert twice.within.df == pytest.approx(2 * once.within.df)


def test_weights_of_blocks_sum_to_one_and_the_larger_block_weighs_more():
    found = baseline_estimate({"a": [0.0] * 9, "b": [0.1]}, [[[0.0] * 9, [0.1]]], PRIOR)
    assert sum(found.weights.values()) == pytest.approx(1)
    assert found.weights["a"] > found.weights["b"]
    assert found.counts == {"a": 9, "b": 1}
    apart = replace(PRIOR, between=Variance(1.0, 50))
    assert baseline_estimate({"a": [0.0] * 9, "b": [0.1]}, [], apart).weights["a"] == pytest.approx(0.5, abs=1e-3)


def test_metric_that_never_varied_has_an_estimate():
    still = VarianceComponents(Variance(0, 1), Variance(0, 1), Variance(0, 1))
    found = baseline_estimate({"a": [1.0, 1.0], "b": [1.0]}, [[[1.0, 1.0], [1.0]]], still)
    assert (found.center, found.weights["a"]) == (1.0, 0.5)
    assert found.error("a", 1, found.variance.slower).value == 0


def test_variance_of_blocks_cancels_in_the_baselines_own():
    found = baseline_estimate({"a": [0.0, 0.001, -0.001]}, [[[0.0, 0.001, -0.001]]], PRIOR)
    side = found.variance.slower
    own, other = found.error("a", 3, side), found.error("b", 3, side)
    assert own.value == pytest.approx(side.value * 2 * median_variance(3))
    assert other.value == pytest.approx(own.value + 2 * found.variance.between.value)


def test_block_that_the_baseline_contains_among_others_cancels_in_part():
    center = {"a": [0.0] * 5, "b": [0.01] * 5}
    found = baseline_estimate(center, [list(center.values())], PRIOR)
    errors = [found.error(block, 3, found.variance.slower).value for block in ("a", "c")]
    assert errors[1] - errors[0] == pytest.approx(found.variance.between.value)


def test_error_of_an_estimate_matches_simulated_errors():
    rng = random.Random(9)
    known = VarianceComponents(Variance(1e-4, 1e9), Variance(1e-4, 1e9), Variance(4e-4, 1e9))
    squares, stated = [], 0.0
    for _ in range(3000):
        *blocks, candidate = draw(rng, 4, 5, 0.01, 0.02)
        center = dict(enumerate(blocks))
        found = baseline_estimate(center, [blocks], known)
        stated = found.error("new", 5, found.variance.slower).value
        squares.append((sorted(candidate)[2] - found.center) ** 2)
    assert mean(squares) == pytest.approx(stated, rel=0.1)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 30])
def test_variance_of_a_median_is_that_of_simulated_ones(count):
    rng = random.Random(count)
    squares = []
    for _ in range(4000):
        values = sorted(rng.gauss(0, 1) for _ in range(count))
        squares.append(((values[(count - 1) // 2] + values[count // 2]) / 2) ** 2)
    assert mean(squares) == pytest.approx(median_variance(count), rel=0.12)


def test_pooled_variances_are_weighted_by_degrees_of_freedom():
    assert Variance(1.0, 3).pooled(Variance(5.0, 1), Variance(9.0, 0)) == Variance(2.0, 4)


@pytest.mark.parametrize(("fraction", "value"), [(0.0, 1.0), (0.5, 2.5), (0.9, 3.7), (1.0, 4.0)])
def test_quantile_is_linear_between_values(fraction, value):
    assert quantile([1.0, 2.0, 3.0, 4.0], fraction) == pytest.approx(value)


@given(REVISION, st.floats(-3, 3))
def test_shift_of_everything_moves_the_center_alone(revision, shift):
    there = baseline_estimate(dict(enumerate(revision)), [revision], PRIOR)
    moved = [[value + shift for value in values] for values in revision]
    here = baseline_estimate(dict(enumerate(moved)), [moved], PRIOR)
    assert here.center == pytest.approx(there.center + shift, abs=1e-9)
    assert here.variance.within.value == pytest.approx(there.variance.within.value, abs=1e-9)
    assert here.variance.between.value == pytest.approx(there.variance.between.value, abs=1e-9)


@given(REVISION, st.randoms(use_true_random=False))
def test_order_of_launches_and_of_blocks_does_not_matter(revision, rng):
    shuffled = [rng.sample(values, len(values)) for values in revision]
    there = pooled_variance([revision], PRIOR)
    here = pooled_variance([rng.sample(shuffled, len(shuffled))], PRIOR)
    for name in ("slower", "faster", "between"):
        assert getattr(here, name).value == pytest.approx(getattr(there, name).value, abs=1e-12)


@given(REVISION, st.floats(0.1, 10))
def test_variance_scales_with_its_logs(revision, factor):
    scaled = [[value * factor for value in values] for values in revision]
    there, here = observed([revision]), observed([scaled])
    for name in ("slower", "faster", "between"):
        expected = factor**2 * getattr(there, name).value
        assert getattr(here, name).value == pytest.approx(expected, rel=1e-6, abs=1e-12)


@given(REVISION)
def test_mirrored_launches_swap_the_sides(revision):
    mirrored = [[-value for value in values] for values in revision]
    there, here = observed([revision]), observed([mirrored])
    assert here.slower.value == pytest.approx(there.faster.value, abs=1e-12)
    assert here.faster.value == pytest.approx(there.slower.value, abs=1e-12)
