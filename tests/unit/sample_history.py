"""A made-up history: entries of made-up commits with planted changes, from a seed and without torch."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pytest_aorta.result.provenance import UTC_FORMAT
from pytest_aorta.session.history import HistoryEntry, HistoryVerdict, MeasuredLaunch
from pytest_aorta.session.record import Side

PLATFORM = "nvidia-h200-x8-nccl"
# 2026-01-05 03:00 UTC; a commit every three hours.
BEGAN_S = 1_767_582_000
COMMIT_S = 3 * 3600


def commit_of(number: int) -> str:
    return hashlib.sha1(str(number).encode(), usedforsecurity=False).hexdigest()


def moment_of(number: int) -> str:
    return time.strftime(UTC_FORMAT, time.gmtime(BEGAN_S + COMMIT_S * number))


def make_launch(**changes: object) -> MeasuredLaunch:
    defaults = MeasuredLaunch(
        side=Side.CANDIDATE,
        measured_at=moment_of(0),
        block="0123456789ab",
        launcher="torchrun",
        commit=commit_of(0),
        branch="main",
        dirty=False,
        torch="2.11.0",
        accelerator="NVIDIA H200",
        profiler="",
        values={"step_time_p50": 10.0},
    )
    return replace(defaults, **changes)


def make_verdict(**changes: object) -> HistoryVerdict:
    defaults = HistoryVerdict("step_time_p50", "pass", "baseline", 10.0, 10.0, 0.0, -0.001, 0.001)
    return replace(defaults, **changes)


def make_entry(number: int = 0, *values: float, **changes: object) -> HistoryEntry:
    """Return the comparison of commit ``number``, with one launch per value of ``step_time_p50``."""
    launches = tuple(
        make_launch(commit=commit_of(number), measured_at=moment_of(number), values={"step_time_p50": value})
        for value in values or (10.0,)
    )
    defaults = HistoryEntry(
        run=f"{time.strftime('%Y%m%dT%H%M%S.000000Z', time.gmtime(BEGAN_S + COMMIT_S * number))}-{number:08x}",
        command="pytest -m overlap",
        test="tests/test_a.py::test_x",
        case="tests/test_a.py::test_x::fsdp",
        outcome="passed",
        platform=PLATFORM,
        workload="fsdp",
        revision=1,
        launches=launches,
    )
    return replace(defaults, **changes)


def entries_of(values: Sequence[float], **changes: object) -> list[HistoryEntry]:
    """Return entries of one commit per value, each with one launch."""
    return [make_entry(number, value, **changes) for number, value in enumerate(values)]


def write_history(folder: Path, entries: Sequence[HistoryEntry]) -> None:
    """Write one file per run."""
    folder.mkdir(parents=True, exist_ok=True)
    runs: dict[str, list[str]] = defaultdict(list)
    for entry in entries:
        runs[entry.run].append(json.dumps(entry.to_json()) + "\n")
    for run, lines in runs.items():
        (folder / f"{run}.jsonl").write_text("".join(lines), encoding="utf-8")


def make_history(*, cases: int = 10, commits: int = 200, launches: int = 5, seed: int = 0) -> list[HistoryEntry]:
    """Return the comparisons of ``cases`` cases at each commit.

    The steps of each case become 3% slower after 35% of the commits and 4% faster after 70%, where a new revision of
    the baseline begins. The weights change once.
    """
    rng = random.Random(seed)
    return [_entry(rng, case, number, number / commits, launches) for number in range(commits) for case in range(cases)]


def _entry(rng: random.Random, case: int, number: int, age: float, launches: int) -> HistoryEntry:
    base_ms = 9.0 + 2 * case
    center_ms = base_ms * (1.03 if age >= 0.35 else 1.0) * (0.96 if age >= 0.7 else 1.0)
    block_ms = center_ms * rng.gauss(1, 0.0015)
    label = f"tests/test_training.py::test_step[{case}]"
    measured = [block_ms * rng.gauss(1, 0.0013) for _ in range(launches)]
    baseline_ms = base_ms * (1.03 * 0.96 if age >= 0.7 else 1.0)
    verdict = make_verdict(value=measured[0], baseline=baseline_ms, change=measured[0] / baseline_ms - 1)
    return replace(
        make_entry(number),
        test=label,
        case=f"{label}::fsdp",
        revision=2 if age >= 0.7 else 1,
        verdicts=(verdict,),
        launches=tuple(_launch(rng, number, age, step_ms) for step_ms in measured),
    )


def _launch(rng: random.Random, number: int, age: float, step_ms: float) -> MeasuredLaunch:
    return make_launch(
        commit=commit_of(number),
        measured_at=moment_of(number),
        torch="2.11.0" if age < 0.5 else "2.12.0",
        values={
            "step_time_p50": step_ms,
            "step_time_p99": step_ms * rng.gauss(1.08, 0.008),
            "step_time_mean": step_ms * 1.012,
            "step_time_tail5": step_ms * rng.gauss(1.1, 0.01),
            "overlap_ratio": min(1.0, rng.gauss(0.91, 0.01)),
            "exposed_comm_ms": 0.09 * step_ms * rng.gauss(1, 0.05),
            "tokens_per_s": 8.2e6 / step_ms,
            "peak_memory_bytes": 48.2 * 2**30 * (0.985 if age >= 0.55 else 1.0),
            "num_parameters": 8_030_261_248.0,
            "weight_hash": ("0" if age < 0.5 else "1") * 32,
            "final_loss": rng.gauss(2.31, 0.001),
        },
    )
