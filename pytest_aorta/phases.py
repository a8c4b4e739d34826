"""The parts of a launch, told apart by marks that its ranks leave: one line a mark, with its time in nanoseconds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

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
