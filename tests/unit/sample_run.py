"""A run of pytest that never was: result files, baselines and records as tests leave them, seeded. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pytest_aorta.common.files import write_json
from pytest_aorta.result.facts import LaunchFacts, launch_facts
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.result.trace.intervals import union
from pytest_aorta.result.trace.overlap import OverlapCapture, overlap_of
from pytest_aorta.session.record import Compared, TestRecord
from pytest_aorta.session.rounds import settle
from pytest_aorta.session.text import comparison_text
from pytest_aorta.verdict.baseline import Baseline, StoredLaunch, baseline_path, write_baseline
from pytest_aorta.verdict.comparison import StoredComparison
from pytest_aorta.verdict.metrics import METRICS, measured_values
from pytest_aorta.verdict.statistics.decision import Outcome
from tests.unit.builders import default_priors, make_provenance, make_result, stamp

PLATFORM = "nvidia-h200-x8-nccl"
HANG = """\
llama_fsdp2 on 8 cuda ranks: hang in collective: time limit of 300 s reached; ranks 0, 1, 2, 4, 5, 6, 7 wait for rank 3
  rank 3, step 117: <module> (train/data.py:88) < next_batch (train/data.py:41)
  rank 0, step 118: in all_gather number 4021, _all_gather_base (torch/distributed/distributed_c10d.py:4125)
plan, logs and stacks: /tmp/aorta/test-llama-hangs/01-llama-fsdp2"""
ENVIRONMENT = {
    "python": "3.12.11", "torch": "2.11.0+cu130", "device": "cuda", "device_name": "NVIDIA H200", "cuda": "13.0",
    "nccl": "2.28.9", "deterministic_algorithms": False, "bitwise_reproducible": True, "num_threads": 16,
    "cpu_capability": "AVX512", "weight_hash_version": 2, "tf32_matmul": False, "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """A test of the sample run: ``slower`` is the change of its steps, ``late_rank`` the straggler."""

    name: str
    workload: str = "fsdp"
    step_ms: float = 17.6
    slower: float = 0.0
    hides: float = 0.9
    late_rank: int | None = None
    environment: tuple[tuple[str, Any], ...] = ()
    has_baseline: bool = True
    hangs: bool = False


SPECIAL = (
    Plan("test_fsdp_overlap.py::test_fsdp_overlap[comm_stream]", slower=0.083, hides=0.35),
    Plan("test_llama.py::test_simple_fsdp[transformer_block]", "llama_simple_fsdp", 231.0, slower=0.031, late_rank=5),
    Plan("test_llama.py::test_hangs", "llama_fsdp2", hangs=True),
    Plan("test_ranking.py::test_four_streams", "ranking", 9.4, slower=-0.12),
    Plan("test_ddp.py::test_bucket_cap[25]", "ddp_overlap", 12.1, has_baseline=False),
    Plan("test_llama.py::test_fsdp2[8b]", "llama_fsdp2", 224.0, environment=(("nccl", "2.27.3"), ("torch", "2.11.1"))),
)


def make_run(folder: Path, *, tests: int = 30, ranks: int = 8, steps: int = 300, seed: int = 0) -> list[TestRecord]:
    """Write the files of so many tests below ``folder`` and return their records; the first six are special."""
    rng = np.random.default_rng(seed)
    usual = [Plan(f"test_matrix.py::test_config[{number}]", step_ms=8.0 + number) for number in range(tests)]
    return [_record(plan, folder, rng, ranks, steps) for plan in [*SPECIAL, *usual][:tests]]


def _record(plan: Plan, folder: Path, rng: np.random.Generator, ranks: int, steps: int) -> TestRecord:
    nodeid = f"tests/{plan.name}"
    record = TestRecord(nodeid, outcome="passed", num_launches=1)
    if plan.hangs:
        record.outcome, record.failure = "failed", HANG
        return record
    case = f"{nodeid}::{plan.workload}"
    path = baseline_path(folder / "baselines", PLATFORM, case)
    compared = Compared(case, baseline=str(path))
    record.compared.append(compared)
    before = replace(plan, slower=0.0, hides=0.9, late_rank=None, environment=())
    baseline = None
    if plan.has_baseline:
        stored = [launch_facts(one_launch(before, rng, ranks, steps)) for _ in range(10)]
        dated = (replace(facts, recorded_at=stamp(86400)) for facts in stored)
        baseline = Baseline(
            case, nodeid, PLATFORM, plan.workload, {"steps": steps}, tuple(StoredLaunch(facts) for facts in dated)
        )
        write_baseline(folder / "baselines", baseline)
    results: list[WorkloadResult] = []

    def launch() -> LaunchFacts:
        results.append(one_launch(plan, rng, ranks, steps))
        place = folder / nodeid.replace("/", "-").replace("::", "-") / f"{len(results):02d}-{plan.workload}"
        place.mkdir(parents=True)
        write_json(place / "result.json", results[-1].to_json())
        compared.candidate.append(str(place))
        return launch_facts(results[-1])

    launches = [launch()]
    marked = {"step_time_p50": METRICS["step_time_p50"].parse_tolerance("2%")}
    comparison = StoredComparison(case, {"steps": steps}, baseline, marked, default_priors, 5)
    told = settle(comparison, launches, launch)
    record.verdicts, record.notes = list(told.rows), list(told.notes)
    record.num_launches, compared.measured = len(launches), measured_values(launches)
    if failing := told.failing({Outcome.MISSING}):
        record.outcome = "failed"
        shown = baseline_path(Path("baselines"), PLATFORM, case)
        record.failure = comparison_text(failing, results[0], launches, shown, told.notes)
    return record


def one_launch(plan: Plan, rng: np.random.Generator, ranks: int, steps: int) -> WorkloadResult:
    """Steps around ``step_ms`` with now and then a slow one, and a profiled step of 16 layers."""
    own = plan.step_ms * (1 + plan.slower + rng.normal(0, 0.002))
    common = own * (1 + np.abs(rng.normal(0, 0.006, steps)) + (rng.random(steps) < 0.02) * rng.random(steps) * 0.12)
    times = np.round(common * (1 + rng.normal(0, 0.001, (ranks, steps))), 4)
    waits = np.round(np.full((ranks, steps), 0.12 * own) * (1 + rng.normal(0, 0.02, (ranks, steps))), 4)
    if plan.late_rank is not None:
        waits[plan.late_rank % ranks] *= 0.3
    profiled = [_profiled(own, plan.hides, rng) for _ in range(ranks)]
    return make_result(
        rank_step_times_ms=times.tolist(),
        workload=plan.workload,
        device="cuda",
        backend="nccl",
        platform=PLATFORM,
        config={"steps": steps},
        wait_ms=waits.tolist(),
        environment=ENVIRONMENT | dict(plan.environment),
        rank_metrics={
            "peak_memory_bytes": [48.2 * 2**30] * ranks,
            "tokens_per_s": [8.2e6 / own] * ranks,
            "num_parameters": [8_030_261_248.0] * ranks,
            **{name: [capture.metrics()[name] for capture in profiled] for name in profiled[0].metrics()},
        },
        overlap=[capture.steps for capture in profiled],
        timeline=[capture.timeline for capture in profiled],
        provenance=make_provenance(measured_at=stamp(0)),
    )


def _profiled(step_ms: float, hides: float, rng: np.random.Generator, layers: int = 16) -> OverlapCapture:
    """All-gathers run ahead of compute; with little hidden, compute waits for each of them."""
    gemm = step_ms / layers / 3.4
    lanes: dict[str, list[tuple[float, float]]] = {
        name: [] for name in ("compute", "all_gather", "reduce_scatter", "copy")
    }
    now, free = 0.3 * gemm, 0.0
    for phase in ("forward", "backward"):
        for _ in range(layers):
            begin = max(free, now - hides * 0.6 * gemm)
            free = begin + gemm * 0.6 * (1 + abs(rng.normal(0, 0.05)))
            lanes["all_gather"].append((begin, free))
            begin = max(now, free)
            now = begin + gemm * (1 if phase == "forward" else 1.9) * (1 + rng.normal(0, 0.01))
            lanes["compute"].append((begin, now))
            if phase == "backward":
                begin = max(free, now - hides * gemm * 0.5)
                free = begin + gemm * 0.5
                lanes["reduce_scatter"].append((begin, free))
    lanes["copy"].append((0.1 * gemm, 0.8 * gemm))
    sets = {name: union([(round(a * 1e6), round(b * 1e6)) for a, b in lane]) for name, lane in lanes.items()}
    return overlap_of(sets, [(0, round(max(now, free) * 1e6))])
