"""A made-up history: entries of made-up commits with planted changes, from a seed and without torch."""

import hashlib
import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_aorta.common.model import to_json
from pytest_aorta.result.provenance import UTC_FORMAT
from pytest_aorta.session.history import HistoryEntry
from pytest_aorta.session.record import ComparedLaunch, Comparison, Side
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Verdict
from tests.unit.builders import make_facts, replace
from tests.unit.builders import make_verdict as verdict

STATISTICS = ("p50", "p99", "mean", "tail5", "max")
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


def make_verdict(**changes: Any) -> Verdict:
    known = {"value": 10.0, "baseline": 10.0, "delta": 0.0, "low": -0.001, "high": 0.001}
    return verdict(Outcome.PASS, **known | changes)


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
    verdict = make_verdict(value=measured[0], baseline=baseline_ms, delta=measured[0] / baseline_ms - 1)
    return make_entry(
        number,
        test=label,
        case=f"{label}::fsdp",
        revision=2 if age >= 0.7 else 1,
        rows=(verdict,),
        launches=tuple(_launch(rng, number, age, step_ms) for step_ms in measured),
    )


def _launch(rng: random.Random, number: int, age: float, step_ms: float) -> ComparedLaunch:
    values = {
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
    }
    return make_launch(values, number=number, torch="2.11.0" if age < 0.5 else "2.12.0")
