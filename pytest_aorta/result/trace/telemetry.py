"""Reads the telemetry of all ranks of a launch, as far as it shows how communication overlaps with compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from pytest_aorta.common.documents import UnreadableFile, parse_json, read_bytes
from pytest_aorta.common.errors import ResultError
from pytest_aorta.common.schema import violation
from pytest_aorta.result.folder import TELEMETRY_FILE, rank_folder

MAX_TELEMETRY_BYTES = 64 << 20
_SCHEMA = "rank_files.schema.json"
_OVERLAP = "hidden_comm_ms"


@dataclass(frozen=True)
class Iteration:
    """A measured step whose streams were timed on every rank.

    Attributes:
        step: Number of the step, from 0.
        step_time_ms: The largest over ranks.
        compute_ms, hidden_comm_ms, exposed_comm_ms: Means over ranks.
        loss: The loss of rank 0; None if unknown.
    """

    step: int
    step_time_ms: float
    compute_ms: float
    hidden_comm_ms: float
    exposed_comm_ms: float
    loss: float | None = None

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
            if _OVERLAP in line:
                found[line["step"]] = line
    except UnreadableFile as error:
        raise ResultError(str(error)) from None
    except UnicodeDecodeError as error:
        raise ResultError(f"{path}: not UTF-8: {error.reason}") from None
    return found


def _iteration(lines: list[Mapping[str, Any]]) -> Iteration:
    return Iteration(
        step=lines[0]["step"],
        step_time_ms=float(max(line["step_time_ms"] for line in lines)),
        compute_ms=fmean(line["stream_ms"]["compute"] for line in lines),
        hidden_comm_ms=fmean(line[_OVERLAP] for line in lines),
        exposed_comm_ms=fmean(line["exposed_comm_ms"] for line in lines),
        loss=lines[0].get("loss"),
    )
