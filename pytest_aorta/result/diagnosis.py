"""Diagnoses a failed launch: the class of the failure, the rank that failed first, and a short text of evidence."""

from __future__ import annotations

from pytest_aorta.common.text import counted
from pytest_aorta.plan.launch_plan import LaunchPlan
from pytest_aorta.plan.options import LauncherKind
from pytest_aorta.result.evidence import RankEvidence, flight_verdict, log_tail, read_evidence
from pytest_aorta.result.folder import AGENT_LOG, PLAN_FILE
from pytest_aorta.result.outcome import EndReason, LaunchOutcome
from pytest_aorta.result.rank_failures import (
    RANKS_SHOWN,
    FailureKind,
    LaunchFailure,
    awaited_ranks,
    collective_timeout,
    ended_early,
    exit_text,
    first_failure,
    gave_up,
    hang,
    log_lines,
    names_of,
    not_left,
    not_started,
    own_failure,
    positions,
    without_trace,
)

_OTHER_FOLDER = "next: choose a folder of results that the script keeps (--aorta-results; aorta run: --results)"
# Classes of failures whose headline names the class by itself, such as "rank 1 failed first: exit code 3".
_NAMED_BY_HEADLINE = (FailureKind.EXIT_CODE, FailureKind.SIGNAL)
# Reasons for which the guard ends a launch whose ranks may still run.
_AT_LIMIT = (EndReason.RANK_ERROR, EndReason.TIME_LIMIT, EndReason.STRAGGLER)
# Reasons for which a launch can end after a rank has failed.
_AFTER_FAILURES = (EndReason.EXIT, EndReason.RANK_GONE, *_AT_LIMIT)
# Reasons that the coordinator of several nodes reports; the outcome's detail names the node.
_NODE_REASONS = {
    EndReason.NODE_LOST: FailureKind.NODE_LOST,
    EndReason.NODE_LAUNCHER: FailureKind.NODE_LAUNCHER,
    EndReason.NODE_MISMATCH: FailureKind.NODE_MISMATCH,
}


def launch_failure(plan: LaunchPlan, outcome: LaunchOutcome) -> LaunchFailure | None:
    """Return the diagnosis of a launch; None if every rank succeeded and left a result."""
    ranks = read_evidence(plan, outcome.stopped if outcome.reason in _AT_LIMIT else ())
    finished = all(rank.has_result for rank in ranks)
    if outcome.reason == EndReason.EXIT and outcome.agent_status == 0 and finished and not outcome.survivors:
        return None
    found = _classify(plan, outcome, ranks)
    nodes = f" of {plan.world.nodes} nodes" if plan.world.nodes > 1 else ""
    damaged = [f"damaged: {problem}" for rank in ranks for problem in rank.damaged][:RANKS_SHOWN]
    headline = found.headline if found.kind in _NAMED_BY_HEADLINE else f"{found.kind}: {found.headline}"
    ranks_named = counted(plan.world.size, f"{plan.world.device} rank")
    lines = [*found.details, *damaged]
    if outcome.survivors:
        lines.append(f"processes {list(outcome.survivors)} could not be ended; their devices are not usable")
    lines.append(f"plan, logs and stacks: {plan.run_dir}" if _has_folder(plan) else _OTHER_FOLDER)
    return LaunchFailure(found.kind, found.rank, f"{plan.title} on {ranks_named}{nodes}: {headline}", lines)


def _classify(plan: LaunchPlan, outcome: LaunchOutcome, ranks: list[RankEvidence]) -> LaunchFailure:
    if not _has_folder(plan):
        headline = f"the launch's folder {plan.run_dir} was deleted during the launch, e.g. by the script"
        return LaunchFailure(FailureKind.RESULTS_DELETED, None, f"{headline}; {_agent_end(outcome)}", [])
    if outcome.reason == EndReason.PARENT_GONE:
        return LaunchFailure(FailureKind.INTERRUPTED, None, "pytest ended before the launch did", [])
    if outcome.reason == EndReason.GUARD_LOST:
        return LaunchFailure(
            FailureKind.GUARD_LOST,
            None,
            outcome.detail or "the process that watches the ranks was killed",
            _agent_tail(plan),
        )
    if outcome.reason in _NODE_REASONS:
        stacks = positions(rank for rank in ranks if rank.frames)
        return LaunchFailure(_NODE_REASONS[outcome.reason], None, outcome.detail, [*stacks, *_agent_tail(plan)])
    if any(rank.timed_out for rank in ranks):
        return collective_timeout(ranks, flight_verdict(plan.run_dir))
    failures = sorted((failure for rank in ranks if (failure := own_failure(rank))), key=lambda item: item.order)
    if outcome.reason in (EndReason.TIME_LIMIT, EndReason.STRAGGLER):
        # A rank that was alive at the limit has left its stacks, and may have failed because it was stopped.
        failures = [failure for failure in failures if not failure.evidence.frames and not failure.is_reaction]
    if failures and outcome.reason in _AFTER_FAILURES:
        if awaited := awaited_ranks(failures[0], ranks):
            return gave_up(failures, ranks, awaited)
        if failures[0].is_victim and not all(rank.left_anything for rank in ranks):
            return not_started(ranks)
        if failures[0].is_victim and without_trace(ranks):
            return ended_early(ranks)
        return first_failure(failures, ranks)
    waiting = names_of([rank.rank for rank in ranks if not rank.has_result])
    if outcome.reason == EndReason.OUTPUT_CAP:
        largest = max(ranks, key=lambda rank: rank.log_bytes)
        headline = f"logs exceed {plan.limits.output_cap_bytes >> 20} MiB, rank {largest.rank} wrote most"
        return LaunchFailure(
            FailureKind.OUTPUT_CAP, largest.rank, f"{headline}; {waiting} left no result", log_lines(largest)[-2:]
        )
    if not any(rank.started for rank in ranks):
        # At the limit the guard ends the agent, so how the agent ended is not the cause.
        at_limit = outcome.reason == EndReason.TIME_LIMIT
        cause = f"time limit of {plan.timeout_s:g} s reached" if at_limit else _agent_end(outcome)
        return LaunchFailure(FailureKind.RENDEZVOUS, None, f"no rank started; {cause}", _agent_tail(plan))
    if outcome.reason in (EndReason.TIME_LIMIT, EndReason.STRAGGLER):
        if all(rank.returned for rank in ranks):
            return not_left(plan, outcome, ranks)
        return hang(plan, outcome, ranks)
    if outcome.reason == EndReason.RANK_GONE:
        return ended_early(ranks)
    if outcome.agent_status == 0:
        missing = next((rank for rank in ranks if not rank.has_result), None)
        if missing is None:
            return LaunchFailure(FailureKind.PROCESS_LEFT, None, "a process outlived the launch", [])
        return LaunchFailure(
            FailureKind.RESULT_MISSING,
            missing.rank,
            f"{waiting} exited with code 0 and left no result",
            log_lines(missing),
        )
    return LaunchFailure(
        FailureKind.RENDEZVOUS,
        None,
        f"{_agent_end(outcome)} before any rank failed; {waiting} left no result",
        _agent_tail(plan),
    )


def _has_folder(plan: LaunchPlan) -> bool:
    """Return whether the run folder still exists. Its plan is written first, so other files can't replace it."""
    return (plan.run_dir / PLAN_FILE).is_file()


def _agent_end(outcome: LaunchOutcome) -> str:
    agent = "torchrun" if outcome.launcher == LauncherKind.TORCHRUN else "the fork server's agent"
    if outcome.agent_status is None:
        return f"{agent} was still running"
    return f"{agent} ended with {exit_text(outcome.agent_status)}"


def _agent_tail(plan: LaunchPlan) -> list[str]:
    return [f"  | {line}" for line in log_tail(plan.run_dir / AGENT_LOG)] or [f"  {AGENT_LOG} is empty"]
