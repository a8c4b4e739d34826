from __future__ import annotations

import random
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.verdict.statistics.variance import (
    Spread,
    Variance,
    estimate,
    level,
    median_variance,
    observed,
    quantile,
    typical,
)
from tests.unit.simulated import PRIOR

# Weak: what is measured decides.
FAINT = Spread(Variance(1e-8, 1e-6), Variance(1e-8, 1e-6), Variance(1e-8, 1e-6))
LOGS = st.lists(st.floats(-0.5, 0.5), min_size=2, max_size=6)
EPOCH = st.lists(LOGS, min_size=2, max_size=4)


def draw(rng: random.Random, sittings: int, launches: int, within: float, between: float) -> list[list[float]]:
    centres = [rng.gauss(0, between) for _ in range(sittings)]
    return [[rng.gauss(centre, within) for _ in range(launches)] for centre in centres]


@pytest.mark.parametrize(("launches", "most"), [(5, 1.7), (10, 1.35), (20, 1.2)])
def test_scatter_of_launches_is_recovered(launches, most):
    rng = random.Random(1)
    found = [observed([draw(rng, 1, launches, 0.01, 0.05)]).within.value for _ in range(400)]
    # The square of a quantile is above the variance, the more so the fewer launches there are: the careful side.
    assert 0.95e-4 < mean(found) < most * 1e-4


def test_scatter_of_sittings_is_recovered():
    rng = random.Random(2)
    found = [observed([draw(rng, 6, 5, 0.01, 0.03)]).between.value for _ in range(400)]
    assert mean(found) == pytest.approx(9e-4, rel=0.1)


def test_sittings_that_only_seem_to_differ_have_little_scatter():
    rng = random.Random(3)
    found = [observed([draw(rng, 4, 5, 0.01, 0.0)]).between.value for _ in range(400)]
    assert mean(found) < 2e-5


@pytest.mark.parametrize("count", [8, 9, 10, 11, 25])
def test_one_outlier_launch_moves_the_scatter_little(count):
    quiet = [[0.001 * (number - count // 2) for number in range(count)]]
    spoilt = [[*quiet[0][:-1], 3.0]]
    assert observed([spoilt]).within.value < 2 * observed([quiet]).within.value
    assert level({"a": spoilt[0]}, [spoilt], PRIOR).centre == pytest.approx(0.0, abs=2e-3)


def test_neighbours_visits_widen_the_slower_side_alone():
    rng = random.Random(4)
    values = [rng.gauss(0, 0.01) + (rng.random() < 0.3) * rng.uniform(0, 0.2) for _ in range(60)]
    found = observed([[values]])
    assert found.slower.value > 10 * found.faster.value


@pytest.mark.parametrize("epochs", [[], [[]], [[[0.1]]], [[[0.1], []]]])
def test_single_launches_tell_no_scatter(epochs):
    found = observed([[values for values in epoch if values] for epoch in epochs])
    assert (found.slower.df, found.faster.df, found.between.df) == (0, 0, 0)


def test_single_sitting_leaves_the_prior_for_sittings():
    assert estimate([[[0.0, 0.001, -0.001, 0.0005]]], PRIOR).between == PRIOR.between


def test_sittings_are_taken_to_scatter_by_half_of_what_launches_do_at_least():
    rng = random.Random(5)
    noisy = estimate([draw(rng, 1, 20, 0.1, 0.0)], PRIOR)
    assert noisy.between.value == pytest.approx(noisy.faster.value / 2)
    assert noisy.between.df == PRIOR.between.df


def test_more_launches_outweigh_the_prior():
    rng = random.Random(6)
    values = [estimate([draw(rng, 1, count, 0.05, 0)], PRIOR).within.value for count in (2, 5, 80)]
    assert abs(values[2] - 0.0025) < abs(values[1] - 0.0025) < abs(values[0] - 0.0025)


def test_epochs_at_different_levels_do_not_scatter_sittings():
    rng = random.Random(7)
    first, second = (draw(rng, 4, 5, 0.01, 0.01) for _ in range(2))
    apart = [[value + 1.0 for value in values] for values in second]
    assert observed([first, apart]).between.value == pytest.approx(observed([first, second]).between.value)


def test_epochs_add_their_degrees_of_freedom():
    rng = random.Random(8)
    epoch = draw(rng, 3, 4, 0.01, 0.01)
    once, twice = observed([epoch]), observed([epoch, epoch])
    assert twice.between.df == 2 * once.between.df
    assert twice.within.df == pytest.approx(2 * once.within.df)


def test_weights_of_sittings_sum_to_one_and_the_larger_sitting_weighs_more():
    found = level({"a": [0.0] * 9, "b": [0.1]}, [[[0.0] * 9, [0.1]]], PRIOR)
    assert sum(found.weights.values()) == pytest.approx(1)
    assert found.weights["a"] > found.weights["b"]
    assert found.counts == {"a": 9, "b": 1}


def test_where_sittings_differ_more_than_launches_all_weigh_alike():
    prior = Spread(Variance(1e-8, 4), Variance(1e-8, 4), Variance(1.0, 50))
    found = level({"a": [0.0] * 9, "b": [0.1]}, [[[0.0] * 9, [0.1]]], prior)
    assert found.weights["a"] == pytest.approx(0.5, abs=1e-6)


def test_metric_that_never_varied_has_a_level():
    still = Spread(Variance(0, 1), Variance(0, 1), Variance(0, 1))
    found = level({"a": [1.0, 1.0], "b": [1.0]}, [[[1.0, 1.0], [1.0]]], still)
    assert (found.centre, found.weights["a"]) == (1.0, 0.5)
    assert found.error("a", 1, found.spread.slower).value == 0


def test_scatter_of_sittings_cancels_in_the_baselines_own():
    found = level({"a": [0.0, 0.001, -0.001]}, [[[0.0, 0.001, -0.001]]], PRIOR)
    side = found.spread.slower
    own, other = found.error("a", 3, side), found.error("b", 3, side)
    assert own.value == pytest.approx(side.value * 2 * median_variance(3))
    assert other.value == pytest.approx(own.value + 2 * found.spread.between.value)


def test_sitting_that_the_baseline_holds_among_others_cancels_in_part():
    anchor = {"a": [0.0] * 5, "b": [0.01] * 5}
    found = level(anchor, [list(anchor.values())], PRIOR)
    errors = [found.error(sitting, 3, found.spread.slower).value for sitting in ("a", "c")]
    assert errors[1] - errors[0] == pytest.approx(found.spread.between.value)


def test_error_of_a_level_is_that_of_simulated_ones():
    rng = random.Random(9)
    known = Spread(Variance(1e-4, 1e9), Variance(1e-4, 1e9), Variance(4e-4, 1e9))
    squares, stated = [], 0.0
    for _ in range(3000):
        *sittings, candidate = draw(rng, 4, 5, 0.01, 0.02)
        anchor = dict(enumerate(sittings))
        found = level(anchor, [sittings], known)
        stated = found.error("new", 5, found.spread.slower).value
        squares.append((sorted(candidate)[2] - found.centre) ** 2)
    assert mean(squares) == pytest.approx(stated, rel=0.1)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 30])
def test_variance_of_a_median_is_that_of_simulated_ones(count):
    rng = random.Random(count)
    squares = []
    for _ in range(4000):
        values = sorted(rng.gauss(0, 1) for _ in range(count))
        squares.append(((values[(count - 1) // 2] + values[count // 2]) / 2) ** 2)
    assert mean(squares) == pytest.approx(median_variance(count), rel=0.12)


def test_typical_spread_is_the_median_case():
    cases = [Spread.of(within, 2 * within, 3) for within in (0.01, 0.02, 0.9)]
    found = typical(cases, 4)
    assert found is not None
    assert (found.slower, found.between.value) == (Variance(0.02**2, 4), pytest.approx(0.04**2))


def test_cases_that_tell_nothing_have_no_typical_spread():
    assert typical([Spread.of(0.01, 0.01, 0)], 4) is None


def test_pooled_variances_are_weighted_by_degrees_of_freedom():
    assert Variance(1.0, 3).pooled(Variance(5.0, 1), Variance(9.0, 0)) == Variance(2.0, 4)


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 2.5), (0.9, 3.7), (1.0, 4.0)])
def test_quantile_is_linear_between_values(share, value):
    assert quantile([1.0, 2.0, 3.0, 4.0], share) == pytest.approx(value)


@given(EPOCH, st.floats(-3, 3))
def test_shift_of_everything_moves_the_centre_alone(epoch, shift):
    there = level(dict(enumerate(epoch)), [epoch], PRIOR)
    moved = [[value + shift for value in values] for values in epoch]
    here = level(dict(enumerate(moved)), [moved], PRIOR)
    assert here.centre == pytest.approx(there.centre + shift, abs=1e-9)
    assert here.spread.within.value == pytest.approx(there.spread.within.value, abs=1e-9)
    assert here.spread.between.value == pytest.approx(there.spread.between.value, abs=1e-9)


@given(EPOCH, st.randoms(use_true_random=False))
def test_order_of_launches_and_of_sittings_does_not_matter(epoch, rng):
    shuffled = [rng.sample(values, len(values)) for values in epoch]
    there = estimate([epoch], PRIOR)
    here = estimate([rng.sample(shuffled, len(shuffled))], PRIOR)
    for name in ("slower", "faster", "between"):
        assert getattr(here, name).value == pytest.approx(getattr(there, name).value, abs=1e-12)


@given(EPOCH, st.floats(0.1, 10))
def test_scatter_scales_with_its_logs(epoch, factor):
    scaled = [[value * factor for value in values] for values in epoch]
    there, here = observed([epoch]), observed([scaled])
    for name in ("slower", "faster", "between"):
        expected = factor**2 * getattr(there, name).value
        assert getattr(here, name).value == pytest.approx(expected, rel=1e-6, abs=1e-12)


@given(EPOCH)
def test_mirrored_launches_swap_the_sides(epoch):
    mirrored = [[-value for value in values] for values in epoch]
    there, here = observed([epoch]), observed([mirrored])
    assert here.slower.value == pytest.approx(there.faster.value, abs=1e-12)
    assert here.faster.value == pytest.approx(there.slower.value, abs=1e-12)


@given(EPOCH)
def test_centre_lies_among_the_launches(epoch):
    found = level(dict(enumerate(epoch)), [epoch], PRIOR)
    values = [value for sitting in epoch for value in sitting]
    assert min(values) - 1e-9 <= found.centre <= max(values) + 1e-9
