"""Evidence that the ranks of a failed launch left: files, stacks, ends of logs, the last collectives."""

import os
import re
import signal
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import TypeVar

from pytest_aorta.common.files import UnreadableFile, open_regular
from pytest_aorta.common.model import Count, Model, read_model
from pytest_aorta.common.text import is_harness, without_harness
from pytest_aorta.plan.launch_plan import LaunchPlan
from pytest_aorta.result import folder as names

T = TypeVar("T")
_MAX_BYTES = 1 << 20
_LOG_LINES = 8
# Torch writes such lines when a profile starts and ends.
_OF_PROFILER = "USDT:"
_WATCHDOG = re.compile(r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+)")
_FATAL = re.compile(r"(?m)^Fatal Python error: (.+)$")
# The words of faulthandler for fatal signals are those of the C library.
_FATAL_SIGNALS = {
    signal.strsignal(number): number
    for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
}
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]*)", line (?P<line>\d{1,9}),? in (?P<function>.*)$')


class FirstNotFinite(Model, frozen=True, order=True):
    """The place of a rank's first NaN or infinite value: in a step, or after its optimizer's update."""

    step: Count
    is_after: bool = False


class _RankError(Model, frozen=True, forbid_unknown_fields=False):
    """The exception that ended a rank; the traceback begins with the first frame that is not of the harness.

    ``after`` is the error that the script handled by exiting, whose traceback it then is; empty without one.
    """

    type: str
    message: str
    traceback: str
    time_ns: Count
    after: str = ""
    not_finite: FirstNotFinite | None = None


class _AgentFailure(Model, frozen=True, forbid_unknown_fields=False):
    """The exit code of a rank that the torchrun agent has seen."""

    rank: Count
    exit_code: int


class _AgentReport(Model, frozen=True, forbid_unknown_fields=False):
    """Observations of the torchrun agent; ``running`` are the ranks that ran on when it found a failure."""

    failures: list[_AgentFailure]
    running: list[Count] = []


class EnteredCollective(Model, frozen=True, forbid_unknown_fields=False):
    """A collective, or a send or receive, that a rank has entered; ``retired`` if torch has seen its end."""

    profiling_name: str
    collective_seq_id: int
    process_group: tuple[str, ...] = ("0", "default_pg")
    input_sizes: tuple[tuple[int, ...], ...] = ()
    time_created_ns: int = 0
    is_p2p: bool = False
    retired: bool = False

    def __str__(self) -> str:
        """Return the name with the number."""
        return f"{self.profiling_name} number {self.collective_seq_id}"

    @property
    def place(self) -> tuple[str, ...]:
        """The group, with the backend: the collectives of a place have the same order on every rank."""
        return (*self.process_group, self.profiling_name.partition(":")[0])

    @property
    def what(self) -> str:
        """The name, with the sizes if they have to be equal on all ranks."""
        has_sizes = self.profiling_name.endswith((":all_reduce", ":broadcast"))
        return f"{self.profiling_name} of {list(map(list, self.input_sizes))}" if has_sizes else self.profiling_name


class _CollectivesReport(Model, frozen=True, forbid_unknown_fields=False):
    """The last collectives of a rank, in order; None without a record."""

    entries: tuple[EnteredCollective, ...] | None = None


@dataclass(frozen=True)
class Frame:
    """A Python stack frame."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """Return the function with its file and line, the path shortened to its last three parts."""
        return f"{self.function} ({'/'.join(Path(self.file).parts[-3:])}:{self.line})"


@dataclass(frozen=True)
class RankEvidence:
    """The files of one rank.

    Attributes:
        started: the rank left its process id or its result.
        returned: the workload's run(), or the script, has returned.
        has_result: the rank left its result.
        error: the exception that ended the rank.
        exit_code: the exit code of a rank that ended by itself, negative for a signal; None if neither the torchrun
            agent nor the rank's stack reports one.
        was_running: the rank was still running when a peer had failed or a limit was reached, and was then stopped.
        frames: frames of the rank's main thread at a time limit, or of the thread that a fatal signal ended, innermost
            first and without those of the harness.
        steps: measured steps that the rank has entered.
        log_tail: the last lines of the rank's output that are not lines of ``error``.
        log_bytes: the size of the rank's output, in bytes.
        damaged: files of the rank that can't be read, with the reasons.
        collectives: the last collectives that the rank had entered before it was stopped, in order; None if the rank
            left no record of them.
        timed_out: the collective that NCCL's watchdog reported as timed out, with its sequence number.
    """

    rank: int
    started: bool
    returned: bool
    has_result: bool
    error: _RankError | None
    exit_code: int | None
    frames: tuple[Frame, ...]
    steps: int
    log_tail: tuple[str, ...]
    log_bytes: int
    collectives: tuple[EnteredCollective, ...] | None
    timed_out: str | None
    was_running: bool
    damaged: tuple[str, ...]

    @property
    def counted(self) -> list[EnteredCollective]:
        """The collectives that have a number of their own, unlike sends, receives and batches of these."""
        found = self.collectives or ()
        return [entry for entry in found if not (entry.is_p2p or entry.profiling_name.endswith(":coalesced"))]

    @property
    def in_flight(self) -> EnteredCollective | None:
        """The first collective that had not ended when the rank was stopped."""
        # The parts of a coalesced collective never retire.
        ended = {entry.place: entry.collective_seq_id for entry in self.counted if entry.retired}
        return next((entry for entry in self.counted if entry.collective_seq_id > ended.get(entry.place, 0)), None)


def read_evidence(plan: LaunchPlan, stopped: Collection[int] = ()) -> list[RankEvidence]:
    """Return every rank's evidence, in order of rank; ``stopped`` are ids of processes that the guard has stopped."""
    damaged: list[str] = []
    agent = _read(plan.run_dir / names.AGENT_FILE, _AgentReport, damaged) or _AgentReport([])
    exit_codes = {failure.rank: failure.exit_code for failure in agent.failures}
    running = set(agent.running)
    if stopped:
        running |= {rank for rank, pid in names.rank_pids(plan.run_dir).items() if pid in stopped}
    # The torchrun agent's file describes all ranks, so the first rank's evidence reports damage to the file.
    return [
        _read_rank(plan, rank, exit_codes.get(rank), rank in running, damaged if rank == plan.world.ranks[0] else [])
        for rank in plan.world.ranks
    ]


def log_tail(path: Path, known: Collection[str] = ()) -> tuple[str, ...]:
    """Return the last lines of a log that are not ``known`` from elsewhere, each cut to 300 characters."""
    lines = without_harness(_text(path)).splitlines()
    lines = [line for line in lines if line.strip() and line not in known and not line.startswith(_OF_PROFILER)]
    return tuple(line[:300] for line in lines[-_LOG_LINES:])


def traceback_frames(rank: RankEvidence) -> tuple[Frame, ...]:
    """Return the frames of the error that ended a rank, innermost first and without those of the harness."""
    # An error that led to this error comes before it.
    traceback = rank.error.traceback.rpartition("Traceback (most recent call last):")[2] if rank.error else ""
    return _own_frames(_frames(reversed(traceback.splitlines())))


def _read_rank(
    plan: LaunchPlan, rank: int, exit_code: int | None, was_running: bool, damaged: list[str]
) -> RankEvidence:
    folder = names.rank_folder(plan.run_dir, rank)
    log = folder / names.OUTPUT_LOG
    error, stacks = _read(folder / names.ERROR_FILE, _RankError, damaged), _text(folder / names.STACKS_FILE)
    return RankEvidence(
        rank=rank,
        started=(folder / names.PID_FILE).exists() or (folder / names.RESULT_FILE).exists(),
        returned=(folder / names.RETURNED_FILE).exists(),
        has_result=(folder / names.RESULT_FILE).exists(),
        error=error,
        # The torchrun agent reports no exit code of a rank that was still ending when the agent found a peer's failure.
        exit_code=_fatal_signal(stacks) if exit_code is None else exit_code,
        frames=_main_frames(stacks),
        steps=names.steps_entered(folder),
        log_tail=log_tail(log, set(f"{error.traceback}\n{error.message}".splitlines()) if error else ()),
        log_bytes=log.stat().st_size if log.exists() else 0,
        collectives=(_read(folder / names.IN_FLIGHT_FILE, _CollectivesReport, damaged) or _CollectivesReport()).entries,
        timed_out=f"{timeout[2]} number {timeout[1]}" if (timeout := _WATCHDOG.search(_text(log))) else None,
        was_running=was_running,
        damaged=tuple(damaged),
    )


def _fatal_signal(stacks: str) -> int | None:
    """Return the exit code of the fatal signal that wrote the stacks; None if they were requested."""
    match = _FATAL.search(stacks)
    number = _FATAL_SIGNALS.get(match[1].strip().replace("-", " ")) if match else None
    return None if number is None else -number


def _main_frames(stacks: str) -> tuple[Frame, ...]:
    """Return the main thread's frames: the last block whose outermost frame is not the start of another thread.

    If a fatal signal has ended another thread, the frames are those of that thread.
    """
    found: tuple[Frame, ...] = ()
    is_fatal = False
    for block in re.split(r"(?m)^(?=Current thread |Thread )", stacks):
        frames = _frames(block.splitlines()[1:])
        if is_fatal and block.startswith("Current thread ") and frames:
            return _own_frames(frames) or frames
        is_fatal = is_fatal or _FATAL.search(block) is not None
        if frames and frames[-1].function != "_bootstrap":
            found = frames
    return _own_frames(found) or found


def _frames(lines: Iterable[str]) -> tuple[Frame, ...]:
    matches = map(_FRAME.match, lines)
    return tuple(Frame(match["file"], int(match["line"]), match["function"]) for match in matches if match)


def _own_frames(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Return the frames without those that started the rank's code, imported it, or reported the stack."""
    inner = [frame for frame in frames if "/pytest_aorta/launch/" not in frame.file and not frame.file.startswith("<")]
    return tuple(reversed(list(dropwhile(lambda frame: is_harness(frame.file), reversed(inner)))))


def _text(path: Path) -> str:
    try:
        with open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _MAX_BYTES))
            return file.read(_MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _read(path: Path, kind: type[T], damaged: list[str]) -> T | None:
    """Return what a file holds; None if it is absent or damaged.

    A damaged file is added to ``damaged`` and reported with the diagnosis, for which the other files can be enough.
    """
    if not os.path.lexists(path):
        return None
    try:
        return read_model(path, kind, max_bytes=_MAX_BYTES, follow_links=False, by_hand=False)
    except UnreadableFile as error:
        damaged.append(str(error))
        return None


@dataclass(frozen=True)
class MissedCollective:
    """The first collective that not all ranks joined, and the ranks that are missing from it."""

    collective: EnteredCollective
    missing_ranks: tuple[int, ...]


def first_missed(ranks: Iterable[RankEvidence]) -> MissedCollective | None:
    """Return the first collective that a rank waits in and others have not entered, by the ranks' own records."""
    recorded = [rank for rank in ranks if rank.collectives is not None]
    waiting = [collective for rank in recorded if (collective := rank.in_flight)]
    for awaited in sorted(waiting, key=lambda collective: collective.time_created_ns):
        if missing := tuple(rank.rank for rank in recorded if _has_missed(rank, awaited)):
            return MissedCollective(awaited, missing)
    return None


def _has_missed(rank: RankEvidence, awaited: EnteredCollective) -> bool:
    entered = [entry.collective_seq_id for entry in rank.counted if entry.place == awaited.place]
    # Every rank is in the default group. Of the other groups, only a rank that has used one is known to be in it.
    return max(entered, default=0) < awaited.collective_seq_id and (bool(entered) or awaited.process_group[0] == "0")


def different_collectives(ranks: Iterable[RankEvidence]) -> dict[str, list[RankEvidence]]:
    """Return ranks by what they entered as the first collective that differs between ranks; empty without one.

    The ranks that left their own order come first, e.g. a rank that skipped a collective of its earlier steps.
    """
    by_number = {rank.rank: rank for rank in ranks}
    entered: dict[tuple[str, ...], dict[int, EnteredCollective]] = {}
    for number, rank in by_number.items():
        for entry in rank.counted:
            entered.setdefault((*entry.place, str(entry.collective_seq_id)), {}).setdefault(number, entry)
    different = [by_rank for by_rank in entered.values() if len({entry.what for entry in by_rank.values()}) > 1]
    first = min(different, key=lambda by_rank: min(entry.time_created_ns for entry in by_rank.values()), default={})
    found: dict[str, list[RankEvidence]] = {}
    for number, entry in first.items():
        found.setdefault(f"{entry.what} (number {entry.collective_seq_id})", []).append(by_number[number])
    return dict(sorted(found.items(), key=lambda item: (_is_usual(item[1][0], first[item[1][0].rank]), len(item[1]))))


def _is_usual(rank: RankEvidence, collective: EnteredCollective) -> bool:
    """Return whether a collective is what followed the longest earlier repetition of the rank's collectives before."""
    order = [entry for entry in rank.counted if entry.place == collective.place]
    before = [entry.what for entry in order if entry.collective_seq_id < collective.collective_seq_id]
    repeated = [
        sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before[:end][::-1], before[::-1], strict=False)))
        for end in range(len(before))
    ]
    return bool(before) and before[max(range(len(before)), key=lambda end: repeated[end])] == collective.what
