"""Launches that did not end: ranks that wait in a collective, run on elsewhere, or do not leave."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_aorta.plan.launch_plan import LaunchPlan
from pytest_aorta.result.diagnosis.describe import (
    RANKS_SHOWN,
    FailureKind,
    LaunchFailure,
    ended,
    is_waiting,
    names_of,
    positions,
)
from pytest_aorta.result.evidence import RankEvidence
from pytest_aorta.result.flight import FlightVerdict
from pytest_aorta.result.outcome import EndReason, LaunchOutcome


def collective_timeout(ranks: Sequence[RankEvidence], flight: FlightVerdict | None) -> LaunchFailure:
    """Diagnose a launch in which NCCL's watchdog ended ranks that waited in a collective."""
    waiting = [rank for rank in ranks if rank.timed_out]
    absent = [rank.rank for rank in ranks if not rank.timed_out]
    headline = f"{names_of([rank.rank for rank in waiting])} timed out in {waiting[0].timed_out}"
    if flight is not None:
        absent = list(flight.missing_ranks)
        headline += f"; {names_of(absent)} missing from {flight.collective} number {flight.sequence}"
    elif absent:
        headline += f"; {names_of(absent)} not in this collective"
    first = absent[0] if absent else min(waiting, key=lambda rank: rank.steps).rank
    return LaunchFailure(FailureKind.HANG_IN_COLLECTIVE, first, headline, positions(ranks))


def hang(plan: LaunchPlan, outcome: LaunchOutcome, ranks: Sequence[RankEvidence]) -> LaunchFailure:
    """Diagnose a launch in which ranks were still running at the limit."""
    limit, unfinished = _limit(plan, outcome), [rank for rank in ranks if not rank.has_result]
    if not unfinished:
        return LaunchFailure(FailureKind.PROCESS_LEFT, None, f"{limit}; every rank left its result", [])
    waiting = [rank for rank in unfinished if is_waiting(rank.frames)]
    absent = [rank for rank in unfinished if rank not in waiting]
    first = min(absent or waiting, key=lambda rank: (not rank.suspended, rank.steps))
    details = positions((first, *(rank for rank in unfinished if rank is not first)))
    done = [rank for rank in ranks if rank.has_result]
    if waiting and (absent or done):
        wait = "waits" if len(waiting) == 1 else "wait"
        peers = names_of([rank.rank for rank in absent]) if absent else ended(done, ", which")
        suspect = first.rank if absent else done[0].rank
        headline = f"{names_of([rank.rank for rank in waiting])} {wait} for {peers}"
        return LaunchFailure(FailureKind.HANG_IN_COLLECTIVE, suspect, f"{limit}; {headline}", details)
    if waiting:
        headline = f"all wait in collectives, rank {first.rank} in the earliest step"
        return LaunchFailure(FailureKind.HANG_IN_COLLECTIVE, first.rank, f"{limit}; {headline}", details)
    headline = f"{names_of([rank.rank for rank in absent])} in no collective"
    if not any(rank.steps for rank in unfinished):
        headline += ", before the first measured step: a hang, or a start that takes longer than the limit"
    return LaunchFailure(FailureKind.HANG_ELSEWHERE, first.rank, f"{limit}; {headline}", details)


def not_left(plan: LaunchPlan, outcome: LaunchOutcome, ranks: Sequence[RankEvidence]) -> LaunchFailure:
    """Diagnose a launch in which every script has returned and some rank's process has not ended."""
    # Only processes that were alive at the limit have left stacks.
    alive = [rank for rank in ranks if rank.frames] or [rank for rank in ranks if not rank.has_result]
    stuck = [rank for rank in alive if not is_waiting(rank.frames)] or alive
    if not stuck:
        return LaunchFailure(FailureKind.PROCESS_LEFT, None, f"{_limit(plan, outcome)}; every rank left its result", [])
    what = "script" if plan.program() else "run()"
    steps = ", ".join(str(rank.steps) for rank in stuck[:RANKS_SHOWN]) if any(rank.steps for rank in stuck) else ""
    reached = f"having entered step {steps}" if steps else "and its steps were not counted"
    headline = f"{names_of([rank.rank for rank in stuck])} did not leave after its {what} returned, {reached}"
    details = positions((*stuck, *(rank for rank in alive if rank not in stuck)))
    return LaunchFailure(FailureKind.PROCESS_LEFT, stuck[0].rank, f"{_limit(plan, outcome)}; {headline}", details)


def _limit(plan: LaunchPlan, outcome: LaunchOutcome) -> str:
    if outcome.reason == EndReason.STRAGGLER:
        return f"a rank was done for {plan.limits.straggler_s:g} s and others were not"
    return f"time limit of {plan.timeout_s:g} s reached"
