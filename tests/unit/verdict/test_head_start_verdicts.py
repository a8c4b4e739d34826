"""Verdicts on overlap where the host could not be ahead of the device."""

from __future__ import annotations

import pytest

from pytest_aorta.result.facts import LaunchFacts, launch_facts
from pytest_aorta.result.trace.profiled_steps import ANOTHER_RANK, FamilyTime, HeadStart
from pytest_aorta.session.record import Side
from pytest_aorta.session.rounds import in_pairs, settle, with_baseline
from pytest_aorta.verdict.baseline import Baseline
from pytest_aorta.verdict.comparison import PairedComparison, StoredComparison
from pytest_aorta.verdict.learning import launches_to_learn, objections
from pytest_aorta.verdict.metrics import METRICS
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Missing, Verdict
from tests.unit.builders import default_priors, make_baseline, make_facts, make_result, stored

CALL = "cudaStreamSynchronize in aten::item"
BLOCKED = make_facts(metrics={"overlap_ratio_as_run": 0.61, "exposed_comm_ms_as_run": 3.9}, blocked_by=CALL)
LATE = BLOCKED.replace(blocked_by="")
WAITS = f"a step waits for the device in {CALL}, so the host cannot run ahead; as run 0.61"
LARGE = "the trace of one profiled step has 412,345,678 bytes on the largest rank"
UNREAD = make_facts(overlap_problem=LARGE)
LATE_HOST = "the host was late in the profiled steps in spite of every head start; as run 0.61"
MARKED = {"overlap_ratio": METRICS["overlap_ratio"].parse_tolerance("4 points")}


def ahead(ratio: float) -> LaunchFacts:
    return make_facts(metrics={"overlap_ratio": ratio, "exposed_comm_ms": 10 * (1 - ratio)})


AHEAD = make_baseline(launches=stored(*[ahead(0.86 + number / 1000) for number in range(10)]))
NEVER = make_baseline(launches=stored(*[make_facts()] * 10))
SYNCHRONIZED = make_baseline(launches=stored(*[BLOCKED] * 10))
TOO_LARGE = make_baseline(launches=stored(*[UNREAD] * 10))


def compared(launches: list[LaunchFacts], baseline: Baseline | None, marked=None, max_launches=5) -> Verdict:
    comparison = StoredComparison("case", AHEAD.config, baseline, marked or {}, default_priors, max_launches)
    return comparison.judge(launches)["overlap_ratio"]


@pytest.mark.parametrize("marked", [{}, MARKED], ids=["default", "marked"])
@pytest.mark.parametrize(
    "baseline", [None, NEVER, SYNCHRONIZED, TOO_LARGE], ids=["none", "without overlap", "synchronized", "too large"]
)
@pytest.mark.parametrize(
    ("launch", "reason"), [(BLOCKED, WAITS), (LATE, LATE_HOST), (UNREAD, LARGE)], ids=["blocked", "late", "too large"]
)
def test_ratio_that_the_baseline_never_had_does_not_apply_with_the_reason(launch, reason, baseline, marked):
    row = compared([launch], baseline, marked)
    assert (row.outcome, row.detail, row.value) == (Outcome.NOT_APPLICABLE, reason, None)


@pytest.mark.parametrize("marked", [{}, MARKED], ids=["default", "marked"])
@pytest.mark.parametrize("launches", [[BLOCKED], [ahead(0.86), ahead(0.86), BLOCKED], [LATE, BLOCKED]])
def test_step_that_now_waits_for_the_device_fails_and_names_the_call(launches, marked):
    row = compared(launches, AHEAD, marked)
    assert (row.outcome, row.is_lost, row.detail) == (Outcome.MISSING, True, WAITS)
    assert (row.value, row.baseline) == (None, pytest.approx(0.8645))


@pytest.mark.parametrize("marked", [{}, MARKED], ids=["default", "marked"])
@pytest.mark.parametrize("launches", [[UNREAD], [ahead(0.86), ahead(0.86), UNREAD], [LATE, UNREAD]])
def test_step_whose_trace_is_now_too_large_fails_and_names_the_size(launches, marked):
    row = compared(launches, AHEAD, marked)
    assert (row.outcome, row.is_lost, row.detail) == (Outcome.MISSING, True, LARGE)
    assert (row.value, row.baseline) == (None, pytest.approx(0.8645))


@pytest.mark.parametrize("name", ["device_idle_ms", "kernel_ms"])
def test_every_metric_of_profiled_steps_names_the_trace_that_is_too_large(name):
    marked = {name: METRICS[name].parse_tolerance("5% of step" if name == "device_idle_ms" else "5%")}
    kernels = {"gemm": FamilyTime(3.0, 1.0)}
    known = make_baseline(launches=stored(*[make_facts(metrics={"device_idle_ms": 1.0}, kernels=kernels)] * 10))
    comparison = StoredComparison("case", known.config, known, marked, default_priors)
    row = comparison.judge([UNREAD])[name]
    assert (row.outcome, row.detail) == (Outcome.MISSING, LARGE)


def test_ratio_that_only_the_new_code_has_is_to_be_recorded():
    row = compared([ahead(0.86)], SYNCHRONIZED)
    assert (row.outcome, row.missing) == (Outcome.MISSING, Missing.BASELINE_VALUE)
    assert row.detail.startswith(f"the baseline has no overlap_ratio: {WAITS}; record it again with")


def settled(*launches: LaunchFacts, max_launches=5) -> tuple[Verdict, int]:
    left = list(launches[1:])
    comparison = StoredComparison("case", AHEAD.config, AHEAD, {}, default_priors, max_launches)
    found = settle(with_baseline(comparison, launches[0]), lambda side: left.pop(0))["overlap_ratio"]
    return found, len(launches) - len(left)


def test_late_host_is_launched_again_and_the_next_launch_decides():
    row, made = settled(LATE, ahead(0.86))
    assert (row.outcome, row.value, row.launches, made) == (Outcome.PASS, 0.86, 1, 2)


def test_regression_is_found_in_the_launches_whose_host_was_not_late():
    row, made = settled(ahead(0.3), LATE, ahead(0.3), ahead(0.31))
    assert (row.outcome, row.value, row.launches, made) == (Outcome.REGRESSION, 0.3, 3, 4)


@pytest.mark.parametrize("max_launches", [1, 2, 3, 5])
def test_host_that_is_always_late_is_inconclusive_after_the_last_launch(max_launches):
    row, made = settled(*[LATE] * 5, max_launches=max_launches)
    last_look = {1: 1, 2: 1, 3: 3, 5: 5}[max_launches]
    number = f"{last_look} of {last_look} launches" if last_look > 1 else "the launch"
    assert (row.outcome, row.is_open, made) == (Outcome.INCONCLUSIVE, False, last_look)
    assert (row.value, row.detail) == (None, f"no value of {number}: {LATE_HOST}")


def test_launches_that_are_too_few_without_the_late_ones_name_the_late_host():
    row, made = settled(ahead(0.3), ahead(0.3), LATE, LATE, LATE)
    assert (row.outcome, row.is_open, made) == (Outcome.INCONCLUSIVE, False, 5)
    assert row.detail == f"no value of 3 of 5 launches: {LATE_HOST}"


def paired(candidates: list[LaunchFacts], references: list[LaunchFacts], max_pairs=6) -> tuple[Verdict, int]:
    left = {Side.CANDIDATE: [*candidates], Side.REFERENCE: [*references]}
    comparison = PairedComparison("case", MARKED, default_priors, ["overlap_ratio"], max_pairs)
    verdicts = settle(in_pairs(comparison), lambda side: left[side].pop(0))
    return verdicts["overlap_ratio"], len(candidates) - len(left[Side.CANDIDATE])


def test_pair_with_a_late_host_is_left_out():
    same = [ahead(0.86)] * 4
    row, made = paired([LATE, *same], [*same[:1], LATE, *same])
    assert (row.outcome, row.launches, made) == (Outcome.PASS, 2, 4)
    row, made = paired([LATE] * 6, [ahead(0.86)] * 6)
    assert (row.outcome, row.is_open, made) == (Outcome.INCONCLUSIVE, False, 6)
    assert row.detail == f"no value of 6 of 12 launches: {LATE_HOST}"


@pytest.mark.parametrize(
    ("candidate", "reference", "outcome"),
    [
        (BLOCKED, ahead(0.86), Outcome.MISSING),
        (ahead(0.86), BLOCKED, Outcome.MISSING),
        (BLOCKED, BLOCKED, Outcome.NOT_APPLICABLE),
        (UNREAD, ahead(0.86), Outcome.MISSING),
        (ahead(0.86), UNREAD, Outcome.MISSING),
        (UNREAD, UNREAD, Outcome.NOT_APPLICABLE),
    ],
)
def test_step_without_overlap_in_one_version_of_a_pair_is_missing_and_in_both_does_not_apply(
    candidate, reference, outcome
):
    row, made = paired([candidate], [reference])
    reason = LARGE if UNREAD in (candidate, reference) else WAITS
    assert (row.outcome, row.detail, made) == (outcome, reason, 1)


@pytest.mark.parametrize(("launch", "baseline"), [(BLOCKED, SYNCHRONIZED), (UNREAD, TOO_LARGE)])
def test_launches_without_overlap_are_recorded_and_compare_with_themselves(launch, baseline):
    assert objections([launch] * 10, {}, default_priors) == []
    assert launches_to_learn({}, launch, 10) == 10
    assert compared([launch] * 10, baseline, max_launches=10).outcome is Outcome.NOT_APPLICABLE


def test_late_host_is_not_recorded_and_is_left_out_of_a_center_by_force():
    launches = [ahead(0.86 + number / 1000) for number in range(9)] + [LATE]
    assert objections(launches, {}, default_priors) == [
        f"overlap_ratio: launch 10 has no value: {LATE_HOST}",
        f"exposed_comm_ms: launch 10 has no value: {LATE_HOST.replace('0.61', '3.9 ms')}",
    ]
    forced = make_baseline(launches=stored(*launches))
    assert compared([ahead(0.86)], forced).outcome is Outcome.PASS
    assert compared([ahead(0.2)] * 3, forced).outcome is Outcome.REGRESSION


def test_facts_name_the_call_of_a_rank_before_that_of_another_rank():
    def facts(*calls: str | None) -> LaunchFacts:
        leads = [HeadStart(100.0, 2, 1.0, succeeded=call is None, blocked_by=call) for call in calls]
        return launch_facts(make_result([[1.0] * 3] * 2, head_start=leads))

    assert facts(ANOTHER_RANK, CALL).blocked_by == CALL
    assert facts(ANOTHER_RANK, ANOTHER_RANK).blocked_by == ANOTHER_RANK
    assert facts(None, None).blocked_by == launch_facts(make_result([[1.0] * 3])).blocked_by == ""
