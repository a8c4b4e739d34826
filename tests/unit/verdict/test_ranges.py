"""Verdicts on values that are not positive."""

from __future__ import annotations

from pytest_aorta.verdict.metrics import Tolerance
from pytest_aorta.verdict.statistics.decision import Outcome
from tests.unit.builders import make_baseline, make_facts, stored
from tests.unit.verdict.compared import check

LOSS = {"final_loss": Tolerance(0.05)}


def check_losses(here, there, max_launches=5):
    baseline = make_baseline(launches=stored(*[make_facts(final_loss=value) for value in there]))
    facts = [make_facts(final_loss=value) for value in here]
    return check(*facts, baseline=baseline, marked=LOSS, max_launches=max_launches)["final_loss"]


SIGNED = [-1.0, 0.0, 1.0, -0.5, 0.5, -0.7, 0.7, 0.2, -0.2, 0.1]


def test_value_that_is_not_positive_passes_within_the_baselines_range():
    row = check_losses([0.9], SIGNED)
    assert (row.outcome, row.delta, row.reason) == (
        Outcome.PASS,
        None,
        "values are not positive, so their ranges are compared",
    )


def test_value_beyond_the_range_of_signed_ones_asks_for_launches_until_it_can_be_no_chance():
    seen = [check_losses([1.5, 1.6, 1.7, 1.8, 1.9][:count], SIGNED) for count in range(1, 6)]
    assert [row.outcome for row in seen] == [Outcome.INCONCLUSIVE] * 4 + [Outcome.REGRESSION]
    assert [row.is_open for row in seen] == [True] * 4 + [False]


def test_signed_value_below_the_range_improves():
    assert check_losses([-1.5, -1.6, -1.7, -1.8, -1.9], SIGNED).outcome is Outcome.IMPROVED


def test_three_launches_beyond_a_single_one_can_be_chance():
    assert check_losses([-0.7, -0.5, -0.6], [-1.0], max_launches=3).outcome is Outcome.INCONCLUSIVE


def test_signed_value_that_never_varies_needs_three_launches():
    assert check_losses([0.5] * 2, [0.0] * 3).outcome is Outcome.INCONCLUSIVE
    assert check_losses([0.5] * 3, [0.0] * 3).outcome is Outcome.REGRESSION
    assert check_losses([0.0], [0.0] * 3).outcome is Outcome.PASS


def test_signed_value_within_its_tolerance_passes():
    assert check_losses([-99.0], [-100.0] * 3).outcome is Outcome.PASS


def test_one_outlier_among_signed_values_does_not_fail():
    assert check_losses([0.1, 0.2, 99.0], SIGNED).outcome is Outcome.PASS
