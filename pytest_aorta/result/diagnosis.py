"""Diagnoses a failed launch: the class of the failure, the rank that failed first, and a short text of evidence."""

import re
import signal
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum, auto
from functools import cached_property
from pathlib import Path

from pytest_aorta.common.text import counted, is_library, ranks_text, traceback_lines
from pytest_aorta.plan.launch_plan import LaunchPlan
from pytest_aorta.plan.world import SIMULATED
from pytest_aorta.result.evidence import (
    FirstNotFinite,
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
# Errors of a rank whose peer did not answer in time. If this rank then ends, its peers lose their connections.
_PEER_LATE = re.compile(
    r"timed out waiting \d+ ?ms for (recv|send)|wait timeout( after \d+ ?ms, keys|$)|timeout waiting for key: ",
    re.IGNORECASE,
)
_LOOK_INTO_DMESG = (
    "  next: look for rank {} in dmesg, since the kernel sends SIGKILL if the host or a container runs out of memory"
)
# What torch says to a script that is written for GPUs, on a machine without, or that starts ranks in each rank.
_ADVICE = {
    re.compile(
        r"doesn't have NCCL built in|ProcessGroupNCCL is only supported with GPUs"
    ): "  next: call init_process_group() without a backend, which takes gloo on CPU ranks and NCCL on GPUs",
    re.compile(
        r"Found no NVIDIA driver|Torch not compiled with CUDA enabled|No HIP GPUs are available"
    ): '  next: take the device "cuda" if torch.cuda.is_available() else "cpu", as ranks without a GPU have none',
    re.compile(
        r"^Process(Exited|Raised)Exception:"
    ): "  next: where the script starts its ranks itself, launch it as a command: aorta init -- python SCRIPT",
}
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
        not_finite: the place of its first value that was NaN or infinite; None without one.
    """

    kind: FailureKind
    headline: str
    details: Sequence[str] = ()
    rank: int | None = None
    not_finite: FirstNotFinite | None = None

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
# Reasons of a launch over several nodes; the outcome's detail names the node.
_NODE_REASONS = (EndReason.NODE_LOST, EndReason.NODE_LAUNCHER, EndReason.NODE_MISMATCH)


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


@dataclass(frozen=True)
class _Launch:
    """A launch that has failed: its plan, how it ended, and what its ranks left."""

    plan: LaunchPlan
    outcome: LaunchOutcome
    ranks: Sequence[RankEvidence]

    @property
    def has_folder(self) -> bool:
        """Return whether the folder is there; the plan is written first, so other files can't replace it."""
        return (self.plan.run_dir / PLAN_FILE).is_file()

    @property
    def is_at_limit(self) -> bool:
        """Return whether the ranks took too long."""
        return self.outcome.reason in (EndReason.TIME_LIMIT, EndReason.STRAGGLER)

    @cached_property
    def failures(self) -> list[_RankFailure]:
        """The failures of ranks, the first one first."""
        found = sorted(failure for rank in self.ranks if (failure := _own_failure(rank)))
        # A rank that was alive at the limit has left its stacks, and may have failed because it was stopped.
        stopped = [failure for failure in found if failure.evidence.frames or failure.is_reaction]
        return [failure for failure in found if not (self.is_at_limit and failure in stopped)]

    @property
    def unfinished(self) -> list[RankEvidence]:
        """The ranks that left no result."""
        return [rank for rank in self.ranks if not rank.has_result]

    @property
    def absent(self) -> list[RankEvidence]:
        """The ranks that left neither their process id nor an error."""
        return [rank for rank in self.ranks if not (rank.started or rank.error)]

    @property
    def gone(self) -> list[RankEvidence]:
        """The ranks that ended by themselves and left neither a result nor an error nor a failing exit code."""
        # Ranks that were still alive have written their stacks.
        return [rank for rank in self.ranks if _is_silent(rank) and not rank.was_running]

    @property
    def awaited(self) -> list[RankEvidence]:
        """The ranks that the rank of the first failure waited for, which ran on."""
        if self.failures[0].stage != _Stage.PEER_LATE:
            return []
        running = [rank for rank in self.ranks if rank.was_running and not rank.error and not rank.has_result]
        return [rank for rank in running if not _is_waiting(rank)]

    @property
    def agent_tail(self) -> list[str]:
        """The end of the agent's log."""
        return [f"  | {line}" for line in log_tail(self.plan.run_dir / AGENT_LOG)] or [f"  {AGENT_LOG} is empty"]

    @property
    def end(self) -> str:
        """How the launch ended. At a limit the guard ends the agent, so how the agent ended is not the cause."""
        if self.outcome.reason == EndReason.STRAGGLER:
            return f"a rank was done for {self.plan.limits.straggler_s:g} s and others were not"
        if self.is_at_limit:
            return f"time limit of {self.plan.timeout_s:g} s reached"
        agent = f"the command {self.plan.script}" if self.plan.starts_ranks else self.outcome.launcher
        status = self.outcome.agent_status
        return f"{agent} " + ("was still running" if status is None else f"ended with {_exit_text(status)}")


def launch_failure(plan: LaunchPlan, outcome: LaunchOutcome) -> LaunchFailure | None:
    """Return the diagnosis of a launch; None if every rank succeeded and left a result."""
    launch = _Launch(plan, outcome, read_evidence(plan, outcome.stopped if outcome.reason in _AT_LIMIT else ()))
    ended_well = outcome.reason == EndReason.EXIT and outcome.agent_status == 0
    if ended_well and not launch.unfinished and not outcome.survivors:
        return None
    found = _diagnose(launch)
    world = plan.world
    nodes = f" of {world.nodes} nodes" if world.nodes > 1 else ""
    headline = found.headline if found.kind in _NAMED_BY_HEADLINE else f"{found.kind}: {found.headline}"
    ranks_named = counted(world.size, f"{SIMULATED if world.simulated else world.device} rank")
    damaged = [f"damaged: {problem}" for rank in launch.ranks for problem in rank.damaged][:_RANKS_SHOWN]
    lines = [*found.details, *damaged]
    if launch.has_folder and (problem := _cannot_write(plan.run_dir)):
        lines.insert(0, f"{plan.run_dir} can't be written: {problem}")
    if plan.reference and plan.reference.worktree and re.search("No module named|No such file", headline):
        lines.append(f"files of {plan.reference.name} are those of its commit, without untracked ones and submodules")
    if outcome.survivors:
        lines.append(f"processes {list(outcome.survivors)} could not be ended; their devices stay leased")
    lines.append(f"plan, logs and stacks: {plan.run_dir}" if launch.has_folder else _OTHER_FOLDER)
    return replace(found, headline=f"{plan.title} on {ranks_named}{nodes}: {headline}", details=lines)


def _diagnose(launch: _Launch) -> LaunchFailure:
    """Return the diagnosis of the first row that applies: a cause comes before what follows from it."""
    reason, status, end, tail = launch.outcome.reason, launch.outcome.agent_status, launch.end, launch.agent_tail
    starts_ranks, is_at_limit, unfinished = launch.plan.starts_ranks, launch.is_at_limit, launch.unfinished
    has_failed = bool(launch.failures) and reason in _AFTER_FAILURES
    are_victims = has_failed and launch.failures[0].is_victim
    deleted = f"the launch's folder {launch.plan.run_dir} was deleted during the launch, e.g. by the script; {end}"
    unwatched = launch.outcome.detail or "the process that watches the ranks was killed"
    stacks = _positions(rank for rank in launch.ranks if rank.frames)
    left = f"{_names(unfinished)} left no result" if unfinished else "every rank left its result"
    first_absent = min((rank.rank for rank in launch.absent), default=None)
    has_outlived = not unfinished and (status == 0 or (is_at_limit and not stacks))
    rows: Sequence[tuple[object, LaunchFailure | Callable[[_Launch], LaunchFailure]]] = (
        (not launch.has_folder, LaunchFailure(FailureKind.RESULTS_DELETED, deleted)),
        (reason == EndReason.GUARD_LOST, LaunchFailure(FailureKind.GUARD_LOST, unwatched, tail)),
        (
            reason in _NODE_REASONS,
            lambda _: LaunchFailure(FailureKind[reason.name], launch.outcome.detail, stacks + tail),
        ),
        (any(rank.timed_out for rank in launch.ranks), _collective_timeout),
        (are_victims and launch.awaited, _gave_up),
        (are_victims and launch.absent, _not_started),
        (are_victims and launch.gone, _ended_early),
        (has_failed, _first_failure),
        (reason == EndReason.OUTPUT_CAP, _output_cap),
        (
            not any(rank.started for rank in launch.ranks),
            LaunchFailure(FailureKind.RENDEZVOUS, f"no rank started; {end}", tail),
        ),
        (
            starts_ranks and launch.absent,
            LaunchFailure(
                FailureKind.RESULT_MISSING, f"{_names(launch.absent)} never reported; {end}", tail, first_absent
            ),
        ),
        (has_outlived, LaunchFailure(FailureKind.PROCESS_LEFT, f"a process outlived the launch; {end}")),
        (is_at_limit and (not unfinished or all(rank.returned for rank in launch.ranks)), _not_left),
        (is_at_limit, _hang),
        (reason == EndReason.RANK_GONE or (starts_ranks and launch.gone), _ended_early),
        (
            status and starts_ranks,
            LaunchFailure(
                FailureKind.EXIT_CODE, f"{_exit_text(status or 0)} of the command {launch.plan.script}; {left}", tail
            ),
        ),
        (status != 0, LaunchFailure(FailureKind.RENDEZVOUS, f"{end} before any rank failed; {left}", tail)),
        (True, _result_missing),
    )
    found = next(diagnosis for applies, diagnosis in rows if applies)
    return found if isinstance(found, LaunchFailure) else found(launch)


def _cannot_write(folder: Path) -> str:
    """Return why 64 KiB can't be written into a folder, such as that its disk is full; empty if they can."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 16))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _own_failure(rank: RankEvidence) -> _RankFailure | None:
    """Return a rank's own failure, or None."""
    if (error := rank.error) is not None:
        if error.type == "SystemExit":
            text = " after ".join(filter(None, [_exit_message(error.message), error.after]))
            return _RankFailure(_stage(error.after), error.time_ns, FailureKind.EXIT_CODE, text, rank)
        kind = FailureKind.OUT_OF_MEMORY if "OutOfMemory" in error.type else FailureKind.RANK_EXCEPTION
        message = f"{error.type}: {error.message}".removesuffix(": ")
        # A rank finds such a value when its script has ended, so the times of the errors tell nothing.
        first = error.not_finite
        order = 2 * first.step + first.is_after if first else error.time_ns
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


def _first_failure(launch: _Launch) -> LaunchFailure:
    """Diagnose a launch by its first failure."""
    first, ranks = launch.failures[0], launch.ranks
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
    if different := different_collectives(launch.unfinished):
        details.append(f"  {_differences(different)}")
    done = [other for other in ranks if other.has_result and not other.error] if first.is_victim else []
    if first.is_victim and (left := [other for other in ranks if other.has_result and other.error]):
        details.append(f"  {_names(left)} had left a result{_in_steps(left)}, and waited for the other ranks")
    if stopped:
        details.append(f"  then {_names(stopped)}: stopped{_in_steps(stopped)}")
    before = f"{_ended(done, '')}, and then rank {rank.rank} failed" if done else f"rank {rank.rank} failed first"
    origin = min(done, key=lambda other: other.steps) if done else rank
    not_finite = rank.error.not_finite if rank.error else None
    return LaunchFailure(first.kind, f"{before}: {headline[:_HEADLINE]}", details, origin.rank, not_finite)


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
    hint = [step for said, step in _ADVICE.items() if said.search(f"{error_type}: {message}")]
    lines = traceback_lines(rank.error.traceback, error_type, message, _TRACEBACK_LINES, _file_of(rank, ERROR_FILE))
    # Without frames, the harness raised the error. The message is complete, unless the script returned without a step.
    no_step = rank.returned and not rank.steps and error_type == "RuntimeError"
    has_log = error_type == "SystemExit" or (rank.log_tail and (lines or no_step))
    return [*hint, *(line[:300] for line in lines)] + (_log_lines(rank) if has_log else [])


def _others(ranks: Iterable[RankEvidence], origin: int | None, first: _RankFailure | None = None) -> list[str]:
    """Return one line per way in which the other ranks failed; ``first`` is the failure that they followed."""
    alike: dict[str, list[RankEvidence]] = {}
    for rank in ranks:
        failure = _own_failure(rank)
        if failure and not (failure.is_reaction and rank.frames):
            text = _consequence(failure, origin, first) or failure.message.partition("\n")[0][:300]
            alike.setdefault(text, []).append(rank)
    lines = [f"  then {_names(same)}: {text}" for text, same in list(alike.items())[:_RANKS_SHOWN]]
    if rest := [rank for same in list(alike.values())[_RANKS_SHOWN:] for rank in same]:
        lines.append(f"  then {_names(rest)}: other errors")
    return lines


def _consequence(failure: _RankFailure, origin: int | None, first: _RankFailure | None) -> str:
    """Return how a failure follows from the first failure; empty for an independent failure."""
    if first is not None and first.evidence.error and failure.evidence.error:
        if failure.message == first.message:
            return "the same error"
        is_alike = _NUMBER.sub("0", failure.message) == _NUMBER.sub("0", first.message)
        if is_alike and not failure.evidence.error.not_finite:
            return "the same error with other numbers"
    if first is not None and first.is_victim:
        return ""
    if failure.is_victim:
        is_late = failure.stage == _Stage.PEER_LATE
        happened = "gave up waiting for a peer" if is_late else "connection to a peer lost"
        return f"{happened} (follows from rank {origin})"
    return f"{failure.message} (follows from rank {origin})" if failure.is_reaction else ""


def _gave_up(launch: _Launch) -> LaunchFailure:
    """Diagnose a launch in which ranks gave up waiting for others."""
    awaited = launch.awaited
    first = min(awaited, key=lambda rank: rank.steps)
    others = [rank for rank in launch.ranks if rank not in awaited]
    late = [failure.evidence for failure in launch.failures if failure.stage == _Stage.PEER_LATE]
    headline = f"{_names(late)} gave up waiting for {_names(awaited)}"
    details = [*_positions([first, *awaited]), *_others(others, first.rank)]
    details += _positions([*_where_raised(late), *(rank for rank in others if rank.frames and not rank.error)])
    return LaunchFailure(FailureKind.HANG_IN_COLLECTIVE, headline, details, first.rank)


def _not_started(launch: _Launch) -> LaunchFailure:
    """Diagnose a launch in which ranks gave up waiting for others that never started."""
    others = [rank for rank in launch.ranks if rank not in launch.absent]
    headline = f"{_names(launch.absent)} did not start, and {_names(others)} gave up waiting"
    first = launch.absent[0].rank
    return LaunchFailure(FailureKind.RENDEZVOUS, headline, _others(others, first), first)


def _ended_early(launch: _Launch) -> LaunchFailure:
    """Diagnose a launch in which a rank ended before the others, without a result, an error or a failing exit code."""
    how = "ended without a result or an error while others ran, as by os._exit(0)"
    if launch.plan.starts_ranks:
        how = (
            "ended without a result or an error, as by SIGKILL, by os._exit, or as a wrapper that starts the training "
            f"in another process, which it has to replace itself by (exec); {launch.end}"
        )
    unfinished = [rank for rank in launch.unfinished if rank.started]
    gone = launch.gone or unfinished
    origin = gone[0].rank if gone else None
    others = [rank for rank in unfinished if rank not in gone]
    details = [*(_log_lines(gone[0]) if gone else []), *_others(others, origin)]
    details += _positions(rank for rank in others if not rank.error)
    details += launch.agent_tail if launch.plan.starts_ranks else []
    return LaunchFailure(FailureKind.RESULT_MISSING, f"{_names(gone)} {how}", details, origin)


def _is_silent(rank: RankEvidence) -> bool:
    has_ended = rank.has_result or rank.exit_code is not None or rank.error is not None
    return rank.started and not has_ended and not rank.frames


def _collective_timeout(launch: _Launch) -> LaunchFailure:
    """Diagnose a launch in which NCCL's watchdog ended ranks that waited in a collective."""
    waiting = [rank for rank in launch.ranks if rank.timed_out]
    absent = [rank for rank in launch.ranks if not rank.timed_out]
    calls = dict.fromkeys(rank.timed_out for rank in waiting)
    headline = " and ".join(
        f"{_names(rank for rank in waiting if rank.timed_out == call)} timed out in {call}" for call in calls
    )
    if absent:
        headline += f"; {_names(absent)} not in this collective"
    first = absent[0] if absent else min(waiting, key=lambda rank: rank.steps)
    return LaunchFailure(FailureKind.HANG_IN_COLLECTIVE, headline, _positions(launch.ranks), first.rank)


def _hang(launch: _Launch) -> LaunchFailure:
    """Diagnose a launch in which ranks were still running at the limit."""
    unfinished = launch.unfinished
    kind = FailureKind.HANG_IN_COLLECTIVE
    if different := different_collectives(unfinished):
        first = suspect = next(iter(different.values()))[0]
        headline = _differences(different)
    else:
        missed = first_missed(unfinished)
        # A rank without a record is known by its stack alone.
        waiting = [rank for rank in unfinished if _is_waiting(rank) or (missed and rank.collectives is not None)]
        absent = [rank for rank in unfinished if rank not in waiting or (missed and rank.rank in missed.missing_ranks)]
        waiting = [rank for rank in waiting if rank not in absent]
        done = [rank for rank in launch.ranks if rank.has_result]
        first = suspect = min(absent or waiting, key=lambda rank: rank.steps)
        if waiting and (absent or done):
            suspect = first if absent else done[0]
            peers = _names(absent) if absent else _ended(done, ", which")
            headline = f"{_names(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for {peers}"
            headline += f", which never entered {missed.collective}" if missed else ""
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
    return LaunchFailure(kind, f"{launch.end}; {headline}", _positions([first, *unfinished]), suspect.rank)


def _differences(different: Mapping[str, Sequence[RankEvidence]]) -> str:
    calls = " and ".join(f"{_names(same)} {what}" for what, same in different.items())
    return f"ranks entered different collectives: {calls}"


def _not_left(launch: _Launch) -> LaunchFailure:
    """Diagnose a launch in which every script has returned and some rank's process has not ended."""
    # Only processes that were alive at the limit have left stacks.
    alive = [rank for rank in launch.ranks if rank.frames] or launch.unfinished
    stuck = [rank for rank in alive if not _is_waiting(rank)] or alive
    what = "script" if launch.plan.program else "run()"
    headline = f"{launch.end}; {_names(stuck)} did not leave after its {what} returned{_in_steps(stuck)}"
    return LaunchFailure(FailureKind.PROCESS_LEFT, headline, _positions([*stuck, *alive]), stuck[0].rank)


def _output_cap(launch: _Launch) -> LaunchFailure:
    largest = max(launch.ranks, key=lambda rank: rank.log_bytes)
    headline = f"logs exceed {launch.plan.limits.output_cap_bytes >> 20} MiB, rank {largest.rank} wrote most"
    return LaunchFailure(FailureKind.OUTPUT_CAP, headline, _log_lines(largest), largest.rank)


def _result_missing(launch: _Launch) -> LaunchFailure:
    """Diagnose a launch whose agent ended well although ranks left no result."""
    first, headline = launch.unfinished[0], f"{_names(launch.unfinished)} exited with code 0 and left no result"
    if launch.plan.program:
        headline += "; if the script replaces its process, as by os.execv, launch it by run_command"
    return LaunchFailure(FailureKind.RESULT_MISSING, headline, _log_lines(first), first.rank)


def _names(ranks: Iterable[RankEvidence]) -> str:
    return ranks_text(rank.rank for rank in ranks)


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
