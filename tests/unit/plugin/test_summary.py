"""The section `aorta` of the terminal summary."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.plugin.summary import summary_lines
from pytest_aorta.session.record import Comparison, TestRecord, totals
from pytest_aorta.verdict.learning import NewLaunches
from pytest_aorta.verdict.metrics import Tolerance
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import NotApplicable, ReferenceKind, VerdictReference
from tests.unit.builders import compared, make_baseline, make_facts, make_record, make_verdict, ran, replace

CASE = "tests/test_a.py::test_x::fsdp"
PASS = make_verdict(Outcome.PASS, case=CASE)
EXACT = replace(PASS, metric="weight_hash", tolerance=Tolerance(None))
FINDINGS = [
    make_verdict(outcome, case=CASE)
    for outcome in (Outcome.REGRESSION, Outcome.MISSING, Outcome.INCONCLUSIVE, Outcome.IMPROVED)
]


def record(*verdicts, **changes) -> TestRecord:
    return make_record("tests/test_a.py::test_x", verdicts, **changes)


def not_applicable(reason: NotApplicable, detail: str = "torch is 1"):
    return replace(PASS, outcome=Outcome.NOT_APPLICABLE, not_applicable=reason, detail=detail)


def rows(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("test_a::")]


def test_run_without_a_finding_is_one_line_that_counts_what_matched():
    first = record(PASS, EXACT, *[not_applicable(NotApplicable.NOT_REPRODUCIBLE)] * 2)
    assert summary_lines([first, record(EXACT)]) == [
        "aorta: 2 tests, 3 metrics match (2 exact, 1 within tolerance); "
        "2 not compared: step_time_p50 (bitwise comparison needs deterministic mode) [-v for the table]"
    ]


def test_each_reason_of_not_applicable_is_given_once_with_its_metrics():
    differing = [not_applicable(NotApplicable.ENVIRONMENT, f"torch is {number}") for number in range(3)]
    line = totals([record(PASS, not_applicable(NotApplicable.OLD_CPU_TIMES), *differing)])
    assert line.endswith(
        "; 4 not compared: step_time_p50 (times of CPU ranks need a baseline of this hour and machine), "
        "step_time_p50 (bitwise comparison needs the same versions and device)"
    )


def test_run_in_which_nothing_could_be_compared_says_that_no_metric_matches():
    assert totals([record(not_applicable(NotApplicable.LAUNCHER))]).startswith(
        "1 test, 0 metrics match; 1 not compared: "
    )


@pytest.mark.parametrize("finding", FINDINGS, ids=[row.outcome.value for row in FINDINGS])
def test_finding_has_a_row_and_a_count(finding):
    lines = summary_lines([record(PASS, finding), record(PASS)])
    [row] = rows(lines)
    assert row.endswith(finding.outcome.value)
    assert f" 1 {finding.outcome}, 2 metrics match (2 within tolerance) [-v" in lines[-1]


def test_verbose_summary_has_every_row_and_note():
    found = record(PASS, not_applicable(NotApplicable.ENVIRONMENT), notes=["slow"])
    lines = summary_lines([found], 1)
    assert len(rows(lines)) == 2
    assert "note: test_a::test_x: slow" in lines
    assert "-v" not in lines[-1]
    assert not rows(summary_lines([found]))


def test_quiet_summary_is_one_line_whatever_happened():
    assert summary_lines([record(*FINDINGS, notes=["slow"], launches=ran(1, traces=["a trace"]))], -1) == [
        "aorta: 1 test, 1 regression, 1 missing, 1 inconclusive, 1 improved, 0 metrics match"
    ]


def test_row_of_a_failed_test_does_not_repeat_its_failure():
    regression = replace(FINDINGS[0], detail="rank 1 is throttled")
    failure = f"toy failed:\n  {regression}\n  slow\n"
    lines = summary_lines([record(regression, outcome="failed", failure=failure, notes=["slow"])])
    assert "throttled" not in "".join(lines)
    assert not [line for line in lines if line.startswith("note: ")]
    assert lines[-1].endswith(" [-v for the table]")


@pytest.mark.parametrize("outcome", ["failed", "error", "xfailed", "rerun", "passed"])
def test_what_a_failure_does_not_say_or_pytest_does_not_print_is_in_the_row(outcome):
    improved = replace(FINDINGS[3], detail="the baseline is stale")
    failure = "the baseline is stale; fast" if outcome in ("xfailed", "rerun") else "broken teardown"
    lines = summary_lines([record(improved, outcome=outcome, failure=failure, notes=["fast"])])
    assert rows(lines)[0].endswith("improved: the baseline is stale")
    assert [line for line in lines if line.startswith("note: ")]


def test_finding_of_a_test_that_passed_has_its_reason_and_notes():
    lines = summary_lines([record(replace(FINDINGS[3], detail="the baseline is stale"), notes=["fast"])])
    assert rows(lines)[0].endswith("improved: the baseline is stale")
    assert "note: test_a::test_x: fast" in lines


def test_notes_that_only_verbosity_shows_are_counted():
    assert summary_lines([record(PASS, notes=["a", "b"])])[-1].endswith(" [-v for the table and 2 notes]")


def test_traces_are_always_named():
    assert "note: test_a::test_x: trace in out" in summary_lines(
        [record(PASS, launches=ran(1, traces=["trace in out"]))]
    )


def test_metrics_without_a_baseline_share_a_row_per_comparison():
    unrecorded = replace(FINDINGS[1], is_unrecorded=True, reference=VerdictReference(ReferenceKind.BASELINE))
    lost = replace(FINDINGS[1], metric="weight_hash")
    shown = rows(summary_lines([record(unrecorded, unrecorded, lost, replace(unrecorded, case="b.py::y::z"))]))
    assert [row.split()[1] for row in shown if row.startswith("test_a")] == ["weight_hash", "2"]
    assert "record one with --update-baselines" in shown[-1]


def test_expected_regression_is_counted_and_is_no_finding():
    lines = summary_lines([record(PASS, replace(FINDINGS[0], is_expected=True))])
    assert lines == ["aorta: 1 test, 1 metric matches (1 within tolerance); 1 regression expected [-v for the table]"]
    [row] = [line for line in summary_lines([record(replace(FINDINGS[0], is_expected=True))], 1) if "test_a" in line]
    assert row.endswith("expected regression")


def test_finding_of_a_retried_attempt_has_its_row_and_counts_as_an_attempt():
    retried = record(FINDINGS[0], outcome="rerun")
    lines = summary_lines([retried, record(PASS, attempt=2)])
    assert [row.split()[:3] for row in rows(lines)] == [["test_a::test_x::fsdp", "(attempt", "1)"]]
    assert "1 test, 2 launches, 1 metric matches (1 within tolerance); 1 attempt retried" in lines[-1]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "1 test; 1 test without a comparison"),
        ({"launches": ran(3)}, "1 test, 3 launches; 1 test without a comparison"),
        ({"outcome": "failed"}, "1 test; 1 test failed without a verdict"),
        ({"outcome": "error"}, "1 test; 1 test failed without a verdict"),
        (
            {"outcome": "failed", "launches": (), "can_launch": True},
            "no test launched; 1 test failed before a launch",
        ),
        ({"launches": (), "lacked_devices": "2"}, "no test launched; 1 test skipped for lack of devices"),
        ({"comparisons": (Comparison("case", new=NewLaunches(make_baseline())),)}, "1 test; 1 baseline measured"),
    ],
)
def test_test_without_a_verdict_is_counted_by_what_became_of_it(changes, text):
    assert totals([record(**changes)]) == text


@given(st.lists(st.lists(st.sampled_from([PASS, EXACT, *FINDINGS, not_applicable(NotApplicable.LAUNCHER)]))))
def test_every_verdict_is_counted_once(verdicts):
    records = [record(*given) for given in verdicts]
    head = totals(records).partition(" (")[0] + totals(records).partition(")")[2]
    numbers = [int(word) for word in head.replace(";", ",").split() if word.isdigit()]
    idle = sum(not given for given in verdicts)
    assert sum(numbers) == len(verdicts) + sum(map(len, verdicts)) + idle


def test_verbose_summary_has_what_was_measured_and_not_compared():
    facts = make_facts(weight_hashes={"20": "ab" * 16}, metrics={"device_idle_ms": 3.33462})
    measured = record(comparisons=(compared(CASE, facts, rows=(PASS,)),))
    shown = [line.split() for line in summary_lines([measured], 1)]
    assert ["test_a::test_x::fsdp", "device_idle_ms", "3.335", "ms", "-", "-", "-", "-", "measured"] in shown
    assert ["test_a::test_x::fsdp", "weight_hash", "abababababab", "-", "-", "-", "-", "measured"] in shown
    assert sum("step_time_p50" in row for row in shown) == 1
    assert not any("device_idle_ms" in line for line in summary_lines([measured]))
