"""A made-up history: entries of made-up commits without torch."""

import hashlib
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_aorta.common.model import to_json
from pytest_aorta.result.provenance import UTC_FORMAT
from pytest_aorta.session.history import HistoryEntry
from pytest_aorta.session.record import ComparedLaunch, Comparison, Side
from tests.unit.builders import make_facts, replace, write

STATISTICS = ("p50", "p99", "mean", "tail5")
PLATFORM = "nvidia-h200-x8-nccl"
# 2026-01-05 03:00 UTC; a commit every three hours.
BEGAN_S = 1_767_582_000
COMMIT_S = 3 * 3600


def commit_of(number: int) -> str:
    return hashlib.sha1(str(number).encode(), usedforsecurity=False).hexdigest()


def moment_of(number: int) -> str:
    return time.strftime(UTC_FORMAT, time.gmtime(BEGAN_S + COMMIT_S * number))


def make_launch(
    values: Mapping[str, float | str] | None = None,
    *,
    side: Side = Side.CANDIDATE,
    number: int = 0,
    torch: str = "2.11.0",
    **changes: Any,
) -> ComparedLaunch:
    """Return a launch of commit ``number`` that measured ``values``, and 10 ms where no step time is given."""
    found = dict(values or {"step_time_p50": 10.0})
    weights = found.pop("weight_hash", None)
    known = {
        "measured_at": moment_of(number),
        "commit": commit_of(number),
        "branch": "main",
        "dirty": False,
        "num_steps": 200,
        "environment": {"torch": torch, "device": "cuda", "device_name": "NVIDIA H200"},
        "step_time_ms": {name: found.pop(f"step_time_{name}", 10.0) for name in STATISTICS},
        "weight_hashes": {"10": weights} if weights else {},
        "final_loss": found.pop("final_loss", None),
        "metrics": found,
    }
    return ComparedLaunch(side, make_facts(**known | changes))


def make_entry(number: int = 0, *values: float, **changes: object) -> HistoryEntry:
    """Return the comparison of commit ``number``, with one launch per value of ``step_time_p50``."""
    launches = tuple(make_launch({"step_time_p50": value}, number=number) for value in values or (10.0,))
    comparison = Comparison("tests/test_a.py::test_x::fsdp", platform=PLATFORM, workload="fsdp", launches=launches)
    of_comparison = {name: changes.pop(name) for name in comparison.__struct_fields__ if name in changes}
    defaults = HistoryEntry(
        run=f"{time.strftime('%Y%m%dT%H%M%S.000000Z', time.gmtime(BEGAN_S + COMMIT_S * number))}-{number:08x}",
        command="pytest -m overlap",
        test="tests/test_a.py::test_x",
        outcome="passed",
        revision=1,
        comparison=replace(comparison, **of_comparison),
    )
    return defaults.replace(**changes)


def entries_of(values: Sequence[float], **changes: object) -> list[HistoryEntry]:
    """Return entries of one commit per value, each with one launch."""
    return [make_entry(number, value, **changes) for number, value in enumerate(values)]


def write_history(folder: Path, entries: Sequence[HistoryEntry]) -> None:
    """Write one file per run."""
    folder.mkdir(parents=True, exist_ok=True)
    runs: dict[str, list[str]] = defaultdict(list)
    for entry in entries:
        runs[entry.run].append(f"{to_json(entry)}\n")
    for run, lines in runs.items():
        write(folder / f"{run}.jsonl", "".join(lines))
