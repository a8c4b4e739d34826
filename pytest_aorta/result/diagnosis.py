"""Diagnoses a failed launch: the class of the failure, the rank that failed first, and a short text of evidence."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pytest_aorta.common.frames import is_library, traceback_lines
from pytest_aorta.plan.launch_plan import LaunchPlan, command_of
from pytest_aorta.plan.options.values import LauncherKind
from pytest_aorta.result.evidence import Frame, RankEvidence, log_tail, read_evidence
from pytest_aorta.result.flight import FlightVerdict, flight_verdict
from pytest_aorta.result.folder import AGENT_LOG, ERROR_FILE, OUTPUT_LOG, PLAN_FILE, RANKS_FOLDER
from pytest_aorta.result.outcome import EndReason, LaunchOutcome

_TRACEBACK_LINES = 24
_MESSAGE_LINES = 12
# Long enough for a message with several paths.
_HEADLINE = 1000
_FRAMES_SHOWN = 3
_RANKS_SHOWN = 4
# Errors of a rank whose peer is gone. Such a rank is a victim of the failure, even if its error is the earliest.
_PEER_ERROR = re.compile(
    r"connection (was )?(closed|reset|refused)|closed by peer|reset by peer|broken pipe|remote process exited"
    r"|ncclRemoteError|recvValue failed|peer (has )?(closed|gone)|socket (closed|timeout)|EPIPE|ECONNRESET"
    r"|timed out waiting \d+ ?ms for (recv|send)",
    re.IGNORECASE,
)
_OTHER_FOLDER = "next: choose a folder of results that the script keeps (--aorta-results; aorta run: --results)"
_LOOK_INTO_DMESG = (
    "  next: look for rank {} in dmesg, since the kernel sends SIGKILL if the host or a container runs out of memory"
)
_NUMBER = re.compile(r"\d+")
# Classes of failures whose headline names the class by itself, such as "rank 1 failed first: exit code 3".
_NAMED_BY_HEADLINE = ("exit code", "signal")
# Reasons that the coordinator of several nodes reports; the outcome's detail names the node.
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
            cap, rendezvous, result missing, process left, results deleted, interrupted or guard lost; over several
            nodes also node lost, node launcher or node mismatch.
        rank: the rank that failed first; None if no rank failed.
        text: a line with the kind and the rank, then the evidence, then the run folder if it exists.
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
        """Return True if the failure follows from another rank's end."""
        return self.order[0]

    @property
    def is_reaction(self) -> bool:
        """Return True if the rank was stopped, or aborted by a thread that reacted to another rank's end."""
        return self.order[1]


def launch_failure(plan: LaunchPlan, outcome: LaunchOutcome) -> LaunchFailure | None:
    """Return the diagnosis of a launch; None if every rank succeeded and left a result."""
    ranks = read_evidence(plan)
    finished = all(rank.has_result for rank in ranks)
    if outcome.reason == EndReason.EXIT and outcome.agent_status == 0 and finished and not outcome.survivors:
        return None
    kind, rank, headline, details = _classify(plan, outcome, ranks)
    name = f"{plan.name} at {plan.reference.name}" if plan.reference else plan.name
    nodes = f" of {plan.world.nodes} nodes" if plan.world.nodes > 1 else ""
    damaged = [f"damaged: {problem}" for rank in ranks for problem in rank.damaged][:_RANKS_SHOWN]
    headline = headline if kind in _NAMED_BY_HEADLINE else f"{kind}: {headline}"
    lines = [f"{name} on {plan.world.size} {plan.world.device} ranks{nodes}: {headline}", *details, *damaged]
    if outcome.survivors:
        lines.append(f"processes {list(outcome.survivors)} could not be ended; their devices are not usable")
    lines.append(f"plan, logs and stacks: {plan.run_dir}" if _has_folder(plan) else _OTHER_FOLDER)
    return LaunchFailure(kind, rank, "\n".join(lines))


def _classify(
    plan: LaunchPlan, outcome: LaunchOutcome, ranks: list[RankEvidence]
) -> tuple[str, int | None, str, list[str]]:
    if not _has_folder(plan):
        headline = f"the launch's folder {plan.run_dir} was deleted during the launch, e.g. by the script"
        return "results deleted", None, f"{headline}; {_agent_end(outcome)}", []
    if outcome.reason == EndReason.PARENT_GONE:
        return "interrupted", None, "pytest ended before the launch did", []
    if outcome.reason == EndReason.GUARD_LOST:
        return "guard lost", None, outcome.detail or "the process that watches the ranks was killed", _agent_tail(plan)
    if outcome.reason in _NODE_REASONS:
        stacks = _positions(rank for rank in ranks if rank.frames)
        return _NODE_REASONS[outcome.reason], None, outcome.detail, [*stacks, *_agent_tail(plan)]
    if any(rank.timed_out for rank in ranks):
        return _collective_timeout(ranks, flight_verdict(plan.run_dir))
    failures = sorted((failure for rank in ranks if (failure := _own_failure(rank))), key=lambda item: item.order)
    if failures and outcome.reason in (EndReason.EXIT, EndReason.RANK_ERROR, EndReason.RANK_GONE):
        if failures[0].is_victim and _gone(ranks):
            return _ended_early(ranks)
        return _first_failure(failures, ranks)
    waiting = _names([rank.rank for rank in ranks if not rank.has_result])
    if outcome.reason == EndReason.OUTPUT_CAP:
        largest = max(ranks, key=lambda rank: rank.log_bytes)
        headline = f"logs exceed {plan.limits.output_cap_bytes >> 20} MiB, rank {largest.rank} wrote most"
        return "output cap", largest.rank, f"{headline}; {waiting} left no result", _log_lines(largest)[-2:]
    if not any(rank.started for rank in ranks):
        return "rendezvous", None, f"no rank started; {_agent_end(outcome)}", _agent_tail(plan)
    if outcome.reason in (EndReason.TIME_LIMIT, EndReason.STRAGGLER):
        if all(rank.returned for rank in ranks):
            return _not_left(plan, outcome, ranks)
        return _hang(plan, outcome, ranks)
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
            _log_lines(missing),
        )
    return (
        "rendezvous",
        None,
        f"{_agent_end(outcome)} before any rank failed; {waiting} left no result",
        _agent_tail(plan),
    )


def _ended_early(ranks: Sequence[RankEvidence]) -> tuple[str, int | None, str, list[str]]:
    """Diagnose a launch in which a rank ended before the others, without a result, an error or a failing exit code."""
    unfinished = [rank for rank in ranks if rank.started and not rank.has_result]
    gone = _gone(ranks) or unfinished
    headline = f"{_names([rank.rank for rank in gone])} exited with code 0 and left no result while others ran"
    details = _log_lines(gone[0]) if gone else []
    others = [rank for rank in unfinished if rank not in gone]
    details += _others(others, gone[0].rank if gone else None)
    details += _positions(rank for rank in others if not rank.error)
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
    return "hang in collective", first, headline, _positions(ranks)


def _first_failure(failures: list[_RankFailure], ranks: Sequence[RankEvidence]) -> tuple[str, int, str, list[str]]:
    first = failures[0]
    rank = first.evidence
    headline, *message = first.message.splitlines() or [""]
    shown = (line[:300] for line in message[:_MESSAGE_LINES])
    details = [line if line.startswith("  ") else f"    {line}" for line in shown]
    if len(message) > _MESSAGE_LINES:
        details.append(f"    ... {len(message) - _MESSAGE_LINES} more lines in {_file(rank, ERROR_FILE)}")
    details += _place(rank)
    stopped = [other for other in ranks if other is not rank and not other.error and other.frames]
    # If the rank itself shows no cause, the stacks of its peers show the call that it was missing from.
    if first.is_victim or not (rank.error or rank.frames):
        located = [other for other in stopped if any(not is_library(frame.file) for frame in other.frames)]
        details += _positions(located)
        stopped = [other for other in stopped if other not in located]
    details += _others([other for other in ranks if other is not rank], rank.rank, first)
    if first.is_victim and (done := [other for other in ranks if other.has_result]):
        details.append(f"  {_ended(done, ' had')}")
    if stopped:
        details.append(f"  then {_names([other.rank for other in stopped])}: stopped{_in_steps(stopped)}")
    return first.kind, rank.rank, f"rank {rank.rank} failed first: {headline[:_HEADLINE]}", details


def _place(rank: RankEvidence) -> list[str]:
    """Return lines with the location of a rank's failure and the end of its output."""
    if rank.error is None:
        killed = [_LOOK_INTO_DMESG.format(rank.rank)] if rank.exit_code == -signal.SIGKILL else []
        return [*killed, *(f"  at {frame}" for frame in rank.frames[:_FRAMES_SHOWN]), *_log_lines(rank)]
    error_type, message = rank.error["type"], rank.error["message"]
    lines = traceback_lines(rank.error["traceback"], error_type, message, _TRACEBACK_LINES, _file(rank, ERROR_FILE))
    lines = [line[:300] for line in lines]
    if error_type == "SystemExit":
        return [*lines, *_log_lines(rank)]
    # Without frames, the harness itself raised the error, and the message of the error is complete.
    return [*lines, *_log_lines(rank)] if lines and rank.log_tail else lines


def _others(ranks: Iterable[RankEvidence], origin: int | None, first: _RankFailure | None = None) -> list[str]:
    """Return one line per way in which the other ranks failed; ``first`` is the failure that they followed."""
    summaries: dict[str, list[int]] = {}
    errors: dict[str, list[int]] = {}
    for rank in ranks:
        failure = _own_failure(rank)
        if failure is None or (failure.is_reaction and rank.frames):
            continue
        if text := _consequence(failure, origin, first):
            summaries.setdefault(text, []).append(rank.rank)
        else:
            errors.setdefault(failure.message.partition("\n")[0][:300], []).append(rank.rank)
    rest = [rank for numbers in list(errors.values())[_RANKS_SHOWN:] for rank in numbers]
    lines = [*summaries.items(), *list(errors.items())[:_RANKS_SHOWN], *([("other errors", rest)] if rest else [])]
    return [f"  then {_names(numbers)}: {text}" for text, numbers in sorted(lines, key=lambda line: line[1])]


def _consequence(failure: _RankFailure, origin: int | None, first: _RankFailure | None) -> str:
    """Return how a failure follows from the first failure; empty for an independent failure."""
    if first is not None and first.evidence.error and failure.evidence.error:
        if failure.message == first.message:
            return "the same error"
        if _NUMBER.sub("0", failure.message) == _NUMBER.sub("0", first.message):
            return "the same error with other numbers"
    if first is not None and first.is_victim:
        return ""
    if failure.is_victim:
        return f"connection to a peer lost (follows from rank {origin})"
    return f"{failure.message} (follows from rank {origin})" if failure.is_reaction else ""


def _ended(ranks: Sequence[RankEvidence], how: str) -> str:
    """Return ranks that left a result, with their steps; ``how`` joins their names and the verb."""
    return f"{_names([rank.rank for rank in ranks])}{how} ended without an error{_in_steps(ranks)}"


def _in_steps(ranks: Sequence[RankEvidence]) -> str:
    """Return the steps that ranks had entered, such as " in step 5"; empty if no rank had entered a step."""
    least, most = min(rank.steps for rank in ranks), max(rank.steps for rank in ranks)
    if most == 0:
        return ""
    return f" in step {most}" if least == most else f" in steps {least} to {most}"


def _own_failure(rank: RankEvidence) -> _RankFailure | None:
    """Return a rank's own failure, or None. The order is: exits and signals, errors by time, reactions, victims."""
    if rank.error is not None:
        if rank.error["type"] == "SystemExit":
            message = _exit_message(rank.error["message"])
            return _RankFailure("exit code", message, rank, (False, False, True, rank.error["time_ns"]))
        message = f"{rank.error['type']}: {rank.error['message']}".removesuffix(": ")
        kind = "out of memory" if "OutOfMemory" in rank.error["type"] else "rank exception"
        is_victim = bool(_PEER_ERROR.search(rank.error["message"]))
        return _RankFailure(kind, message, rank, (is_victim, False, True, rank.error["time_ns"]))
    if rank.exit_code is None:
        return None
    # Threads of NCCL and gloo abort in reaction to a failure elsewhere, and SIGTERM is sent to ranks that are stopped.
    is_reaction = rank.exit_code in (-signal.SIGABRT, -signal.SIGTERM)
    kind = "signal" if rank.exit_code < 0 else "exit code"
    return _RankFailure(kind, exit_text(rank.exit_code), rank, (False, is_reaction, False, rank.exit_code))


def _exit_message(given: str) -> str:
    """Return the argument of ``sys.exit`` in words. For a text, the interpreter exits with code 1."""
    return exit_text(int(given)) if re.fullmatch(r"\d{1,9}", given) else f"{exit_text(1)}: {given}"


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
    details = _positions((*stuck, *(rank for rank in alive if rank not in stuck)))
    return "process left", stuck[0].rank, f"{_limit(plan, outcome)}; {headline}", details


def _limit(plan: LaunchPlan, outcome: LaunchOutcome) -> str:
    if outcome.reason == EndReason.STRAGGLER:
        return f"a rank was done for {plan.limits.straggler_s:g} s and others were not"
    return f"time limit of {plan.timeout_s:g} s reached"


def _hang(
    plan: LaunchPlan, outcome: LaunchOutcome, ranks: Sequence[RankEvidence]
) -> tuple[str, int | None, str, list[str]]:
    """Diagnose a launch in which ranks were still running at the limit."""
    limit, unfinished = _limit(plan, outcome), [rank for rank in ranks if not rank.has_result]
    if not unfinished:
        return "process left", None, f"{limit}; every rank left its result", []
    waiting = [rank for rank in unfinished if _is_waiting(rank.frames)]
    absent = [rank for rank in unfinished if rank not in waiting]
    first = min(absent or waiting, key=lambda rank: rank.steps)
    details = _positions((first, *(rank for rank in unfinished if rank is not first)))
    done = [rank for rank in ranks if rank.has_result]
    if waiting and (absent or done):
        wait = "waits" if len(waiting) == 1 else "wait"
        peers = _names([rank.rank for rank in absent]) if absent else _ended(done, ", which")
        suspect = first.rank if absent else done[0].rank
        headline = f"{_names([rank.rank for rank in waiting])} {wait} for {peers}"
        return "hang in collective", suspect, f"{limit}; {headline}", details
    if waiting:
        headline = f"all wait in collectives, rank {first.rank} in the earliest step"
        return "hang in collective", first.rank, f"{limit}; {headline}", details
    headline = f"{_names([rank.rank for rank in absent])} in no collective"
    if not any(rank.steps for rank in unfinished):
        headline += ", before the first measured step: a hang, or a start that takes longer than the limit"
    return "hang elsewhere", first.rank, f"{limit}; {headline}", details


def _is_waiting(frames: Sequence[Frame]) -> bool:
    in_library = any("/torch/distributed/" in frame.file for frame in frames[:_FRAMES_SHOWN])
    return in_library or (bool(frames) and frames[0].function in _WAITING_FUNCTIONS)


def _positions(ranks: Iterable[RankEvidence]) -> list[str]:
    """Return the positions of ranks, one line for all ranks at one position; the first rank's position comes first."""
    places: dict[str, list[int]] = {}
    for rank in ranks:
        places.setdefault(f"step {rank.steps}: {_position(rank)}", []).append(rank.rank)
    return [f"  {_names(sorted(numbers))}, {place}" for place, numbers in list(places.items())[:_RANKS_SHOWN]]


def _position(rank: RankEvidence) -> str:
    shown = list(map(str, rank.frames[:_FRAMES_SHOWN]))
    own = next((number for number, frame in enumerate(rank.frames) if not is_library(frame.file)), 0)
    if own >= _FRAMES_SHOWN:
        shown[-1] = f"... < {rank.frames[own]}"
    position = " < ".join(shown)
    if not position and rank.log_tail:
        position = "no stack; the log ends with: " + " | ".join(rank.log_tail[-2:])
    position = position or f"no stack, and {OUTPUT_LOG} is empty"
    return f"in {rank.in_flight}, {position}" if rank.in_flight else position


def _log_lines(rank: RankEvidence) -> list[str]:
    if not rank.log_bytes:
        return [f"  {_file(rank, OUTPUT_LOG)} is empty"]
    return [f"  | {line}" for line in rank.log_tail]


def _file(rank: RankEvidence, name: str) -> str:
    return f"{RANKS_FOLDER}/{rank.rank}/{name}"


def exit_text(code: int) -> str:
    """Return an exit status in words, negative for a signal."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


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


def _names(ranks: Sequence[int]) -> str:
    """Return numbers of ranks in ascending order as text, with three or more consecutive numbers as a range."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [part for run in runs for part in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run))]
    shown = ", ".join(parts[:8]) + (", ..." if len(parts) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}" if ranks else "no rank"
