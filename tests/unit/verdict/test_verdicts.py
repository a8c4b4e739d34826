"""Metrics and verdicts."""

import pytest

from pytest_aorta.result.series import SeriesFacts
from pytest_aorta.verdict.metrics import METRICS, Origin, Tolerance, format_value
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import (
    Decided,
    Missing,
    MissingPart,
    NotApplicable,
    Open,
    Reason,
    ReferenceKind,
    VerdictReference,
    Verdicts,
)
from tests.unit.builders import each_of, make_facts, make_verdict


@pytest.mark.parametrize(
    ("text", "relative"), [("5%", 0.05), ("0.5%", 0.005), ("1000%", 10.0), ("2 %", 0.02), ("007%", 0.07)]
)
def test_percentage_is_read_as_fraction(text, relative):
    assert METRICS["step_time_p50"].parse_tolerance(text).value == pytest.approx(relative)


@pytest.mark.parametrize(
    ("value", "unit", "exact", "text"),
    [
        (1048576.0, "B", True, "1,048,576 B"),
        (5.5470147132873535, "", True, "5.5470147132873535"),
        (1048576.0, "B", False, "1 MiB"),
        (68.0, "B", False, "68 B"),
        (35840.0, "", False, "35,840"),
        (1e9, "", False, "1.000e+09"),
    ],
)
def test_exact_values_are_shown_with_every_digit_that_can_differ(value, unit, exact, text):
    assert format_value(value, unit, exact=exact) == text


def test_loss_that_is_shown_is_that_of_the_last_step_in_any_order_of_the_file():
    series = SeriesFacts(name="SGD", num_steps=10, is_main=True, loss=[{"10": 1.0, "9": 2.0}])
    assert METRICS["loss"].measure(make_facts(series=[series])) == 1.0


REGRESSION = make_verdict(
    Outcome.REGRESSION, value=11.0, baseline=10.0, delta=0.1, low=0.08, high=0.1204, launches=3, detail="why"
)


@each_of(
    "row, text",
    {
        "regression": (REGRESSION, "Regression: step_time_p50 +10.0% (10 -> 11 ms, limit 5%); why"),
        "one launch without a change": (
            make_verdict(Outcome.MISSING, baseline=None, detail="why"),
            "Missing: step_time_p50, why",
        ),
        "A/B with a version": (
            make_verdict(Outcome.PASS, detail="why", reference=VerdictReference(ReferenceKind.AB, "main")),
            "Pass: step_time_p50 (1 -> 1 ms, limit 5%); A/B with main, why",
        ),
        "two variants": (
            make_verdict(Outcome.PASS, delta=0.0, reference=VerdictReference(ReferenceKind.AB)),
            "Pass: step_time_p50 +0.00% (1 -> 1 ms, limit 5%)",
        ),
    },
)
def test_verdict_is_one_line_with_everything_it_was_made_from(row, text):
    assert str(row) == text


def test_exact_numbers_are_shown_whole():
    row = make_verdict(
        Outcome.REGRESSION, metric="num_parameters", tolerance=Tolerance(None), value=1234567.0, baseline=1234568.0
    )
    assert row.both == "1,234,568 -> 1,234,567"


BY_DEFAULT = Tolerance(0.05, origin=Origin.DEFAULT)


def test_metric_that_a_marker_names_is_decided_or_fails_except_under_a_profiler():
    def failing(state, origin, **how):
        row = make_verdict(state, tolerance=Tolerance(0.05, origin=origin))
        return bool(Verdicts("case", (row,)).failing(**how))

    for reason in Reason:
        assert failing(NotApplicable(reason), Origin.MARKER) is (reason is not Reason.PROFILER)
        assert not failing(NotApplicable(reason), Origin.DEFAULT)
    asked = {"of_marked": {Outcome.INCONCLUSIVE}}
    assert failing(Decided(Outcome.INCONCLUSIVE), Origin.MARKER, **asked)
    assert not failing(Decided(Outcome.INCONCLUSIVE), Origin.DEFAULT, **asked)


@pytest.mark.parametrize("outcome", sorted(set(Outcome) - {Outcome.PASS, Outcome.REGRESSION}))
def test_each_other_outcome_fails_where_it_is_listed_and_only_there(outcome):
    verdicts = Verdicts("case", tuple(make_verdict(kind, tolerance=BY_DEFAULT) for kind in Outcome))
    assert {row.outcome for row in verdicts.failing({outcome})} == {Outcome.REGRESSION, outcome}


@pytest.mark.parametrize(
    ("reason", "origin", "fails"),
    [
        (Reason.UNMARKED_CPU_TIMES, Origin.DEFAULT, False),
        (Reason.NOT_REPRODUCIBLE, Origin.DEFAULT, False),
        (Reason.NOT_REPRODUCIBLE, Origin.MARKER, True),
        (Reason.NOT_REPRODUCIBLE, Origin.COMPARE, True),
        (Reason.ENVIRONMENT, Origin.DEFAULT, True),
        (Reason.OLD_CPU_TIMES, Origin.MARKER, True),
    ],
)
def test_unasked_metric_does_not_fail_where_not_applicable_is_listed(reason, origin, fails):
    row = make_verdict(NotApplicable(reason), tolerance=Tolerance(None, origin=origin))
    assert Verdicts("case", (row,)).failing({Outcome.NOT_APPLICABLE}) == [row] * fails


def test_verdict_of_a_metric_that_was_not_compared_is_an_error_that_names_the_others():
    with pytest.raises(KeyError, match=r"step_time_p5 .*\['step_time_p50'\]"):
        Verdicts("case", (make_verdict(Outcome.PASS),))["step_time_p5"]


OPEN = make_verdict(Open(), metric="step_time_mean")


@pytest.mark.parametrize(
    "red", [make_verdict(Outcome.REGRESSION), make_verdict(Missing(MissingPart.CANDIDATE_VALUE), value=None)]
)
def test_failing_test_needs_launches_only_for_another_metric_that_got_worse(red):
    assert not Verdicts("case", (red, OPEN)).need_launches
    assert not Verdicts("case", (red, OPEN.replace(delta=0.04))).need_launches
    assert Verdicts("case", (red, OPEN.replace(delta=3.24))).need_launches
