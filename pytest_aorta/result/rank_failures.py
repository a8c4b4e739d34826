"""How single ranks failed: which failed first, which wait for which, and the lines that describe them."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum, auto

from pytest_aorta.common.text import is_library, traceback_lines
from pytest_aorta.plan.launch_plan import LaunchPlan
from pytest_aorta.result.evidence import FlightVerdict, Frame, RankEvidence, traceback_frames
from pytest_aorta.result.folder import ERROR_FILE, OUTPUT_LOG, RANKS_FOLDER
from pytest_aorta.result.outcome import EndReason, LaunchOutcome

FRAMES_SHOWN = 3
RANKS_SHOWN = 4
# A signal such as SIGTSTP suspends a process, too.
SUSPENDED = "suspended by a signal such as SIGSTOP"
# Innermost functions of a rank that waits for its peers or for the device.
_WAITING_FUNCTIONS = {"wait", "barrier", "synchronize", "elapsed_time", "item", "tolist", "cpu"}


class FailureKind(StrEnum):
    """The kind of a failed launch, in words."""

    RANK_EXCEPTION = "rank exception"
    OUT_OF_MEMORY = "out of memory"
    EXIT_CODE = "exit code"
    SIGNAL = "signal"
    HANG_IN_COLLECTIVE = "hang in collective"
    HANG_ELSEWHERE = "hang elsewhere"
    OUTPUT_CAP = "output cap"
    RENDEZVOUS = "rendezvous"
    RESULT_MISSING = "result missing"
    PROCESS_LEFT = "process left"
    RESULTS_DELETED = "results deleted"
    INTERRUPTED = "interrupted"
    GUARD_LOST = "guard lost"
    NODE_LOST = "node lost"
    NODE_LAUNCHER = "node launcher"
    NODE_MISMATCH = "node mismatch"


@dataclass(frozen=True)
class LaunchFailure:
    """The diagnosis of a failed launch.

    Attributes:
        kind: what happened.
        rank: the rank that failed first; None if no rank failed.
        headline: a line with the kind and the rank.
        details: lines of evidence.
    """

    kind: FailureKind
    rank: int | None
    headline: str
    details: Sequence[str] = ()

    @property
    def text(self) -> str:
        """Return the headline and the details."""
        return "\n".join([self.headline, *self.details])


def names_of(ranks: Sequence[int]) -> str:
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


def ended(ranks: Sequence[RankEvidence], how: str) -> str:
    """Return ranks that left a result, with their steps; ``how`` joins their names and the verb."""
    return f"{names_of([rank.rank for rank in ranks])}{how} ended without an error{in_steps(ranks)}"


def in_steps(ranks: Sequence[RankEvidence]) -> str:
    """Return the steps that ranks had entered, such as " in step 5"; empty if no rank had entered a step."""
    least, most = min(rank.steps for rank in ranks), max(rank.steps for rank in ranks)
    if most == 0:
        return ""
    return f" in step {most}" if least == most else f" in steps {least} to {most}"


def positions(ranks: Iterable[RankEvidence]) -> list[str]:
    """Return the positions of ranks, one line for all ranks at one position; the first rank's position comes first."""
    places: dict[str, list[int]] = {}
    for rank in ranks:
        places.setdefault(f"step {rank.steps}: {_position(rank)}", []).append(rank.rank)
    return [f"  {names_of(sorted(numbers))}, {place}" for place, numbers in list(places.items())[:RANKS_SHOWN]]


def _position(rank: RankEvidence) -> str:
    if rank.suspended:
        return SUSPENDED
    shown = list(map(str, rank.frames[:FRAMES_SHOWN]))
    own = next((number for number, frame in enumerate(rank.frames) if not is_library(frame.file)), 0)
    if own >= FRAMES_SHOWN:
        shown[-1] = f"... < {rank.frames[own]}"
    position = " < ".join(shown)
    if not position and rank.log_tail:
        position = "no stack; the log ends with: " + " | ".join(rank.log_tail[-2:])
    position = position or f"no stack, and {OUTPUT_LOG} is empty"
    return f"in {rank.in_flight}, {position}" if rank.in_flight else position


def _is_waiting(frames: Sequence[Frame]) -> bool:
    """Return whether a stack is that of a rank that waits for its peers or for the device."""
    shown = frames[:FRAMES_SHOWN]
    # A rank that imports torch.distributed is in no collective.
    in_library = any("/torch/distributed/" in frame.file and frame.function != "<module>" for frame in shown)
    return in_library or (bool(frames) and frames[0].function in _WAITING_FUNCTIONS)


def log_lines(rank: RankEvidence) -> list[str]:
    """Return the end of a rank's output, or a line that says that it is empty."""
    if not rank.log_bytes:
        return [f"  {file_of(rank, OUTPUT_LOG)} is empty"]
    return [f"  | {line}" for line in rank.log_tail]


def file_of(rank: RankEvidence, name: str) -> str:
    """Return the name of a rank's file in the run folder."""
    return f"{RANKS_FOLDER}/{rank.rank}/{name}"


def exit_text(code: int) -> str:
    """Return an exit status in words, negative for a signal."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


_TRACEBACK_LINES = 24
_MESSAGE_LINES = 12
# Long enough for a message with several paths.
_HEADLINE = 1000
# Errors of a rank whose peer is gone. Such a rank is a victim of the failure, even if its error is the earliest.
_PEER_ERROR = re.compile(
    r"connection (was )?(closed|reset|refused)|closed by peer|reset by peer|broken pipe|remote process exited"
    r"|ncclRemoteError|recvValue failed|peer (has )?(closed|gone)|socket (closed|timeout)|EPIPE|ECONNRESET",
    re.IGNORECASE,
)
# Errors of a rank whose peer did not answer in time. If this rank then ends, its peers lose their connections.
_PEER_LATE = re.compile(r"timed out waiting \d+ ?ms for (recv|send)|wait timeout after \d+ ?ms, keys", re.IGNORECASE)
_LOOK_INTO_DMESG = (
    "  next: look for rank {} in dmesg, since the kernel sends SIGKILL if the host or a container runs out of memory"
)
_NUMBER = re.compile(r"\d+")


class _Stage(IntEnum):
    """Kinds of failures, in the order in which one follows from another."""

    ENDED = auto()  # an exit code or a signal of the rank's own
    ERROR = auto()
    PEER_LATE = auto()
    REACTION = auto()  # the rank was stopped, or aborted by a thread that reacted to another rank's end
    PEER_LOST = auto()


@dataclass(frozen=True)
class _RankFailure:
    """A rank's failure.

    Attributes:
        kind: The kind of failure.
        message: The error or the exit status, in words.
        evidence: What the rank left.
        order: Sorts failures, the first one first: by stage, then by time or exit code.
    """

    kind: FailureKind
    message: str
    evidence: RankEvidence
    order: tuple[_Stage, int]

    @property
    def stage(self) -> _Stage:
        """Return the kind of failure."""
        return self.order[0]

    @property
    def is_victim(self) -> bool:
        """Return True if the failure follows from another rank's delay or end."""
        return self.stage in (_Stage.PEER_LATE, _Stage.PEER_LOST)

    @property
    def is_reaction(self) -> bool:
        """Return True if the rank was stopped, or aborted by a thread that reacted to another rank's end."""
        return self.stage == _Stage.REACTION


def own_failure(rank: RankEvidence) -> _RankFailure | None:
    """Return a rank's own failure, or None."""
    if rank.error is not None:
        if rank.error.type == "SystemExit":
            message = _exit_message(rank.error.message)
            return _RankFailure(FailureKind.EXIT_CODE, message, rank, (_Stage.ERROR, rank.error.time_ns))
        message = f"{rank.error.type}: {rank.error.message}".removesuffix(": ")
        kind = FailureKind.OUT_OF_MEMORY if "OutOfMemory" in rank.error.type else FailureKind.RANK_EXCEPTION
        return _RankFailure(kind, message, rank, (_stage_of(rank.error.message), rank.error.time_ns))
    if rank.exit_code is None:
        return None
    # Threads of NCCL and gloo abort in reaction to a failure elsewhere, and SIGTERM is sent to ranks that are stopped.
    # A handler of SIGTERM can choose any exit code.
    is_reaction = rank.exit_code in (-signal.SIGABRT, -signal.SIGTERM) or (rank.was_running and rank.exit_code > 0)
    kind = FailureKind.SIGNAL if rank.exit_code < 0 else FailureKind.EXIT_CODE
    stage = _Stage.REACTION if is_reaction else _Stage.ENDED
    return _RankFailure(kind, exit_text(rank.exit_code), rank, (stage, rank.exit_code))


def _stage_of(message: str) -> _Stage:
    if _PEER_LATE.search(message):
        return _Stage.PEER_LATE
    return _Stage.PEER_LOST if _PEER_ERROR.search(message) else _Stage.ERROR


def _exit_message(given: str) -> str:
    """Return the argument of ``sys.exit`` in words. For a text, the interpreter exits with code 1."""
    if not re.fullmatch(r"-?\d{1,9}", given):
        return f"{exit_text(1)}: {given}"
    # The kernel keeps the lowest byte, so that -1 becomes 255.
    return exit_text(int(given) if int(given) >= 0 else int(given) & 0xFF)


def first_failure(failures: list[_RankFailure], ranks: Sequence[RankEvidence]) -> LaunchFailure:
    """Diagnose a launch by the first of its ``failures``, which are in order."""
    first = failures[0]
    rank = first.evidence
    headline, *message = first.message.splitlines() or [""]
    shown = (line[:300] for line in message[:_MESSAGE_LINES])
    details = [line if line.startswith("  ") else f"    {line}" for line in shown]
    if len(message) > _MESSAGE_LINES:
        details.append(f"    ... {len(message) - _MESSAGE_LINES} more lines in {file_of(rank, ERROR_FILE)}")
    details += _place(rank)
    stopped = [other for other in ranks if other is not rank and not other.error and other.frames]
    # If the rank itself shows no cause, the positions of its peers show the call that it was missing from.
    if first.is_victim or first.is_reaction or not (rank.error or rank.frames):
        located = [other for other in stopped if any(not is_library(frame.file) for frame in other.frames)]
        silent = [other for other in ranks if _is_silent(other) and other.was_running]
        details += positions([*located, *silent, *_elsewhere(rank, ranks)])
        stopped = [other for other in stopped if other not in located]
    details += _others([other for other in ranks if other is not rank], rank.rank, first)
    if first.is_victim and (done := [other for other in ranks if other.has_result and not other.error]):
        details.append(f"  {ended(done, ' had')}")
    if first.is_victim and (left := [other for other in ranks if other.has_result and other.error]):
        names = names_of([other.rank for other in left])
        details.append(f"  {names} had left a result{in_steps(left)}, and waited for the other ranks")
    if stopped:
        details.append(f"  then {names_of([other.rank for other in stopped])}: stopped{in_steps(stopped)}")
    return LaunchFailure(first.kind, rank.rank, f"rank {rank.rank} failed first: {headline[:_HEADLINE]}", details)


def _elsewhere(first: RankEvidence, ranks: Sequence[RankEvidence]) -> list[RankEvidence]:
    """Return the peers that an error ended in another line than ``first``, e.g. in another collective."""
    own = traceback_frames(first) or first.frames
    # A rank with a result waited for the others in a barrier of the harness.
    raised = [other for other in ranks if other is not first and other.error and not other.has_result]
    return [other for other in _where_raised(raised) if other.frames != own]


def _where_raised(ranks: Iterable[RankEvidence]) -> list[RankEvidence]:
    """Return ranks with the frames of their errors' tracebacks, without ranks whose traceback has no frame."""
    found = (replace(rank, frames=traceback_frames(rank)) for rank in ranks)
    return [rank for rank in found if rank.frames]


def _place(rank: RankEvidence) -> list[str]:
    """Return lines with the location of a rank's failure and the end of its output."""
    if rank.error is None:
        killed = [_LOOK_INTO_DMESG.format(rank.rank)] if rank.exit_code == -signal.SIGKILL else []
        return [*killed, *(f"  at {frame}" for frame in rank.frames[:FRAMES_SHOWN]), *log_lines(rank)]
    error_type, message = rank.error.type, rank.error.message
    lines = traceback_lines(rank.error.traceback, error_type, message, _TRACEBACK_LINES, file_of(rank, ERROR_FILE))
    lines = [line[:300] for line in lines]
    if error_type == "SystemExit":
        return [*lines, *log_lines(rank)]
    # Without frames, the harness itself raised the error, and the message of the error is complete.
    return [*lines, *log_lines(rank)] if lines and rank.log_tail else lines


def _others(ranks: Iterable[RankEvidence], origin: int | None, first: _RankFailure | None = None) -> list[str]:
    """Return one line per way in which the other ranks failed; ``first`` is the failure that they followed."""
    summaries: dict[str, list[int]] = {}
    errors: dict[str, list[int]] = {}
    for rank in ranks:
        failure = own_failure(rank)
        if failure is None or (failure.is_reaction and rank.frames):
            continue
        if text := _consequence(failure, origin, first):
            summaries.setdefault(text, []).append(rank.rank)
        else:
            errors.setdefault(failure.message.partition("\n")[0][:300], []).append(rank.rank)
    rest = [rank for numbers in list(errors.values())[RANKS_SHOWN:] for rank in numbers]
    lines = [*summaries.items(), *list(errors.items())[:RANKS_SHOWN], *([("other errors", rest)] if rest else [])]
    return [f"  then {names_of(numbers)}: {text}" for text, numbers in sorted(lines, key=lambda line: line[1])]


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
        is_late = failure.stage == _Stage.PEER_LATE
        happened = "gave up waiting for a peer" if is_late else "connection to a peer lost"
        return f"{happened} (follows from rank {origin})"
    return f"{failure.message} (follows from rank {origin})" if failure.is_reaction else ""


def awaited_ranks(first: _RankFailure, ranks: Sequence[RankEvidence]) -> list[RankEvidence]:
    """Return the ranks that the rank of the first failure waited for: suspended ones, or else those that ran on."""
    if not first.is_victim:
        return []
    suspended = [rank for rank in ranks if rank.suspended]
    if suspended or first.stage != _Stage.PEER_LATE:
        return suspended
    running = [rank for rank in ranks if rank.was_running and not rank.error and not rank.has_result]
    return [rank for rank in running if not _is_waiting(rank.frames)]


def gave_up(
    failures: Sequence[_RankFailure], ranks: Sequence[RankEvidence], awaited: Sequence[RankEvidence]
) -> LaunchFailure:
    """Diagnose a launch in which ranks gave up waiting for the ``awaited`` ranks."""
    first = min(awaited, key=lambda rank: rank.steps)
    others = [rank for rank in ranks if rank not in awaited]
    late = [failure.evidence for failure in failures if failure.stage == _Stage.PEER_LATE]
    names = names_of([rank.rank for rank in awaited])
    if first.suspended:
        headline, details = f"{names} {SUSPENDED}{in_steps(awaited)}", []
    else:
        headline = f"{names_of(sorted(rank.rank for rank in late))} gave up waiting for {names}"
        details = positions((first, *(rank for rank in awaited if rank is not first)))
    details += _others(others, first.rank)
    details += positions([*_where_raised(late), *(rank for rank in others if rank.frames and not rank.error)])
    return LaunchFailure(FailureKind.HANG_IN_COLLECTIVE, first.rank, headline, details)


def not_started(ranks: Sequence[RankEvidence]) -> LaunchFailure:
    """Diagnose a launch in which ranks gave up waiting for a rank that left nothing, not even its process id."""
    absent = [rank.rank for rank in ranks if not rank.left_anything]
    others = [rank for rank in ranks if rank.left_anything]
    headline = f"{names_of(absent)} did not start, and {names_of([rank.rank for rank in others])} gave up waiting"
    return LaunchFailure(FailureKind.RENDEZVOUS, absent[0], headline, _others(others, absent[0]))


def ended_early(ranks: Sequence[RankEvidence]) -> LaunchFailure:
    """Diagnose a launch in which a rank ended before the others, without a result, an error or a failing exit code."""
    unfinished = [rank for rank in ranks if rank.started and not rank.has_result]
    gone = without_trace(ranks) or unfinished
    headline = f"{names_of([rank.rank for rank in gone])} exited with code 0 and left no result while others ran"
    details = log_lines(gone[0]) if gone else []
    others = [rank for rank in unfinished if rank not in gone]
    details += _others(others, gone[0].rank if gone else None)
    details += positions(rank for rank in others if not rank.error)
    return LaunchFailure(
        FailureKind.RESULT_MISSING, gone[0].rank if gone else None, f"{headline}, by os._exit(0) for example", details
    )


def without_trace(ranks: Sequence[RankEvidence]) -> list[RankEvidence]:
    """Return the ranks that ended by themselves and left neither a result nor an error nor a failing exit code."""
    # Ranks that were still alive have written their stacks, unless they were suspended.
    return [rank for rank in ranks if _is_silent(rank) and not rank.suspended and not rank.was_running]


def _is_silent(rank: RankEvidence) -> bool:
    has_ended = rank.has_result or rank.exit_code is not None or rank.error is not None
    return rank.started and not has_ended and not rank.frames


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
    waiting = [rank for rank in unfinished if _is_waiting(rank.frames)]
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
    stuck = [rank for rank in alive if not _is_waiting(rank.frames)] or alive
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
