"""Words of the page: the heading of a test, names of the other side, provenance and totals."""

import re

import pytest

from pytest_aorta.report.page.rows import (
    case_plots,
    compared_with,
    failing_first,
    notable,
    provenance,
    sparkline,
    unremarkable,
)
from pytest_aorta.report.timeline import waits_drawing
from pytest_aorta.result.series import SeriesFacts
from pytest_aorta.session.record import Comparison
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Note, NoteKind, ReferenceKind, VerdictReference
from tests.unit.builders import (
    CAUGHT,
    MISSING,
    NOT_APPLICABLE,
    PASS,
    REGRESSION,
    baseline_of,
    make_baseline,
    make_case,
    make_facts,
    make_provenance,
    make_report,
    make_result,
    make_test,
    make_verdict,
    replace,
    stored,
)


@pytest.mark.parametrize(
    ("reference", "baseline", "text"),
    [
        (VerdictReference(ReferenceKind.BASELINE, "file.json", 2), 1.0, "stored baseline\xa02"),
        (VerdictReference(ReferenceKind.BASELINE, "file.json"), None, "no stored baseline"),
        (VerdictReference(ReferenceKind.AB, "main"), 1.0, "A/B reference main"),
        (VerdictReference(ReferenceKind.AB), 1.0, "A/B reference"),
    ],
)
def test_other_side_of_a_verdict_is_named(reference, baseline, text):
    assert compared_with(make_verdict(PASS, reference=reference, baseline=baseline)) == text


FAILED = make_verdict(REGRESSION, delta=0.0831, low=0.06, high=0.1)


@pytest.mark.parametrize("outcome", Outcome)
def test_every_outcome_has_a_place_in_the_order_of_tests(outcome):
    test = make_test("a::b", "failed", make_case(make_verdict(outcome), FAILED))
    assert failing_first(make_report(test)) == [0]


def test_heading_of_a_test_names_what_was_found_and_counts_the_rest():
    verdicts = (
        make_verdict(NOT_APPLICABLE, metric="overlap_ratio"),
        make_verdict(PASS, metric="num_parameters"),
        make_verdict(CAUGHT, metric="weight_hash"),
        make_verdict(MISSING, metric="peak_memory_bytes"),
        FAILED,
        make_verdict(REGRESSION, metric="step_time_p99", delta=-0.5),
    )
    test = make_test("a::b", "failed", make_case(*verdicts))
    assert notable(test) == [
        (REGRESSION, ["step_time_p50 +8.3%", "step_time_p99 -50.0%"]),
        (MISSING, ["peak_memory_bytes"]),
    ]
    assert unremarkable(test).count("1 ") == 3


RAISED = "the batch is 4, was 8\nRegression: step_time_p50\n  measured  toy"


@pytest.mark.parametrize(
    ("failing", "failure", "opening", "evidence"),
    [
        (("step_time_p50",), RAISED, ["the batch is 4, was 8"], "Regression: step_time_p50\n  measured  toy"),
        ((), "hang in all_gather\nlogs: x", ["hang in all_gather"], "logs: x"),
    ],
)
def test_entry_opens_with_what_was_edited_or_why_the_launch_failed(failing, failure, opening, evidence):
    notes = (Note("the batch is 4, was 8", NoteKind.EDIT), Note("others wait"))
    comparison = Comparison("a::b::c", rows=(FAILED,), notes=notes, failing=failing)
    test = make_test("a::b", "failed", failure=failure)
    test = replace(test, record=test.record.replace(comparisons=(comparison,)))
    assert (test.opening, test.evidence) == (opening, evidence)
    # What the text of the failure has is not shown again.
    assert test.record.unshown_notes == ([] if failing else [*notes])


def test_losses_of_both_sides_are_two_lines():
    here, there = (
        SeriesFacts(name="SGD", num_steps=2, is_main=True, loss=[{"1": 2.0, "2": last}]) for last in (4.0, 3.0)
    )
    launch = make_result([[1.0]]), make_facts(series=[here])
    case = make_case(launches=[launch], baseline=baseline_of(make_facts(series=[there])))
    plots = case_plots(case)
    assert plots["loss"]["steps"] == [1, 2]
    assert [line["values"] for line in plots["loss"]["lines"]] == [[2.0, 4.0], [2.0, 3.0]]
    assert plots["grad_norm"] is None


def test_waits_are_drawn_by_rank_over_the_last_steps_and_many_steps_share_a_bar():
    waits = [[1.0] * 240, [0.0, 3.0] * 120]
    result = make_result([[9.0] * 250] * 2, collective_ms=waits)
    case = make_case(launches=[(result, result.facts)])
    drawing = waits_drawing(case)
    assert (drawing.begin, drawing.end) == (11, 251)
    first, late = (row.bars[0] for row in drawing.rows)
    assert (first.spans[0], first.spans[-1]) == ((11, 13), (249, 251))
    assert ({*first.values}, {*late.values}) == ({1.0}, {1.5})


def test_history_of_a_metric_is_that_of_the_baseline_and_ends_with_the_launch():
    past = stored(*(make_facts(final_loss=loss) for loss in (1.0, 2.0)))
    launch = make_result([[1.0]]), make_facts(final_loss=3.0)
    case = make_case(launches=[launch], baseline=make_baseline(launches=past))
    assert sparkline(case, "final_loss") == [(0, 14), (30, 7), (60, 0)]
    assert sparkline(case, "weight_hash") == sparkline(make_case(launches=[launch]), "final_loss") == []


def measured(**changes):
    result = make_result([[10.0, 11.0]], provenance=make_provenance(**changes))
    return result, result.facts


def test_provenance_lists_each_value_once_and_the_first_and_last_time():
    launches = (
        measured(measured_at="2026-01-02T03:04:06Z", command=["pytest", "-k", "a b"]),
        measured(measured_at="2026-01-02T03:04:05Z", command=["pytest", "-k", "a b"], dirty=True),
    )
    reference = measured(commit="beef" * 10, branch=None, dirty=False)
    row = make_verdict(PASS, reference=VerdictReference(ReferenceKind.AB, "main"))
    case = make_case(row, launches=launches, reference=[reference], baseline=make_baseline())
    table = provenance([case])
    assert list(table) == ["candidate", "A/B reference main", "stored baseline\xa01"]
    candidate = table["candidate"]
    assert tuple(candidate) == ("commit", "branch", "measured", "device", "torch", "command")
    assert candidate["commit"].endswith("c0ffee00c0ff and changes")
    assert re.search("03:04:05Z .* 2026-01-02T03:04:06Z", candidate["measured"])
    assert (candidate["branch"], candidate["command"]) == ("main", "pytest -k 'a b'")
    reference_shown = table["A/B reference main"]
    assert (reference_shown["commit"], "detached" in reference_shown["branch"]) == ("beefbeefbeef", True)
    assert list(provenance([case], has_baseline=False)) == ["candidate", "A/B reference main"]
