from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pytest_aorta.decision import Outcome, decide
from pytest_aorta.metrics import EXACT, METRICS, Tolerance

LOWER, HIGHER, HASH = METRICS["step_time_p50"], METRICS["tokens_per_s"], METRICS["weight_hash"]
FIVE_PERCENT = Tolerance(0.05)
POSITIVE = st.floats(1e-3, 1e9)


@pytest.mark.parametrize(
    ("metric", "value", "outcome"),
    [
        (LOWER, 106.0, Outcome.REGRESSION),
        (LOWER, 104.0, Outcome.PASS),
        (LOWER, 96.0, Outcome.PASS),
        (LOWER, 94.0, Outcome.IMPROVED),
        (HIGHER, 106.0, Outcome.IMPROVED),
        (HIGHER, 104.0, Outcome.PASS),
        (HIGHER, 96.0, Outcome.PASS),
        (HIGHER, 94.0, Outcome.REGRESSION),
    ],
)
def test_change_beyond_tolerance_is_judged_by_the_metrics_direction(metric, value, outcome):
    assert decide(metric, value, [100.0], FIVE_PERCENT).outcome is outcome


def test_change_of_just_the_tolerance_passes():
    assert decide(LOWER, 1.5, [1.0], Tolerance(0.5)).outcome is Outcome.PASS


def test_delta_is_relative_and_positive_where_the_value_is_larger():
    assert decide(HIGHER, 150.0, [100.0], FIVE_PERCENT).delta == 0.5
    assert decide(LOWER, 50.0, [100.0], FIVE_PERCENT).delta == -0.5


def test_negative_baseline_keeps_the_sign_of_the_change():
    decision = decide(METRICS["final_loss"], -90.0, [-100.0], FIVE_PERCENT)
    assert (decision.outcome, decision.delta) == (Outcome.REGRESSION, pytest.approx(0.1))


def test_centre_of_several_launches_is_their_median():
    decision = decide(LOWER, 100.0, [100.0, 101.0, 900.0], FIVE_PERCENT)
    assert (decision.outcome, decision.baseline) == (Outcome.PASS, 101.0)


def test_equal_hash_passes_and_another_is_a_regression_that_shows_it():
    assert decide(HASH, "aa", ["aa", "aa"], EXACT).outcome is Outcome.PASS
    decision = decide(HASH, "aa", ["aa", "bb"], EXACT)
    assert (decision.outcome, decision.baseline, decision.delta) == (Outcome.REGRESSION, "bb", None)


def test_exact_number_differs_in_its_last_bit():
    assert decide(METRICS["final_loss"], math.nextafter(1.0, 2.0), [1.0], EXACT).outcome is Outcome.REGRESSION


@pytest.mark.parametrize(
    ("metric", "value", "outcome"),
    [
        (LOWER, 0.0, Outcome.PASS),
        (LOWER, 1e-9, Outcome.REGRESSION),
        (HIGHER, 1e-9, Outcome.IMPROVED),
        (HIGHER, 0.0, Outcome.PASS),
        (METRICS["final_loss"], -1.0, Outcome.IMPROVED),
    ],
)
def test_zero_baseline_is_judged_by_direction_and_has_no_relative_change(metric, value, outcome):
    decision = decide(metric, value, [0.0], FIVE_PERCENT)
    assert (decision.outcome, decision.baseline, decision.delta) == (outcome, 0.0, None)


def test_empty_baseline_is_an_error():
    with pytest.raises(ValueError, match="at least one baseline value"):
        decide(LOWER, 1.0, [], FIVE_PERCENT)


@pytest.mark.parametrize("metric", [LOWER, HIGHER])
def test_value_that_is_no_number_never_passes(metric):
    assert decide(metric, math.nan, [100.0], FIVE_PERCENT).outcome is Outcome.REGRESSION


@given(st.sampled_from([LOWER, HIGHER]), POSITIVE, st.floats(0.001, 10.0), st.floats(-0.99, 0.99))
def test_change_within_tolerance_is_never_a_regression(metric, centre, relative, share):
    decision = decide(metric, centre * (1 + relative * share), [centre], Tolerance(relative))
    assert decision.outcome is Outcome.PASS


@given(st.sampled_from([LOWER, HIGHER]), POSITIVE, POSITIVE, st.floats(0.001, 0.99))
def test_change_is_a_regression_one_way_only(metric, value, centre, relative):
    there = decide(metric, value, [centre], Tolerance(relative)).outcome
    back = decide(metric, centre, [value], Tolerance(relative)).outcome
    assume(Outcome.PASS not in (there, back))
    assert {there, back} == {Outcome.REGRESSION, Outcome.IMPROVED}
