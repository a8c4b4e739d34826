"""Diagnoses a failed launch: the class of the failure, the rank that failed first, and a short text of evidence."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_aorta.plan.launch_plan import LaunchPlan, command_of
from pytest_aorta.result.evidence import Frame, RankEvidence, last_lines, log_tail, read_evidence
from pytest_aorta.result.flight import FlightVerdict, flight_verdict
from pytest_aorta.result.folder import AGENT_LOG
from pytest_aorta.result.outcome import EndReason, LaunchOutcome

_TRACEBACK_LINES = 12
_FRAMES_SHOWN = 3
_RANKS_SHOWN = 4
# Errors of a rank whose peer is gone. Such a rank is a victim of the failure, even where its error is the earliest.
_PEER_ERROR = re.compile(
    r"connection (was )?(closed|reset|refused)|closed by peer|reset by peer|broken pipe|remote process exited"
    r"|ncclRemoteError|recvValue failed|peer (has )?(closed|gone)|socket (closed|timeout)|EPIPE|ECONNRESET"
    r"|timed out waiting \d+ ?ms for (recv|send)",
    re.IGNORECASE,
)
# Reasons that the coordinator of several nodes gives; the outcome's detail names the node.
_NODE_REASONS = {
    EndReason.NODE_LOST: "node lost",
    EndReason.NODE_LAUNCHER: "node launcher",
    EndReason.NODE_MISMATCH: "node mismatch",
}
# Innermost functions of a rank that waits for its peers or for the device.
_WAITING_FUNCTIONS = {"wait", "barrier", "synchronize", "elapsed_time", "item", "tolist", "cpu"}


@dataclass(frozen=True)
class LaunchFailure:
    """The diagnosis of a failed launch.

    Attributes:
        kind: rank exception, out of memory, exit code, signal, hang in collective, hang elsewhere, output
            cap, rendezvous, result missing, process left, interrupted or guard lost; over several nodes also node lost,
            node launcher or node mismatch.
        rank: the rank that failed first; None where no rank did.
        text: a line with the kind and the rank, then the evidence, then the run folder.
    """

    kind: str
    rank: int | None
    text: str


@dataclass(frozen=True)
class _RankFailure:
    kind: str
    message: str
    evidence: RankEvidence
    order: tuple[bool, bool, bool, int]

    @property
    def is_victim(self) -> bool:
        """True where the failure follows from another rank's end."""
        return self.order[0]


def launch_failure(plan: LaunchPlan, outcome: LaunchOutcome) -> LaunchFailure | None:
    """Return the diagnosis of a launch; None where every rank succeeded and left a result."""
    ranks = read_evidence(plan)
    finished = all(rank.has_result for rank in ranks)
    if outcome.reason == EndReason.EXIT and outcome.agent_status == 0 and finished and not outcome.survivors:
        return None
    kind, rank, headline, details = _classify(plan, outcome, ranks)
    name = f"{plan.name} at {plan.reference.name}" if plan.reference else plan.name
    nodes = f" of {plan.world.nodes} nodes" if plan.world.nodes > 1 else ""
    damaged = [f"damaged: {problem}" for rank in ranks for problem in rank.damaged][:_RANKS_SHOWN]
    lines = [f"{name} on {plan.world.size} {plan.world.device} ranks{nodes}: {kind}: {headline}", *details, *damaged]
    if outcome.survivors:
        lines.append(f"processes {list(outcome.survivors)} could not be ended; their devices are not usable")
    return LaunchFailure(kind, rank, "\n".join([*lines, f"plan, logs and stacks: {plan.run_dir}"]))


def _classify(
    plan: LaunchPlan, outcome: LaunchOutcome, ranks: list[RankEvidence]
) -> tuple[str, int | None, str, list[str]]:
    if outcome.reason == EndReason.PARENT_GONE:
        return "interrupted", None, "pytest ended before the launch did", []
    if outcome.reason == EndReason.GUARD_LOST:
        return "guard lost", None, outcome.detail or "the process that watches the ranks was killed", _agent_tail(plan)
    if outcome.reason in _NODE_REASONS:
        stacks = [_position(rank) for rank in ranks if rank.frames][:_RANKS_SHOWN]
        return _NODE_REASONS[outcome.reason], None, outcome.detail, [*stacks, *_agent_tail(plan)]
    if any(rank.timed_out for rank in ranks):
        return _collective_timeout(ranks, flight_verdict(plan.run_dir))
    failures = sorted((failure for rank in ranks if (failure := _own_failure(rank))), key=lambda item: item.order)
    if failures and outcome.reason in (EndReason.EXIT, EndReason.RANK_ERROR):
        if failures[0].is_victim and _gone(ranks):
            return _ended_early(ranks)
        return _first_failure(failures, ranks)
    waiting = _names([rank.rank for rank in ranks if not rank.has_result])
    if outcome.reason == EndReason.OUTPUT_CAP:
        largest = max(ranks, key=lambda rank: rank.log_bytes)
        headline = f"logs exceed {plan.limits.output_cap_bytes >> 20} MiB, rank {largest.rank} wrote most"
        return "output cap", largest.rank, f"{headline}; {waiting} left no result", list(largest.log_tail)[-2:]
    if not any(rank.started for rank in ranks):
        return "rendezvous", None, f"no rank started; torchrun {_agent_end(outcome)}", _agent_tail(plan)
    if outcome.reason in (EndReason.TIME_LIMIT, EndReason.STRAGGLER):
        if all(rank.returned for rank in ranks):
            return _not_left(plan, outcome, ranks)
        return _hang(plan, outcome, [rank for rank in ranks if not rank.has_result])
    if outcome.reason == EndReason.RANK_GONE:
        return _ended_early(ranks)
    if outcome.agent_status == 0:
        missing = next((rank for rank in ranks if not rank.has_result), None)
        if missing is None:
            return "process left", None, "a process outlived the launch", []
        return (
            "result missing",
            missing.rank,
            f"{waiting} exited with code 0 and left no result",
            list(missing.log_tail),
        )
    return (
        "rendezvous",
        None,
        f"torchrun {_agent_end(outcome)} before any rank failed; {waiting} left no result",
        _agent_tail(plan),
    )


def _ended_early(ranks: Sequence[RankEvidence]) -> tuple[str, int | None, str, list[str]]:
    """Diagnose a launch in which a rank left the others alone: without a result, an error or a failing exit code."""
    unfinished = [rank for rank in ranks if rank.started and not rank.has_result]
    gone = _gone(ranks) or unfinished
    headline = f"{_names([rank.rank for rank in gone])} exited with code 0 and left no result while others ran"
    details = [f"  | {line}" for line in gone[0].log_tail] if gone else []
    others = [rank for rank in unfinished if rank not in gone][:_RANKS_SHOWN]
    details += [f"  then rank {rank.rank}: {rank.error['message'][:300]}" for rank in others if rank.error]
    details += [_position(rank) for rank in others if not rank.error]
    return "result missing", gone[0].rank if gone else None, f"{headline}, by os._exit(0) for example", details


def _gone(ranks: Sequence[RankEvidence]) -> list[RankEvidence]:
    """Return the ranks that ended by themselves and left neither a result nor an error nor a failing exit code."""
    # Ranks that were still alive have written their stacks.
    silent = [rank for rank in ranks if rank.exit_code is None and not rank.error and not rank.frames]
    return [rank for rank in silent if rank.started and not rank.has_result]


def _collective_timeout(
    ranks: Sequence[RankEvidence], flight: FlightVerdict | None
) -> tuple[str, int | None, str, list[str]]:
    """Diagnose a launch in which NCCL's watchdog ended ranks that waited in a collective."""
    waiting = [rank for rank in ranks if rank.timed_out]
    absent = [rank.rank for rank in ranks if not rank.timed_out]
    headline = f"{_names([rank.rank for rank in waiting])} timed out in {waiting[0].timed_out}"
    if flight is not None:
        absent = list(flight.missing_ranks)
        headline += f"; {_names(absent)} missing from {flight.collective} number {flight.sequence}"
    elif absent:
        headline += f"; {_names(absent)} not in this collective"
    first = absent[0] if absent else min(waiting, key=lambda rank: rank.steps).rank
    return "hang in collective", first, headline, [_position(rank) for rank in ranks[:_RANKS_SHOWN]]


def _first_failure(failures: list[_RankFailure], ranks: Sequence[RankEvidence]) -> tuple[str, int, str, list[str]]:
    first = failures[0]
    error = first.evidence.error
    details = list(last_lines(error["traceback"], _TRACEBACK_LINES)) if error else []
    if not error:
        details = [f"  at {frame}" for frame in first.evidence.frames[:_FRAMES_SHOWN]]
        details += [f"  | {line}" for line in first.evidence.log_tail]
    later = [other for other in failures[1:] if other.evidence.error]
    details += [f"  then rank {other.evidence.rank}: {other.message[:300]}" for other in later[:_RANKS_SHOWN]]
    # The other ranks were stopped. Their stacks show what they were doing when the failed rank went missing.
    stopped = [rank for rank in ranks if rank is not first.evidence and not rank.error and rank.frames]
    details += [_position(rank) for rank in stopped[:_RANKS_SHOWN]]
    return first.kind, first.evidence.rank, f"rank {first.evidence.rank} failed first: {first.message}", details


def _own_failure(rank: RankEvidence) -> _RankFailure | None:
    """Return how a rank failed by itself; failures are ordered with victims last, then by time."""
    if rank.error is not None:
        message = f"{rank.error['type']}: {rank.error['message']}"
        kind = "out of memory" if "OutOfMemory" in rank.error["type"] else "rank exception"
        is_victim = bool(_PEER_ERROR.search(rank.error["message"]))
        return _RankFailure(kind, message, rank, (is_victim, False, True, rank.error["time_ns"]))
    if rank.exit_code is None:
        return None
    # Threads of NCCL and gloo abort in reaction to a failure elsewhere, and SIGTERM is sent to ranks that are stopped.
    is_reaction = rank.exit_code in (-signal.SIGABRT, -signal.SIGTERM)
    kind = "signal" if rank.exit_code < 0 else "exit code"
    return _RankFailure(kind, exit_text(rank.exit_code), rank, (False, is_reaction, False, rank.exit_code))


def _not_left(
    plan: LaunchPlan, outcome: LaunchOutcome, ranks: Sequence[RankEvidence]
) -> tuple[str, int | None, str, list[str]]:
    """Diagnose a launch in which every script has returned and some rank's process has not ended."""
    # Only processes that were alive at the limit have left stacks.
    alive = [rank for rank in ranks if rank.frames] or [rank for rank in ranks if not rank.has_result]
    stuck = [rank for rank in alive if not _is_waiting(rank.frames)] or alive
    if not stuck:
        return "process left", None, f"{_limit(plan, outcome)}; every rank left its result", []
    what = "script" if plan.script is not None or command_of(plan) else "run()"
    steps = ", ".join(str(rank.steps) for rank in stuck[:_RANKS_SHOWN]) if any(rank.steps for rank in stuck) else ""
    reached = f"having entered step {steps}" if steps else "and its steps were not counted"
    headline = f"{_names([rank.rank for rank in stuck])} did not leave after its {what} returned, {reached}"
    details = [_position(rank) for rank in (*stuck, *(rank for rank in alive if rank not in stuck))][:_RANKS_SHOWN]
    return "process left", stuck[0].rank, f"{_limit(plan, outcome)}; {headline}", details


def _limit(plan: LaunchPlan, outcome: LaunchOutcome) -> str:
    if outcome.reason == EndReason.STRAGGLER:
        return f"a rank was done for {plan.limits.straggler_s:g} s and others were not"
    return f"time limit of {plan.timeout_s:g} s reached"


def _hang(
    plan: LaunchPlan, outcome: LaunchOutcome, unfinished: Sequence[RankEvidence]
) -> tuple[str, int | None, str, list[str]]:
    limit = _limit(plan, outcome)
    if not unfinished:
        return "process left", None, f"{limit}; every rank left its result", []
    waiting = [rank for rank in unfinished if _is_waiting(rank.frames)]
    absent = [rank for rank in unfinished if rank not in waiting]
    first = min(absent or waiting, key=lambda rank: rank.steps)
    details = [_position(rank) for rank in (first, *(rank for rank in unfinished if rank is not first))][:_RANKS_SHOWN]
    if waiting and absent:
        wait = "waits" if len(waiting) == 1 else "wait"
        headline = f"{_names([rank.rank for rank in waiting])} {wait} for {_names([rank.rank for rank in absent])}"
        return "hang in collective", first.rank, f"{limit}; {headline}", details
    if waiting:
        who = "the others" if outcome.reason == EndReason.STRAGGLER else "all"
        headline = f"{who} wait in collectives, rank {first.rank} in the earliest step"
        return "hang in collective", first.rank, f"{limit}; {headline}", details
    headline = f"{_names([rank.rank for rank in absent])} in no collective"
    if not any(rank.steps for rank in unfinished):
        headline += ", before the first measured step: a hang, or a start that takes longer than the limit"
    return "hang elsewhere", first.rank, f"{limit}; {headline}", details


def _is_waiting(frames: Sequence[Frame]) -> bool:
    in_library = any("/torch/distributed/" in frame.file for frame in frames[:_FRAMES_SHOWN])
    return in_library or (bool(frames) and frames[0].function in _WAITING_FUNCTIONS)


def _position(rank: RankEvidence) -> str:
    position = " < ".join(map(str, rank.frames[:_FRAMES_SHOWN]))
    if not position:
        position = "no stack; the log ends with: " + " | ".join(rank.log_tail[-2:])
    if rank.in_flight:
        position = f"in {rank.in_flight}, {position}"
    return f"  rank {rank.rank}, step {rank.steps}: {position}"


def exit_text(code: int) -> str:
    """Return an exit status in words, negative for a signal."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _agent_end(outcome: LaunchOutcome) -> str:
    if outcome.agent_status is None:
        return "was still running"
    return f"ended with {exit_text(outcome.agent_status)}"


def _agent_tail(plan: LaunchPlan) -> list[str]:
    return [f"  | {line}" for line in log_tail(plan.run_dir / AGENT_LOG)]


def _names(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}" if ranks else "no rank"
