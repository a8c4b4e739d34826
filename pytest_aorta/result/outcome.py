"""How a launch ended, and how long its phases took."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pytest_aorta.plan.options import LauncherKind


@dataclass(frozen=True)
class LaunchOutcome:
    """How a launch ended, as the guard saw it.

    Attributes:
        reason: exit, time_limit, rank_error, straggler, output_cap, stopped, parent_gone, or guard_lost; over several
            nodes also node_lost, node_launcher or node_mismatch.
        agent_status: the agent's exit code, negative for a signal, None where it was killed at the end.
        stopped: processes that were still there when the reason came up, and were ended.
        survivors: processes that could not be ended.
        wall_s: from the agent's start to the last process's end.
        launcher: what started the ranks, torchrun or forkserver.
        detail: of a reason that is a node's, which node, and what happened.
        phases_s: parts of wall_s, as far as the ranks came: start, import, init, run, leave; of a script start, leave.
    """

    reason: str
    agent_status: int | None
    stopped: tuple[int, ...]
    survivors: tuple[int, ...]
    wall_s: float
    launcher: str = LauncherKind.TORCHRUN
    detail: str = ""
    phases_s: dict[str, float] = field(default_factory=dict)


def launch_times_s(outcome: LaunchOutcome) -> dict[str, float]:
    """``wall`` and its parts."""
    return {"wall": outcome.wall_s, **outcome.phases_s}


MARKS_FILE = "marks"
MAX_MARKS_BYTES = 4096
# A rank is there; torch and the workload are imported; its setup() is over; its run(), or the script, is.
STARTED, IMPORTED, SET_UP, RAN = "started", "imported", "set_up", "ran"
# Between two marks of one rank. A script imports, sets up and runs as it likes: of it only start and leave are known.
WITHIN_RANK = {"import": (STARTED, IMPORTED), "init": (IMPORTED, SET_UP), "run": (SET_UP, RAN)}
PHASES = ("start", *WITHIN_RANK, "leave")


def leave_mark(folder: Path, name: str) -> None:
    """Note in a rank's folder that it has come this far; what is noted stays, however the rank ends."""
    with suppress(OSError), (folder / MARKS_FILE).open("a", encoding="ascii") as file:  # a full disk is told elsewhere
        file.write(f"{name} {time.time_ns()}\n")


def phases_s(rank_folders: Sequence[Path], began_s: float, ended_s: float) -> dict[str, float]:
    """How long each part took: start and leave to and from the last rank's mark, the others on the slowest rank.

    Without the parts that a rank did not get to the end of.
    """
    ranks = [_read_marks(folder) for folder in rank_folders]
    phases = {}
    if all(STARTED in marks for marks in ranks):
        phases["start"] = max(marks[STARTED] for marks in ranks) - began_s
    for name, (first, last) in WITHIN_RANK.items():
        if all(first in marks and last in marks for marks in ranks):
            phases[name] = max(marks[last] - marks[first] for marks in ranks)
    if all(RAN in marks for marks in ranks):
        phases["leave"] = ended_s - max(marks[RAN] for marks in ranks)
    # Clocks are set now and then.
    return {name: max(0.0, duration_s) for name, duration_s in phases.items()}


def _read_marks(folder: Path) -> dict[str, float]:
    """The marks of one rank in seconds; what is no mark, e.g. half a line, is left out."""
    marks = {}
    with suppress(OSError), (folder / MARKS_FILE).open("rb") as file:
        for line in file.read(MAX_MARKS_BYTES).decode("ascii", "replace").splitlines(keepends=True):
            name, _, time_ns = line.rstrip("\n").partition(" ")
            if line.endswith("\n") and time_ns.isdecimal() and len(time_ns) < 20:
                marks[name] = int(time_ns) / 1e9
    return marks
