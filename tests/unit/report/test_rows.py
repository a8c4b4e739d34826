"""Words of the page: the heading of a test, names of the other side, provenance and totals."""

import pytest

from pytest_aorta.report.data import Case, Launch
from pytest_aorta.report.page.rows import (
    Finding,
    compared_with,
    findings,
    largest_change,
    notable,
    provenance,
    unremarkable,
)
from pytest_aorta.session.record import Comparison
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Note, ReferenceKind, VerdictReference
from tests.unit.builders import (
    CAUGHT,
    make_baseline,
    make_facts,
    make_provenance,
    make_result,
    make_test,
    make_verdict,
    replace,
)


@pytest.mark.parametrize(
    ("reference", "baseline", "text"),
    [
        (VerdictReference(ReferenceKind.BASELINE, "file.json", 2), 1.0, "stored baseline\xa02"),
        (VerdictReference(ReferenceKind.BASELINE, "file.json"), None, "no stored baseline"),
        (VerdictReference(ReferenceKind.AB, "main"), 1.0, "A/B reference main"),
        (VerdictReference(ReferenceKind.AB), 1.0, "A/B reference"),
        (VerdictReference(ReferenceKind.RESULTS, "old"), 1.0, "results old"),
    ],
)
def test_other_side_of_a_verdict_is_named(reference, baseline, text):
    assert compared_with(make_verdict(Outcome.PASS, reference=reference, baseline=baseline)) == text


FAILED = make_verdict(Outcome.REGRESSION, delta=0.0831, low=0.06, high=0.1)


def test_heading_of_a_test_names_what_was_found_and_counts_the_rest():
    verdicts = (
        make_verdict(Outcome.NOT_APPLICABLE, metric="overlap_ratio"),
        make_verdict(Outcome.PASS, metric="num_parameters"),
        make_verdict(CAUGHT, metric="weight_hash"),
        make_verdict(Outcome.MISSING, metric="peak_memory_bytes"),
        FAILED,
        make_verdict(Outcome.REGRESSION, metric="step_time_p99", delta=-0.5),
    )
    test = make_test("a::b", "failed", Case("c", verdicts))
    assert notable(test) == [
        (Outcome.REGRESSION, ["step_time_p50 +8.3%", "step_time_p99 -50.0%"]),
        (Outcome.MISSING, ["peak_memory_bytes"]),
    ]
    assert unremarkable(test) == "1 expected regression, 1 pass, 1 not applicable"
    assert largest_change(test) == 10.0
    assert largest_change(make_test("a::c", "failed")) == 0.0


def test_page_begins_with_the_failure_its_causes_and_the_wait_for_each_rank():
    facts = [make_facts(rank_lag_ms=[-1.0, lag_ms]) for lag_ms in (1.0, 2.0, 9.0)]
    case = Case("c", (FAILED,), tuple(Launch(1, make_result([[1.0]]), launch) for launch in facts))
    comparison = Comparison("a::b::c", rows=(FAILED,), notes=(Note("others wait"),), suspect=1)
    test = make_test("a::b", "failed", case, failure="Regression: step_time_p50\n  measured  toy")
    late = replace(test, record=test.record.replace(comparisons=(comparison,)))
    retried, passed = make_test("a::c", "rerun", Case("c", (FAILED,))), make_test("a::d", "passed")
    assert list(findings([late, retried, passed])) == [
        Finding(0, "a::b", "Regression: step_time_p50", ["others wait"], 1, [0.0, 2.0])
    ]


def test_page_begins_with_what_explains_each_finding_before_a_hint():
    rows = (
        make_verdict(Outcome.INCONCLUSIVE, detail="rank 1 is late"),
        make_verdict(Outcome.REGRESSION, metric="host_copies", detail="+ aten::_local_scalar_dense x 1"),
        make_verdict(Outcome.PASS, metric="operators", detail="+ aten::item x 1"),
        make_verdict(Outcome.MISSING, metric="flops", detail="no baseline"),
    )
    test = make_test("a::b", "failed", Case("c", rows), failure="Missing: no baseline")
    comparison = Comparison("a::b::c", rows=rows, notes=(Note("--aorta-locate launches once more"),))
    (found,) = findings([replace(test, record=test.record.replace(comparisons=(comparison,)))])
    assert found.causes == [
        "host_copies: + aten::_local_scalar_dense x 1",
        "step_time_p50: rank 1 is late",
        "--aorta-locate launches once more",
    ]


def measured(**changes) -> Launch:
    result = make_result([[10.0, 11.0]], provenance=make_provenance(**changes))
    return Launch(1, result, result.facts)


def test_provenance_lists_each_value_once_and_the_first_and_last_time():
    launches = (
        measured(measured_at="2026-01-02T03:04:06Z", command=["pytest", "-k", "a b"]),
        measured(measured_at="2026-01-02T03:04:05Z", command=["pytest", "-k", "a b"], dirty=True),
    )
    reference = measured(commit="beef" * 10, branch=None, dirty=False)
    case = Case("c", (), launches, (reference,), make_baseline(), "A/B reference main")
    table = provenance([case], "candidate")
    assert list(table) == ["candidate", "A/B reference main", "stored baseline\xa01"]
    candidate = table["candidate"]
    assert tuple(candidate) == ("commit", "branch", "measured", "device", "torch", "command")
    assert candidate["commit"] == "c0ffee00c0ff; c0ffee00c0ff and changes"
    assert candidate["measured"] == "2026-01-02T03:04:05Z to 2026-01-02T03:04:06Z"
    assert (candidate["branch"], candidate["command"]) == ("main", "pytest -k 'a b'")
    reference_shown = table["A/B reference main"]
    assert (reference_shown["commit"], reference_shown["branch"]) == ("beefbeefbeef", "none (detached head)")
    assert list(provenance([case], "candidate", has_baseline=False)) == ["candidate", "A/B reference main"]
