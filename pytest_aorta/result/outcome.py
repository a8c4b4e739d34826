"""The outcome of a launch, and the durations of its phases, read from the marks that the ranks leave."""

from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeAlias

from msgspec import Meta, field

from pytest_aorta.common.clock import time
from pytest_aorta.common.files import read_regular
from pytest_aorta.common.model import Model
from pytest_aorta.plan.options import LauncherKind
from pytest_aorta.result.folder import MARKS_FILE

MAX_MARKS_BYTES = 4096
# Marks of a rank: its process has started; torch and the workload are imported; the workload's setup() has returned;
# its run(), or the script, has returned.
STARTED, IMPORTED, SET_UP, RAN = "started", "imported", "set_up", "ran"
# Each phase lies between two marks of one rank. A script imports, sets up and runs in an order of its own, so only its
# phases start and leave are known.
WITHIN_RANK = {"import": (STARTED, IMPORTED), "init": (IMPORTED, SET_UP), "run": (SET_UP, RAN)}
PHASES = ("start", *WITHIN_RANK, "leave")


class EndReason(StrEnum):
    """The reason why a launch ended. The guard and the coordinator of the nodes write these strings."""

    EXIT = "exit"  # the torchrun agent ended by itself
    TIME_LIMIT = "time_limit"
    RANK_ERROR = "rank_error"  # a rank left an error, and the grace time of the other ranks is over
    STRAGGLER = "straggler"  # a rank left its result, and the other ranks did not follow in time
    RANK_GONE = "rank_gone"  # a rank has ended without a result and without an error, and torchrun has not
    OUTPUT_CAP = "output_cap"
    STOPPED = "stopped"  # pytest asked for the end
    PARENT_GONE = "parent_gone"
    GUARD_LOST = "guard_lost"
    # Reasons of launches over several nodes only.
    NODE_LOST = "node_lost"
    NODE_LAUNCHER = "node_launcher"
    NODE_MISMATCH = "node_mismatch"


LauncherName: TypeAlias = Annotated[str, Meta(pattern="^[a-z][a-z0-9_-]{0,39}$")]


class LaunchOutcome(Model, frozen=True):
    """The outcome of a launch: the guard's verdict, and ``outcome.json`` in the run folder.

    Attributes:
        reason: why the launch ended.
        agent_status: the torchrun agent's exit code, negative for a signal; None if the agent was killed at the end.
        stopped: ids of processes that were still alive when the launch was ended, and were ended with it.
        survivors: ids of processes that could not be ended.
        wall_s: seconds from the start of the torchrun agent to the end of the last process.
        launcher: what started the ranks: torchrun, forkserver or the name of a plugin's launcher.
        detail: for a reason that concerns a node, the node and what happened.
        phases_s: the phases of ``wall_s`` that every rank has finished: start, import, init, run and leave; for a
            script only start and leave.
        began_ns: when the guard started the agent, in nanoseconds since 1970; 0 if unknown.
    """

    reason: EndReason
    agent_status: int | None
    stopped: tuple[int, ...]
    survivors: tuple[int, ...]
    wall_s: float
    launcher: LauncherName = LauncherKind.TORCHRUN
    detail: str = ""
    phases_s: dict[str, float] = field(default_factory=dict)
    began_ns: int = 0


def launch_times_s(outcome: LaunchOutcome) -> dict[str, float]:
    """Return the launch's duration as ``wall``, and the phases that are known, in seconds."""
    return {"wall": outcome.wall_s, **outcome.phases_s}


def leave_mark(folder: Path, name: str) -> None:
    """Append a mark with the current time to a rank's folder; the mark stays however the rank ends."""
    # A full disk is reported where the rank writes its result.
    with suppress(OSError), (folder / MARKS_FILE).open("a", encoding="ascii") as file:
        file.write(f"{name} {time.time_ns()}\n")


def phases_s(rank_folders: Sequence[Path], began_s: float, ended_s: float) -> dict[str, float]:
    """Return the seconds that each phase took, without the phases that some rank did not finish.

    ``start`` ends and ``leave`` begins with the last rank's mark; the other phases are those of the slowest rank.
    ``began_s`` and ``ended_s`` are in seconds since 1970.
    """
    ranks = [read_marks(folder) for folder in rank_folders]
    phases = {}
    if all(STARTED in marks for marks in ranks):
        phases["start"] = max(marks[STARTED] for marks in ranks) - began_s
    for name, (first, last) in WITHIN_RANK.items():
        if all(first in marks and last in marks for marks in ranks):
            phases[name] = max(marks[last] - marks[first] for marks in ranks)
    if all(RAN in marks for marks in ranks):
        phases["leave"] = ended_s - max(marks[RAN] for marks in ranks)
    # A system clock that is set back during the launch makes a phase negative.
    return {name: max(0.0, duration_s) for name, duration_s in phases.items()}


def read_marks(folder: Path) -> dict[str, float]:
    """Return the marks of one rank in seconds since 1970, without malformed lines such as half a line."""
    marks = {}
    with suppress(OSError):
        text = read_regular(folder / MARKS_FILE, MAX_MARKS_BYTES).decode("ascii", "replace")
        for line in text.splitlines(keepends=True):
            name, _, time_ns = line.rstrip("\n").partition(" ")
            if line.endswith("\n") and time_ns.isdecimal() and len(time_ns) < 20:
                marks[name] = int(time_ns) / 1e9
    return marks
