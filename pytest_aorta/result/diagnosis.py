"""Diagnoses a failed launch: the class of the failure, the rank that failed first, and a short text of evidence."""

import re
import signal
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum, auto
from pathlib import Path

from pytest_aorta.common.text import counted, is_library, traceback_lines
from pytest_aorta.plan.launch_plan import LaunchPlan
from pytest_aorta.plan.options import LauncherKind
from pytest_aorta.plan.world import SIMULATED
from pytest_aorta.result.evidence import (
    RankEvidence,
    different_collectives,
    first_missed,
    log_tail,
    read_evidence,
    traceback_frames,
)
from pytest_aorta.result.folder import AGENT_LOG, ERROR_FILE, OUTPUT_LOG, PLAN_FILE, RANKS_FOLDER
from pytest_aorta.result.outcome import EndReason, LaunchOutcome

_FRAMES_SHOWN = 3
_RANKS_SHOWN = 4
# A signal such as SIGTSTP suspends a process, too.
_SUSPENDED = "suspended by a signal such as SIGSTOP"
_IN_DDP = ("_engine_run_backward", "_distributed_broadcast_coalesced")
# Innermost functions of a rank that waits for its peers or for the device.
_WAITING_FUNCTIONS = {"wait", "barrier", "synchronize", "elapsed_time", "item", "tolist", "cpu", *_IN_DDP}
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
# The error of a rank whose losses, gradient norms or parameters became NaN or infinite in a step, or after it.
NOT_FINITE = re.compile(r"NotFinite: .*? first (?P<when>in|after) (?:(?:measured|training) )?step (?P<step>\d+)\b.*")
# Errors of a rank whose peer did not answer in time. If this rank then ends, its peers lose their connections.
_PEER_LATE = re.compile(
    r"timed out waiting \d+ ?ms for (recv|send)|wait timeout( after \d+ ?ms, keys|$)|timeout waiting for key: ",
    re.IGNORECASE,
)
_LOOK_INTO_DMESG = (
    "  next: look for rank {} in dmesg, since the kernel sends SIGKILL if the host or a container runs out of memory"
)
_NUMBER = re.compile(r"\d+")


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
        headline: a line with the kind and the rank.
        details: lines of evidence.
        rank: the rank that failed first; None if no rank failed.
    """

    kind: FailureKind
    headline: str
    details: Sequence[str] = ()
    rank: int | None = None

    @property
    def text(self) -> str:
        """Return the headline and the details."""
        return "\n".join([self.headline, *self.details])


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


class _Stage(IntEnum):
    """Kinds of failures, in the order in which one follows from another."""

    ENDED = auto()  # an exit code or a signal of the rank's own
    ERROR = auto()
    PEER_LATE = auto()
    REACTION = auto()  # the rank was stopped, or aborted by a thread that reacted to another rank's end
    PEER_LOST = auto()


_VICTIM = (_Stage.PEER_LATE, _Stage.PEER_LOST)


@dataclass(frozen=True, order=True)
class _RankFailure:
    """A rank's failure; the order is that in which one failure follows from another.

    Attributes:
        stage: The stage of the failure.
        number: Time of the error, or the exit code; the lower comes first.
        kind: The kind of failure.
        message: The error or the exit status, in words.
        evidence: What the rank left.
    """

    stage: _Stage
    number: int
    kind: FailureKind = field(compare=False)
    message: str = field(compare=False)
    evidence: RankEvidence = field(compare=False)

    @property
    def is_victim(self) -> bool:
        """Return True if the failure follows from another rank's delay or end."""
        return self.stage in _VICTIM

    @property
    def is_reaction(self) -> bool:
        """Return True if the rank was stopped, or aborted by a thread that reacted to another rank's end."""
        return self.stage == _Stage.REACTION


def launch_failure(plan: LaunchPlan, outcome: LaunchOutcome) -> LaunchFailure | None:
    """Return the diagnosis of a launch; None if every rank succeeded and left a result."""
    ranks = read_evidence(plan, outcome.stopped if outcome.reason in _AT_LIMIT else ())
    finished = all(rank.has_result for rank in ranks)
    if outcome.reason == EndReason.EXIT and outcome.agent_status == 0 and finished and not outcome.survivors:
        return None
    # The plan is written first, so other files can't replace it.
    has_folder = (plan.run_dir / PLAN_FILE).is_file()
    found = _classify(plan, outcome, ranks) if has_folder else _deleted(plan, outcome)
    nodes = f" of {plan.world.nodes} nodes" if plan.world.nodes > 1 else ""
    headline = found.headline if found.kind in _NAMED_BY_HEADLINE else f"{found.kind}: {found.headline}"
    world = plan.world
    ranks_named = counted(world.size, f"{SIMULATED if world.simulated else world.device} rank")
    damaged = [f"damaged: {problem}" for rank in ranks for problem in rank.damaged][:_RANKS_SHOWN]
    lines = [*found.details, *damaged]
    if has_folder and (problem := _cannot_write(plan.run_dir)):
        lines.insert(0, f"{plan.run_dir} can't be written: {problem}")
    if outcome.survivors:
        lines.append(f"processes {list(outcome.survivors)} could not be ended; their devices stay leased")
    lines.append(f"plan, logs and stacks: {plan.run_dir}" if has_folder else _OTHER_FOLDER)
    return replace(found, headline=f"{plan.title} on {ranks_named}{nodes}: {headline}", details=lines)


def _cannot_write(folder: Path) -> str:
    """Return why 64 KiB can't be written into a folder, such as that its disk is full; empty if they can."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 16))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _deleted(plan: LaunchPlan, outcome: LaunchOutcome) -> LaunchFailure:
    headline = f"the launch's folder {plan.run_dir} was deleted during the launch, e.g. by the script"
    return LaunchFailure(FailureKind.RESULTS_DELETED, f"{headline}; {_agent_end(plan, outcome)}")


def _classify(plan: LaunchPlan, outcome: LaunchOutcome, ranks: list[RankEvidence]) -> LaunchFailure:
    is_limit = outcome.reason in (EndReason.TIME_LIMIT, EndReason.STRAGGLER)
    agent_tail = [f"  | {line}" for line in log_tail(plan.run_dir / AGENT_LOG)] or [f"  {AGENT_LOG} is empty"]
    if outcome.reason == EndReason.PARENT_GONE:
        return LaunchFailure(FailureKind.INTERRUPTED, "pytest ended before the launch did")
    if outcome.reason == EndReason.GUARD_LOST:
        headline = outcome.detail or "the process that watches the ranks was killed"
        return LaunchFailure(FailureKind.GUARD_LOST, headline, agent_tail)
    if outcome.reason in _NODE_REASONS:
        stacks = _positions(rank for rank in ranks if rank.frames)
        return LaunchFailure(_NODE_REASONS[outcome.reason], outcome.detail, [*stacks, *agent_tail])
    if any(rank.timed_out for rank in ranks):
        return _collective_timeout(ranks)
    failures = sorted(failure for rank in ranks if (failure := _own_failure(rank)))
    if is_limit:
        # A rank that was alive at the limit has left its stacks, and may have failed because it was stopped.
        failures = [failure for failure in failures if not failure.evidence.frames and not failure.is_reaction]
    if failures and outcome.reason in _AFTER_FAILURES:
        return _after_failures(failures, ranks, _unexplained_end(plan, outcome))
    unfinished = [rank for rank in ranks if not rank.has_result]
    if outcome.reason == EndReason.OUTPUT_CAP:
        largest = max(ranks, key=lambda rank: rank.log_bytes)
        headline = f"logs exceed {plan.limits.output_cap_bytes >> 20} MiB, rank {largest.rank} wrote most"
        headline += f"; {_names(unfinished)} left no result"
        return LaunchFailure(FailureKind.OUTPUT_CAP, headline, _log_lines(largest)[-2:], largest.rank)
    if not any(rank.started for rank in ranks):
        # At the limit the guard ends the agent, so how the agent ended is not the cause.
        at_limit = outcome.reason == EndReason.TIME_LIMIT
        cause = _limit(plan, outcome) if at_limit else _agent_end(plan, outcome)
        return LaunchFailure(FailureKind.RENDEZVOUS, f"no rank started; {cause}", agent_tail)
    if plan.starts_ranks and not all(rank.started for rank in ranks):
        return _of_command(plan, outcome, ranks, agent_tail)
    if is_limit:
        return (_not_left if all(rank.returned for rank in ranks) else _hang)(plan, outcome, ranks)
    if outcome.reason == EndReason.RANK_GONE:
        return _ended_early(ranks, _unexplained_end(plan, outcome))
    if plan.starts_ranks:
        return _of_command(plan, outcome, ranks, agent_tail)
    if outcome.agent_status != 0:
        headline = f"{_agent_end(plan, outcome)} before any rank failed; {_names(unfinished)} left no result"
        return LaunchFailure(FailureKind.RENDEZVOUS, headline, agent_tail)
    if not unfinished:
        return LaunchFailure(FailureKind.PROCESS_LEFT, "a process outlived the launch")
    headline = f"{_names(unfinished)} exited with code 0 and left no result"
    if plan.program:
        headline += "; if the script replaces its process, as by os.execv, launch it by run_command"
    return LaunchFailure(FailureKind.RESULT_MISSING, headline, _log_lines(unfinished[0]), unfinished[0].rank)


def _after_failures(failures: list[_RankFailure], ranks: list[RankEvidence], unexplained: str) -> LaunchFailure:
    """Diagnose a launch by its ``failures``, which are in order; ``unexplained`` is what a rank without trace did."""
    if awaited := _awaited_ranks(failures[0], ranks):
        return _gave_up(failures, ranks, awaited)
    if failures[0].is_victim and (absent := [rank for rank in ranks if not rank.left_anything]):
        others = [rank for rank in ranks if rank.left_anything]
        headline = f"{_names(absent)} did not start, and {_names(others)} gave up waiting"
        return LaunchFailure(FailureKind.RENDEZVOUS, headline, _others(others, absent[0].rank), absent[0].rank)
    if failures[0].is_victim and _without_trace(ranks):
        return _ended_early(ranks, unexplained)
    return _first_failure(failures[0], ranks)


def _of_command(
    plan: LaunchPlan, outcome: LaunchOutcome, ranks: Sequence[RankEvidence], agent_tail: list[str]
) -> LaunchFailure:
    """Diagnose the end of a command that starts its own ranks, none of which has left an error."""
    end = _agent_end(plan, outcome) if outcome.reason == EndReason.EXIT else _limit(plan, outcome)
    if absent := [rank for rank in ranks if not rank.started]:
        headline = f"{_names(absent)} never reported; {end}"
        return LaunchFailure(FailureKind.RESULT_MISSING, headline, agent_tail, absent[0].rank)
    if gone := _without_trace(ranks):
        headline = f"{_names(gone)} {_unexplained_end(plan, outcome)}"
        return LaunchFailure(FailureKind.RESULT_MISSING, headline, [*_log_lines(gone[0]), *agent_tail], gone[0].rank)
    left = [rank for rank in ranks if not rank.has_result]
    others = f"{_names(left)} left no result" if left else "every rank left its result"
    if not outcome.agent_status:
        return LaunchFailure(FailureKind.RESULT_MISSING, f"{others}; {end}", agent_tail)
    headline = f"{_exit_text(outcome.agent_status)} of the command {plan.script}; {others}"
    return LaunchFailure(FailureKind.EXIT_CODE, headline, agent_tail)


def _agent_end(plan: LaunchPlan, outcome: LaunchOutcome) -> str:
    warm: dict[str, str] = {LauncherKind.FORKSERVER: "the fork server's agent"}
    agent = f"the command {plan.script}" if plan.starts_ranks else warm.get(outcome.launcher, outcome.launcher)
    if outcome.agent_status is None:
        return f"{agent} was still running"
    return f"{agent} ended with {_exit_text(outcome.agent_status)}"


def _own_failure(rank: RankEvidence) -> _RankFailure | None:
    """Return a rank's own failure, or None."""
    if (error := rank.error) is not None:
        if error.type == "SystemExit":
            text = " after ".join(filter(None, [_exit_message(error.message), error.after]))
            return _RankFailure(_stage(error.after), error.time_ns, FailureKind.EXIT_CODE, text, rank)
        kind = FailureKind.OUT_OF_MEMORY if "OutOfMemory" in error.type else FailureKind.RANK_EXCEPTION
        message = f"{error.type}: {error.message}".removesuffix(": ")
        found = NOT_FINITE.match(message)
        # A rank finds such a value when its script has ended, so the times of the errors tell nothing.
        order = 2 * int(found["step"]) + (found["when"] == "after") if found else error.time_ns
        return _RankFailure(_stage(error.message), order, kind, message, rank)
    if (code := rank.exit_code) is None:
        return None
    # Threads of NCCL and gloo abort in reaction to a failure elsewhere, and SIGTERM is sent to ranks that are stopped.
    # A handler of SIGTERM can choose any exit code.
    is_reaction = code in (-signal.SIGABRT, -signal.SIGTERM) or (rank.was_running and code > 0)
    kind = FailureKind.SIGNAL if code < 0 else FailureKind.EXIT_CODE
    return _RankFailure(_Stage.REACTION if is_reaction else _Stage.ENDED, code, kind, _exit_text(code), rank)


def _stage(message: str) -> _Stage:
    """Return the stage of an error by its message."""
    if _PEER_LATE.search(message):
        return _Stage.PEER_LATE
    return _Stage.PEER_LOST if _PEER_ERROR.search(message) else _Stage.ERROR


def _exit_message(given: str) -> str:
    """Return the argument of ``sys.exit`` in words. For a text, the interpreter exits with code 1."""
    if not re.fullmatch(r"-?\d{1,9}", given):
        return f"{_exit_text(1)}: {given}"
    # The kernel keeps the lowest byte, so that -1 becomes 255.
    return _exit_text(int(given) if int(given) >= 0 else int(given) & 0xFF)


def _first_failure(first: _RankFailure, ranks: Sequence[RankEvidence]) -> LaunchFailure:
    """Diagnose a launch by its first failure."""
    rank = first.evidence
    others = [other for other in ranks if other is not rank]
    headline, *message = first.message.splitlines() or [""]
    shown = (line[:300] for line in message[:_MESSAGE_LINES])
    details = [line if line.startswith("  ") else f"    {line}" for line in shown]
    if len(message) > _MESSAGE_LINES:
        details.append(f"    ... {len(message) - _MESSAGE_LINES} more lines in {_file_of(rank, ERROR_FILE)}")
    details += _place(rank)
    stopped = [other for other in others if not other.error and other.frames]
    # If the rank itself shows no cause, the positions of its peers show the call that it was missing from.
    if first.is_victim or first.is_reaction or not (rank.error or rank.frames):
        located = [other for other in stopped if any(not is_library(frame.file) for frame in other.frames)]
        silent = [other for other in ranks if _is_silent(other) and other.was_running]
        details += _positions([*located, *silent, *_elsewhere(rank, others)])
        stopped = [other for other in stopped if other not in located]
    details += _others(others, rank.rank, first)
    if different := different_collectives(other for other in ranks if not other.has_result):
        details.append(f"  {_differences(different)}")
    done = [other for other in ranks if other.has_result and not other.error] if first.is_victim else []
    if first.is_victim and (left := [other for other in ranks if other.has_result and other.error]):
        details.append(f"  {_names(left)} had left a result{_in_steps(left)}, and waited for the other ranks")
    if done_training := [other for other in stopped if other.returned]:
        details.append(f"  then {_names(done_training)}: stopped after the last step")
    if training := [other for other in stopped if not other.returned]:
        details.append(f"  then {_names(training)}: stopped{_in_steps(training)}")
    before = f"{_ended(done, '')}, and then rank {rank.rank} failed" if done else f"rank {rank.rank} failed first"
    origin = min(done, key=lambda other: other.steps) if done else rank
    return LaunchFailure(first.kind, f"{before}: {headline[:_HEADLINE]}", details, origin.rank)


def _elsewhere(first: RankEvidence, others: Sequence[RankEvidence]) -> list[RankEvidence]:
    """Return the peers that an error ended in another line than ``first``, e.g. in another collective."""
    own = traceback_frames(first) or first.frames
    # A rank with a result waited for the others in a barrier of the harness.
    raised = [other for other in others if other.error and not other.has_result]
    return [other for other in _where_raised(raised) if other.frames != own]


def _where_raised(ranks: Iterable[RankEvidence]) -> list[RankEvidence]:
    """Return ranks with the frames of their errors' tracebacks, without ranks whose traceback has no frame."""
    found = (replace(rank, frames=traceback_frames(rank)) for rank in ranks)
    return [rank for rank in found if rank.frames]


def _place(rank: RankEvidence) -> list[str]:
    """Return lines with the location of a rank's failure and the end of its output."""
    if rank.error is None:
        killed = [_LOOK_INTO_DMESG.format(rank.rank)] if rank.exit_code == -signal.SIGKILL else []
        return [*killed, *(f"  at {frame}" for frame in rank.frames[:_FRAMES_SHOWN]), *_log_lines(rank)]
    error_type, message = rank.error.type, rank.error.message
    lines = traceback_lines(rank.error.traceback, error_type, message, _TRACEBACK_LINES, _file_of(rank, ERROR_FILE))
    # Without frames, the harness raised the error. The message is complete, unless the script returned without a step.
    no_step = rank.returned and not rank.steps and error_type == "RuntimeError"
    has_log = error_type == "SystemExit" or (rank.log_tail and (lines or no_step))
    return [line[:300] for line in lines] + (_log_lines(rank) if has_log else [])


def _others(ranks: Iterable[RankEvidence], origin: int | None, first: _RankFailure | None = None) -> list[str]:
    """Return one line per way in which the other ranks failed; ``first`` is the failure that they followed."""
    summaries: dict[str, list[RankEvidence]] = {}
    errors: dict[str, list[RankEvidence]] = {}
    for rank in ranks:
        failure = _own_failure(rank)
        if failure is None or (failure.is_reaction and rank.frames):
            continue
        if text := _consequence(failure, origin, first):
            summaries.setdefault(text, []).append(rank)
        else:
            errors.setdefault(failure.message.partition("\n")[0][:300], []).append(rank)
    rest = [rank for same in list(errors.values())[_RANKS_SHOWN:] for rank in same]
    lines = [*summaries.items(), *list(errors.items())[:_RANKS_SHOWN], *([("other errors", rest)] if rest else [])]
    lines.sort(key=lambda line: [rank.rank for rank in line[1]])
    return [f"  then {_names(same)}: {text}" for text, same in lines]


def _consequence(failure: _RankFailure, origin: int | None, first: _RankFailure | None) -> str:
    """Return how a failure follows from the first failure; empty for an independent failure."""
    if first is not None and first.evidence.error and failure.evidence.error:
        if failure.message == first.message:
            return "the same error"
        is_alike = _NUMBER.sub("0", failure.message) == _NUMBER.sub("0", first.message)
        if is_alike and not NOT_FINITE.match(failure.message):
            return "the same error with other numbers"
    if first is not None and first.is_victim:
        return ""
    if failure.is_victim:
        is_late = failure.stage == _Stage.PEER_LATE
        happened = "gave up waiting for a peer" if is_late else "connection to a peer lost"
        return f"{happened} (follows from rank {origin})"
    return f"{failure.message} (follows from rank {origin})" if failure.is_reaction else ""


def _awaited_ranks(first: _RankFailure, ranks: Sequence[RankEvidence]) -> list[RankEvidence]:
    """Return the ranks that the rank of the first failure waited for: suspended ones, or else those that ran on."""
    if not first.is_victim:
        return []
    suspended = [rank for rank in ranks if rank.suspended]
    if suspended or first.stage != _Stage.PEER_LATE:
        return suspended
    running = [rank for rank in ranks if rank.was_running and not rank.error and not rank.has_result]
    return [rank for rank in running if not _is_waiting(rank)]


def _gave_up(
    failures: Sequence[_RankFailure], ranks: Sequence[RankEvidence], awaited: Sequence[RankEvidence]
) -> LaunchFailure:
    """Diagnose a launch in which ranks gave up waiting for the ``awaited`` ranks."""
    first = min(awaited, key=lambda rank: rank.steps)
    others = [rank for rank in ranks if rank not in awaited]
    late = [failure.evidence for failure in failures if failure.stage == _Stage.PEER_LATE]
    if first.suspended:
        headline, details = f"{_names(awaited)} {_SUSPENDED}{_in_steps(awaited)}", []
    else:
        headline = f"{_names(late)} gave up waiting for {_names(awaited)}"
        details = _positions((first, *(rank for rank in awaited if rank is not first)))
    details += _others(others, first.rank)
    details += _positions([*_where_raised(late), *(rank for rank in others if rank.frames and not rank.error)])
    return LaunchFailure(FailureKind.HANG_IN_COLLECTIVE, headline, details, first.rank)


def _unexplained_end(plan: LaunchPlan, outcome: LaunchOutcome) -> str:
    """Return how a rank ended that left neither a result nor an error; torchrun reports failing exit codes."""
    if plan.starts_ranks:
        return (
            "ended without a result or an error, as by SIGKILL, by os._exit, or as a wrapper that starts the training "
            f"in another process, which it has to replace itself by (exec); {_agent_end(plan, outcome)}"
        )
    return "exited with code 0 and left no result while others ran, by os._exit(0) for example"


def _ended_early(ranks: Sequence[RankEvidence], unexplained: str) -> LaunchFailure:
    """Diagnose a launch in which a rank ended before the others, without a result, an error or a failing exit code."""
    unfinished = [rank for rank in ranks if rank.started and not rank.has_result]
    gone = _without_trace(ranks) or unfinished
    headline = f"{_names(gone)} {unexplained}"
    origin = gone[0].rank if gone else None
    others = [rank for rank in unfinished if rank not in gone]
    details = _log_lines(gone[0]) if gone else []
    details += [*_others(others, origin), *_positions(rank for rank in others if not rank.error)]
    return LaunchFailure(FailureKind.RESULT_MISSING, headline, details, origin)


def _without_trace(ranks: Sequence[RankEvidence]) -> list[RankEvidence]:
    """Return the ranks that ended by themselves and left neither a result nor an error nor a failing exit code."""
    # Ranks that were still alive have written their stacks, unless they were suspended.
    return [rank for rank in ranks if _is_silent(rank) and not rank.suspended and not rank.was_running]


def _is_silent(rank: RankEvidence) -> bool:
    has_ended = rank.has_result or rank.exit_code is not None or rank.error is not None
    return rank.started and not has_ended and not rank.frames


def _collective_timeout(ranks: Sequence[RankEvidence]) -> LaunchFailure:
    """Diagnose a launch in which NCCL's watchdog ended ranks that waited in a collective."""
    waiting = [rank for rank in ranks if rank.timed_out]
    absent = [rank for rank in ranks if not rank.timed_out]
    calls = dict.fromkeys(rank.timed_out for rank in waiting)
    headline = " and ".join(
        f"{_names([rank for rank in waiting if rank.timed_out == call])} timed out in {call}" for call in calls
    )
    if absent:
        headline += f"; {_names(absent)} not in this collective"
    first = absent[0] if absent else min(waiting, key=lambda rank: rank.steps)
    return LaunchFailure(FailureKind.HANG_IN_COLLECTIVE, headline, _positions(ranks), first.rank)


def _hang(plan: LaunchPlan, outcome: LaunchOutcome, ranks: Sequence[RankEvidence]) -> LaunchFailure:
    """Diagnose a launch in which ranks were still running at the limit."""
    limit, unfinished = _limit(plan, outcome), [rank for rank in ranks if not rank.has_result]
    if not unfinished:
        return LaunchFailure(FailureKind.PROCESS_LEFT, f"{limit}; every rank left its result")
    if different := different_collectives(unfinished):
        first = next(iter(different.values()))[0]
        details = _positions((first, *(rank for rank in unfinished if rank is not first)))
        return LaunchFailure(FailureKind.HANG_IN_COLLECTIVE, f"{limit}; {_differences(different)}", details, first.rank)
    missed = first_missed(unfinished)
    # A rank without a record, such as a suspended one, is known by its stack alone.
    waiting = [rank for rank in unfinished if _is_waiting(rank) or (missed and rank.collectives is not None)]
    absent = [rank for rank in unfinished if rank not in waiting or (missed and rank.rank in missed.missing_ranks)]
    waiting = [rank for rank in waiting if rank not in absent]
    done = [rank for rank in ranks if rank.has_result]
    first = min(absent or waiting, key=lambda rank: (not rank.suspended, rank.steps))
    kind, suspect = FailureKind.HANG_IN_COLLECTIVE, first
    if waiting and (absent or done):
        suspect = first if absent else done[0]
        peers = _names(absent) if absent else _ended(done, ", which")
        headline = f"{_names(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for {peers}"
        if missed:
            headline += f", which never entered {missed.collective}"
    elif waiting and first.in_flight and len({str(rank.in_flight) for rank in waiting}) == 1:
        headline = (
            f"all have entered {first.in_flight}{_in_steps(waiting)}: the limit is too short, the loop makes no "
            f"further step, or the network has failed"
        )
    elif waiting:
        headline = f"all wait in collectives, rank {first.rank} in the earliest step"
    else:
        kind, headline = FailureKind.HANG_ELSEWHERE, f"{_names(absent)} in no collective"
        if not any(rank.steps for rank in unfinished):
            headline += ", before the first measured step: a hang, or a start that takes longer than the limit"
    details = _positions((first, *(rank for rank in unfinished if rank is not first)))
    return LaunchFailure(kind, f"{limit}; {headline}", details, suspect.rank)


def _differences(different: Mapping[str, Sequence[RankEvidence]]) -> str:
    calls = " and ".join(f"{_names(same)} {what}" for what, same in different.items())
    return f"ranks entered different collectives: {calls}"


def _not_left(plan: LaunchPlan, outcome: LaunchOutcome, ranks: Sequence[RankEvidence]) -> LaunchFailure:
    """Diagnose a launch in which every script has returned and some rank's process has not ended."""
    # Only processes that were alive at the limit have left stacks.
    alive = [rank for rank in ranks if rank.frames] or [rank for rank in ranks if not rank.has_result]
    stuck = [rank for rank in alive if not _is_waiting(rank)] or alive
    if not stuck:
        return LaunchFailure(FailureKind.PROCESS_LEFT, f"{_limit(plan, outcome)}; every rank left its result")
    what = "script" if plan.program else "run()"
    steps = ", ".join(str(rank.steps) for rank in stuck[:_RANKS_SHOWN]) if any(rank.steps for rank in stuck) else ""
    reached = f"having entered step {steps}" if steps else "and its steps were not counted"
    headline = f"{_names(stuck)} did not leave after its {what} returned, {reached}"
    details = _positions((*stuck, *(rank for rank in alive if rank not in stuck)))
    return LaunchFailure(FailureKind.PROCESS_LEFT, f"{_limit(plan, outcome)}; {headline}", details, stuck[0].rank)


def _limit(plan: LaunchPlan, outcome: LaunchOutcome) -> str:
    if outcome.reason == EndReason.STRAGGLER:
        return f"a rank was done for {plan.limits.straggler_s:g} s and others were not"
    return f"time limit of {plan.timeout_s:g} s reached"


def _names(ranks: Iterable[RankEvidence]) -> str:
    """Return the numbers of ranks as text, with three or more consecutive numbers as a range."""
    runs: list[list[int]] = []
    for rank in sorted(rank.rank for rank in ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [part for run in runs for part in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run))]
    noun = "rank" if sum(map(len, runs)) == 1 else "ranks"
    return f"{noun} {', '.join(parts[:8])}{', ...' if len(parts) > 8 else ''}" if runs else "no rank"


def _ended(ranks: Sequence[RankEvidence], how: str) -> str:
    """Return ranks that left a result, with their steps; ``how`` joins their names and the verb."""
    return f"{_names(ranks)}{how} ended without an error{_in_steps(ranks)}"


def _in_steps(ranks: Sequence[RankEvidence]) -> str:
    """Return the steps that ranks had entered, such as " in step 5"; empty if no rank had entered a step."""
    least, most = min(rank.steps for rank in ranks), max(rank.steps for rank in ranks)
    if most == 0:
        return ""
    return f" in step {most}" if least == most else f" in steps {least} to {most}"


def _positions(ranks: Iterable[RankEvidence]) -> list[str]:
    """Return the positions of ranks, one line for all ranks at one position; the first rank's position comes first."""
    places: dict[str, list[RankEvidence]] = {}
    for rank in ranks:
        places.setdefault(f"step {rank.steps}: {_position(rank)}", []).append(rank)
    return [f"  {_names(same)}, {place}" for place, same in list(places.items())[:_RANKS_SHOWN]]


def _position(rank: RankEvidence) -> str:
    if rank.suspended:
        return _SUSPENDED
    shown = list(map(str, rank.frames[:_FRAMES_SHOWN]))
    own = next((number for number, frame in enumerate(rank.frames) if not is_library(frame.file)), 0)
    if own >= _FRAMES_SHOWN:
        shown[-1] = f"... < {rank.frames[own]}"
    position = " < ".join(shown)
    if not position and rank.log_tail:
        position = "no stack; the log ends with: " + " | ".join(rank.log_tail[-2:])
    position = position or f"no stack, and {OUTPUT_LOG} is empty"
    return f"in {rank.in_flight}, {position}" if rank.in_flight else position


def _is_waiting(rank: RankEvidence) -> bool:
    """Return whether a rank waits for its peers or for the device, by its stack and, if it left one, its record."""
    shown = rank.frames[:_FRAMES_SHOWN]
    # A rank that imports torch.distributed is in no collective.
    is_import = any("/torch/" in frame.file and frame.function == "<module>" for frame in shown)
    in_library = any("/torch/distributed/" in frame.file for frame in shown) and not is_import
    is_in_flight = rank.collectives is None or rank.in_flight is not None
    return in_library or (is_in_flight and bool(shown) and shown[0].function in _WAITING_FUNCTIONS)


def _log_lines(rank: RankEvidence) -> list[str]:
    """Return the end of a rank's output, or a line that says that it is empty."""
    if not rank.log_bytes:
        return [f"  {_file_of(rank, OUTPUT_LOG)} is empty"]
    return [f"  | {line}" for line in rank.log_tail]


def _file_of(rank: RankEvidence, name: str) -> str:
    """Return the name of a rank's file in the run folder."""
    return f"{RANKS_FOLDER}/{rank.rank}/{name}"


def _exit_text(code: int) -> str:
    """Return an exit status in words, negative for a signal."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
