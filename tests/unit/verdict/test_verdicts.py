from __future__ import annotations

import msgspec
import pytest

from pytest_aorta.common.model import decode
from pytest_aorta.verdict.metrics import Origin, Tolerance
from pytest_aorta.verdict.statistics.decision import Outcome, Scale
from pytest_aorta.verdict.verdicts import (
    Missing,
    NotApplicable,
    ReferenceKind,
    Verdict,
    VerdictReference,
    Verdicts,
    format_change,
)
from tests.unit.builders import make_verdict

REGRESSION = make_verdict(
    Outcome.REGRESSION, value=11.0, baseline=10.0, delta=0.1, low=0.08, high=0.1204, launches=3, detail="why"
)


def test_verdict_is_one_line_with_everything_it_was_made_from():
    assert str(REGRESSION) == (
        "step_time_p50: regression: 11 ms, baseline 10 ms, change +10.0% [+8.00%, +12.0%], tolerance 5%, "
        "3 launches (why)"
    )


def test_verdict_of_one_launch_without_a_change_names_neither():
    assert str(make_verdict(Outcome.MISSING, baseline=None)) == (
        "step_time_p50: missing: 1 ms, baseline -, tolerance 5%"
    )


def test_verdict_of_an_a_b_names_the_reference_and_its_version():
    row = make_verdict(Outcome.PASS, detail="why", reference=VerdictReference(ReferenceKind.AB, "main"))
    assert row.is_by_ab
    assert str(row) == "step_time_p50: pass: 1 ms, reference 1 ms, tolerance 5% (A/B with main, why)"


def test_verdict_of_two_variants_names_no_version():
    row = make_verdict(Outcome.PASS, delta=0.0, reference=VerdictReference(ReferenceKind.AB))
    assert str(row) == "step_time_p50: pass: 1 ms, reference 1 ms, change +0.00%, tolerance 5%"


def test_cells_are_the_summarys_columns():
    assert REGRESSION.cells() == (
        "step_time_p50", "11 ms", "10 ms", "+10.0% [+8.00%, +12.0%]", "5%", "3", "regression"
    )  # fmt: skip


def test_exact_numbers_are_shown_whole():
    row = make_verdict(
        Outcome.REGRESSION, metric="num_parameters", tolerance=Tolerance(None), value=1234567.0, baseline=1234568.0
    )
    assert row.cells()[1:3] == ("1,234,567", "1,234,568")


def test_change_without_an_interval_is_shown_alone():
    assert make_verdict(Outcome.PASS, delta=-0.5).change == "-50.0%"


@pytest.mark.parametrize(
    ("relative", "text"),
    [(0.0123, "+1.23%"), (-0.0999, "-9.99%"), (0.09996, "+10.0%"), (5.0, "+500.0%"), (12.0, "+1200%")],
)
def test_change_has_the_decimals_that_count(relative, text):
    assert format_change(relative) == text


@pytest.mark.parametrize("outcome", Outcome)
def test_verdict_survives_json(outcome):
    row = make_verdict(
        outcome,
        tolerance=Tolerance(0.02, Scale.OF_STEP, Origin.WIDENED),
        reference=VerdictReference(ReferenceKind.BASELINE, "baselines/a.json", 3),
        missing=Missing.BASELINE_VALUE,
        detail="why",
        delta=0.5,
        low=0.25,
        high=0.75,
        launches=5,
        is_open=True,
    )
    assert decode(msgspec.json.encode(row), Verdict, "row") == row


def test_regression_always_fails_and_missing_where_it_shall():
    rows = tuple(map(make_verdict, (Outcome.REGRESSION, Outcome.MISSING, Outcome.NOT_APPLICABLE)))
    verdicts = Verdicts("case", rows)
    assert verdicts.failing({Outcome.MISSING}) == list(rows[:2])
    assert verdicts.failing() == [rows[0]]


@pytest.mark.parametrize("outcome", sorted(set(Outcome) - {Outcome.PASS, Outcome.REGRESSION}))
def test_each_other_outcome_fails_where_it_is_listed_and_only_there(outcome):
    verdicts = Verdicts("case", tuple(map(make_verdict, Outcome)))
    assert {row.outcome for row in verdicts.failing({outcome})} == {Outcome.REGRESSION, outcome}


@pytest.mark.parametrize(
    ("reason", "origin", "fails"),
    [
        (NotApplicable.UNMARKED_CPU_TIMES, Origin.DEFAULT, False),
        (NotApplicable.NOT_REPRODUCIBLE, Origin.DEFAULT, False),
        (NotApplicable.NOT_REPRODUCIBLE, Origin.MARKER, True),
        (NotApplicable.NOT_REPRODUCIBLE, Origin.COMPARE, True),
        (NotApplicable.ENVIRONMENT, Origin.DEFAULT, True),
        (NotApplicable.OLD_CPU_TIMES, Origin.MARKER, True),
    ],
)
def test_metric_whose_comparison_nothing_asks_for_does_not_fail_where_not_applicable_is_listed(reason, origin, fails):
    row = make_verdict(Outcome.NOT_APPLICABLE, not_applicable=reason, tolerance=Tolerance(None, origin=origin))
    assert Verdicts("case", (row,)).failing({Outcome.NOT_APPLICABLE}) == [row] * fails


def test_metric_that_the_launch_lost_fails_also_where_missing_baselines_do_not():
    lost = make_verdict(Outcome.MISSING, value=None, missing=Missing.CANDIDATE_VALUE)
    verdicts = Verdicts("case", (make_verdict(Outcome.MISSING), lost))
    assert verdicts.failing() == [lost]


def test_verdict_of_a_metric_that_was_not_compared_is_an_error_that_names_the_others():
    with pytest.raises(KeyError, match=r"step_time_p5 .*\['step_time_p50'\]"):
        Verdicts("case", (make_verdict(Outcome.PASS),))["step_time_p5"]


OPEN = make_verdict(Outcome.INCONCLUSIVE, metric="step_time_mean", is_open=True)


def test_open_verdict_needs_launches():
    assert Verdicts("case", (make_verdict(Outcome.PASS), OPEN)).need_launches
    assert not Verdicts("case", (make_verdict(Outcome.PASS), make_verdict(Outcome.INCONCLUSIVE))).need_launches


@pytest.mark.parametrize(
    "red",
    [make_verdict(Outcome.REGRESSION), make_verdict(Outcome.MISSING, value=None, missing=Missing.CANDIDATE_VALUE)],
)
def test_test_that_fails_anyhow_needs_no_more_launches(red):
    assert not Verdicts("case", (red, OPEN)).need_launches


def test_open_verdicts_are_not_among_the_decided():
    decided = make_verdict(Outcome.PASS)
    assert Verdicts("case", (decided, OPEN)).decided == {"step_time_p50": decided}
