"""Reads the telemetry of all ranks of a launch, as far as it shows how communication overlaps with compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from pytest_aorta.common.documents import UnreadableFile, parse_json, read_bytes
from pytest_aorta.common.errors import ResultError
from pytest_aorta.common.schema import violation
from pytest_aorta.result.folder import TELEMETRY_FILE, rank_folder
from pytest_aorta.result.trace.profiled_steps import Collective, CollectiveTime

MAX_TELEMETRY_BYTES = 64 << 20
_SCHEMA = "rank_files.schema.json"
_OVERLAP = "hidden_comm_ms"
_HIDDEN = "hidden_ms"


@dataclass(frozen=True)
class Iteration:
    """A measured step whose streams were timed on every rank.

    Attributes:
        step: Number of the step, from 0.
        step_time_ms: The largest over ranks.
        compute_ms, hidden_comm_ms, exposed_comm_ms: Means over ranks.
        loss: The loss of rank 0; None if unknown.
        collectives: Kind of :class:`Collective` -> means over ranks; None in telemetry of older versions.
    """

    step: int
    step_time_ms: float
    compute_ms: float
    hidden_comm_ms: float
    exposed_comm_ms: float
    loss: float | None = None
    collectives: Mapping[str, CollectiveTime] | None = None

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


def _timed_steps(path: Path) -> dict[int, dict[str, Any]]:
    """Return the lines of the steps that have overlap, by step."""
    found = {}
    try:
        text = read_bytes(path, max_bytes=MAX_TELEMETRY_BYTES).decode()
        for number, row in enumerate(text.removesuffix("\n").split("\n"), 1):
            line = parse_json(row, f"{path}: line {number}")
            if problem := violation(line, _SCHEMA, "telemetry"):
                raise ResultError(f"{path}: line {number}: {problem}")
            if problem := _excess(line):
                raise ResultError(f"{path}: line {number}: {problem}")
            if _OVERLAP in line:
                found[line["step"]] = line
    except UnreadableFile as error:
        raise ResultError(str(error)) from None
    except UnicodeDecodeError as error:
        raise ResultError(f"{path}: not UTF-8: {error.reason}") from None
    return found


def _excess(line: Mapping[str, Any]) -> str | None:
    """Return in which collective more time is hidden than its stream took; None if in none."""
    streams = line.get("stream_ms", {})
    for kind, hidden_ms in line.get(_HIDDEN, {}).items():
        if hidden_ms > (total_ms := streams.get(kind, 0.0)):
            return f"hidden_ms of {kind} is {hidden_ms}, more than its stream_ms {total_ms}"
    return None


def _collectives(lines: Sequence[Mapping[str, Any]]) -> dict[str, CollectiveTime] | None:
    """Return the means of each collective, which takes no time on ranks that do not run it."""
    if not all(_HIDDEN in line for line in lines):
        return None
    kinds = [str(kind) for kind in Collective if any(kind in line[_HIDDEN] for line in lines)]
    return {
        kind: CollectiveTime(
            total_ms=fmean(line["stream_ms"].get(kind, 0.0) for line in lines),
            hidden_ms=fmean(line[_HIDDEN].get(kind, 0.0) for line in lines),
        )
        for kind in kinds
    }


def _iteration(lines: list[Mapping[str, Any]]) -> Iteration:
    return Iteration(
        step=lines[0]["step"],
        step_time_ms=float(max(line["step_time_ms"] for line in lines)),
        compute_ms=fmean(line["stream_ms"]["compute"] for line in lines),
        hidden_comm_ms=fmean(line[_OVERLAP] for line in lines),
        exposed_comm_ms=fmean(line["exposed_comm_ms"] for line in lines),
        loss=lines[0].get("loss"),
        collectives=_collectives(lines),
    )
