"""Ranks in words: their numbers, positions, steps, exit status and the end of their output."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pytest_aorta.common.frames import is_library
from pytest_aorta.result.evidence import Frame, RankEvidence
from pytest_aorta.result.folder import OUTPUT_LOG, RANKS_FOLDER

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


def is_waiting(frames: Sequence[Frame]) -> bool:
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
