"""The section `aorta` of the terminal summary."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.plugin.summary import summary_lines
from pytest_aorta.session.record import Comparison, TestRecord, totals
from pytest_aorta.verdict.causes import notes_on
from pytest_aorta.verdict.learning import NewBaseline
from pytest_aorta.verdict.metrics import Tolerance
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import NotApplicable, Reason, ReferenceKind, VerdictReference
from tests.unit.builders import (
    UNRECORDED,
    compared,
    each_of,
    make_baseline,
    make_facts,
    make_record,
    make_verdict,
    ran,
    replace,
)

CASE = "tests/test_a.py::test_x::fsdp"
PASS = make_verdict(Outcome.PASS, case=CASE)
EXACT = replace(PASS, metric="weight_hash", tolerance=Tolerance(None))
FINDINGS = [
    make_verdict(outcome, case=CASE)
    for outcome in (Outcome.REGRESSION, Outcome.MISSING, Outcome.INCONCLUSIVE, Outcome.IMPROVED)
]


def record(*verdicts, **changes) -> TestRecord:
    return make_record("tests/test_a.py::test_x", verdicts, **changes)


def not_applicable(reason: Reason, detail: str = "torch is 1"):
    return replace(PASS, state=NotApplicable(reason), detail=detail)


def test_run_without_a_finding_is_one_line_that_counts_what_is_unchanged():
    first = record(PASS, EXACT, *[not_applicable(Reason.NOT_REPRODUCIBLE)] * 2, launches=ran(3))
    [line] = summary_lines([first, record(EXACT)])
    for part in ("2 tests OK", "3 metrics unchanged", "2 not compared (not deterministic)", "4 launches"):
        assert part in line


def test_what_was_not_compared_since_versions_differ_is_named():
    left_out = [not_applicable(Reason.ENVIRONMENT, "torch is 2"), not_applicable(Reason.HEAD_START)]
    [line] = summary_lines([record(PASS, *left_out, launches=ran(99)), *[record()] * 99], -1)
    assert "2 not compared (step_time_p50: torch is 2), " in line


def test_last_line_fits_a_terminal_whatever_happened():
    found = [record(*FINDINGS, *map(not_applicable, Reason), notes=["slow"]) for _ in range(12)]
    for verbosity in (-1, 0, 1):
        line = summary_lines(found, verbosity)[-1]
        assert line.startswith("aorta: 12 tests, 12 regressions, 12 missing, 12 inconclusive, 12 improved")
        assert len(line) < 120


@pytest.mark.parametrize("finding", FINDINGS, ids=[row.outcome.value for row in FINDINGS])
@pytest.mark.parametrize(("verbosity", "num_findings"), [(0, 1), (-1, 1), (-2, 0)])
def test_finding_has_a_line_and_a_count(finding, verbosity, num_findings):
    *lines, last = summary_lines([record(PASS, finding), record(PASS)], verbosity)
    assert lines[:1] == [f"test_a::test_x: {finding}"][:num_findings]
    assert last.startswith(f"aorta: 2 tests, 1 {finding.outcome}, 2 metrics unchanged, ")


def test_finding_that_the_failure_contains_is_not_repeated():
    regression = replace(FINDINGS[0], detail="rank 1 is throttled")
    [line] = summary_lines([record(regression, outcome="failed", has_raised=True, notes=["slow"])])
    assert line.startswith("aorta: 1 of 1 test failed, 1 regression, 0 metrics unchanged, ")


@pytest.mark.parametrize("outcome", ["failed", "error", "xfailed", "rerun", "passed"])
def test_what_a_failure_does_not_say_or_pytest_does_not_print_has_a_line(outcome):
    improved = FINDINGS[3]
    has_raised = outcome in ("xfailed", "rerun")
    lines = summary_lines([record(improved, outcome=outcome, has_raised=has_raised, notes=["fast"])])
    assert "; the baseline is stale; record " in lines[0]
    assert lines[1].endswith(": fast")


def test_notes_that_only_verbosity_shows_are_counted():
    assert summary_lines([record(PASS, notes=["a", "b"])])[-1].endswith(" [-v for 2 notes]")


def test_ranks_that_never_communicate_are_a_warning_without_verbosity():
    notes = notes_on([], [make_facts(optimizers="each rank trains alone", apart=True)], [], "baseline")[0]
    warning, last = summary_lines([record(PASS).replace(comparisons=(Comparison("case", rows=(PASS,), notes=notes),))])
    assert re.fullmatch("WARNING: .*each rank trains alone", warning)
    assert "[-v" not in last


def test_metrics_without_a_baseline_share_a_line_per_comparison():
    unrecorded = replace(
        FINDINGS[1], state=UNRECORDED, detail="none", reference=VerdictReference(ReferenceKind.BASELINE)
    )
    lost = replace(FINDINGS[1], metric="weight_hash")
    shown = summary_lines([record(unrecorded, unrecorded, lost)])
    assert "2 metrics, none; record one with --update-baselines" in shown[0]
    assert shown[1].endswith("weight_hash")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "1 test, 1 test without a comparison, 1 launch in"),
        ({"outcome": "failed"}, "1 of 1 test failed, 1 test failed without a verdict, 1 launch in"),
        ({"outcome": "error"}, "1 of 1 test failed, 1 test failed without a verdict, 1 launch in"),
        ({"outcome": "failed", "launches": (), "can_launch": True}, "no test launched, 1 test failed before a launch"),
        ({"launches": (), "lacked_devices": "2"}, "no test launched, 1 test skipped for lack of devices"),
        (
            {"comparisons": (Comparison("case", new=NewBaseline(make_baseline(), "")),)},
            "1 test OK, 1 baseline measured, 1",
        ),
    ],
)
def test_test_without_a_verdict_is_counted_by_what_became_of_it(changes, text):
    assert totals([record(**changes)]).startswith(text)


@given(st.lists(st.lists(st.sampled_from([PASS, EXACT, *FINDINGS, not_applicable(Reason.LAUNCHER)]))))
def test_every_verdict_is_counted_once(verdicts):
    counts = totals([record(*given) for given in verdicts]).rpartition(", ")[0].split(", ")[1:]
    idle = sum(not given for given in verdicts)
    assert sum(int(text.split()[0]) for text in counts) == sum(map(len, verdicts)) + idle


def test_verbose_summary_has_what_was_measured_and_not_compared():
    facts = make_facts(weight_hashes={"20": "ab" * 16}, metrics={"device_idle_ms": 3.33462})
    measured = record(comparisons=(compared(CASE, facts, rows=(PASS,)),))
    shown = [line.split() for line in summary_lines([measured], 1)]
    assert ["measured", "device_idle_ms", "3.335", "ms", "-"] in shown
    assert ["measured", "weight_hash", "abababababab", "-"] in shown
    assert sum("step_time_p50" in row for row in shown) == 1
    assert not any("device_idle_ms" in line for line in summary_lines([measured]))


SLOWER = FINDINGS[0]
AT_ONCE = {
    "all of three": ([[SLOWER, EXACT]] * 3, True),
    "two": ([[SLOWER]] * 2, False),
    "all but one": ([[SLOWER], [SLOWER], [SLOWER], [PASS]], False),
    "beside a test without times": ([[SLOWER], [SLOWER], [SLOWER], [EXACT]], True),
    "with other weights": ([[SLOWER], [SLOWER], [SLOWER, replace(SLOWER, metric="weight_hash")]], False),
    "by an A/B": ([[replace(SLOWER, reference=VerdictReference(ReferenceKind.AB, "main"))]] * 3, False),
}


@each_of("tests, is_told", AT_ONCE)
def test_tests_that_all_got_slower_at_once_tell_of_the_machine(tests, is_told):
    lines = summary_lines([record(*rows, platform="h200-x8") for rows in tests])
    assert any("all 3 tests with times on h200-x8 got slower at once" in line for line in lines) is is_told
