"""Reads the telemetry of all ranks of a launch, as far as it shows how communication overlaps with compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from msgspec import field

from pytest_aorta.common.documents import UnreadableFile, read_bytes
from pytest_aorta.common.errors import ResultError
from pytest_aorta.common.model import Count, Finite, Milliseconds, Model, decode
from pytest_aorta.result.folder import TELEMETRY_FILE, rank_folder
from pytest_aorta.result.trace.profiled_steps import Collective, CollectiveTime

MAX_TELEMETRY_BYTES = 64 << 20


class _Line(Model, frozen=True, forbid_unknown_fields=False):
    """A measured step of one rank; other keys are series of the workload. Steps that were not captured lack lengths."""

    step: Count
    step_time_ms: Milliseconds
    hidden_comm_ms: Milliseconds | None = None
    exposed_comm_ms: Milliseconds = 0.0
    stream_ms: dict[str, Milliseconds] = field(default_factory=dict)
    hidden_ms: dict[str, Milliseconds] = field(default_factory=dict)
    loss: Finite | None = None


@dataclass(frozen=True)
class Iteration:
    """A measured step whose streams were timed on every rank.

    Attributes:
        step: Number of the step, from 0.
        step_time_ms: The largest over ranks.
        compute_ms, hidden_comm_ms, exposed_comm_ms: Means over ranks.
        loss: The loss of rank 0; None if unknown.
        collectives: Kind of :class:`Collective` -> means over ranks.
    """

    step: int
    step_time_ms: float
    compute_ms: float
    hidden_comm_ms: float
    exposed_comm_ms: float
    loss: float | None = None
    collectives: Mapping[str, CollectiveTime] = dataclasses.field(default_factory=dict)

    @property
    def overlap_ratio(self) -> float | None:
        """Return the fraction of communication that compute hides; None without communication."""
        comm_ms = self.hidden_comm_ms + self.exposed_comm_ms
        return self.hidden_comm_ms / comm_ms if comm_ms else None


def read_iterations(run_dir: Path, num_ranks: int) -> tuple[Iteration, ...]:
    """Return the steps that have overlap in the telemetry of every rank; empty if a rank has no telemetry.

    Raises:
        ResultError: A file is unreadable, or a line has another shape.
    """
    paths = [rank_folder(run_dir, rank) / TELEMETRY_FILE for rank in range(num_ranks)]
    if not all(path.exists() for path in paths):
        return ()
    ranks = [_timed_steps(path) for path in paths]
    common = sorted(set.intersection(*(set(rank) for rank in ranks)))
    return tuple(_iteration([rank[step] for rank in ranks]) for step in common)


def _timed_steps(path: Path) -> dict[int, _Line]:
    """Return the lines of the steps that have overlap, by step."""
    try:
        rows = read_bytes(path, max_bytes=MAX_TELEMETRY_BYTES).removesuffix(b"\n").split(b"\n")
        lines = [decode(row, _Line, f"{path}: line {number}", by_hand=False) for number, row in enumerate(rows, 1)]
    except UnreadableFile as error:
        raise ResultError(str(error)) from None
    return {line.step: line for line in lines if line.hidden_comm_ms is not None}


def _collectives(lines: Sequence[_Line]) -> dict[str, CollectiveTime]:
    """Return the means of each collective, which takes no time on ranks that do not run it."""
    kinds = [str(kind) for kind in Collective if any(kind in line.hidden_ms for line in lines)]
    return {
        kind: CollectiveTime(
            total_ms=fmean(line.stream_ms.get(kind, 0.0) for line in lines),
            hidden_ms=fmean(line.hidden_ms.get(kind, 0.0) for line in lines),
        )
        for kind in kinds
    }


def _iteration(lines: Sequence[_Line]) -> Iteration:
    return Iteration(
        step=lines[0].step,
        step_time_ms=max(line.step_time_ms for line in lines),
        compute_ms=fmean(line.stream_ms.get("compute", 0.0) for line in lines),
        hidden_comm_ms=fmean(line.hidden_comm_ms or 0.0 for line in lines),
        exposed_comm_ms=fmean(line.exposed_comm_ms for line in lines),
        loss=lines[0].loss,
        collectives=_collectives(lines),
    )
