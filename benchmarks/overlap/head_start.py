"""Overlap of profiled steps with and without a head start of the host, in the same launches.

Run: python -m pytest benchmarks/overlap/head_start.py -s --aorta-gpus=2
"""

from __future__ import annotations

import os
from statistics import median
from textwrap import dedent

import pytest

from benchmarks.overlap.profiled_steps import SIZES
from pytest_aorta import DistributedWorld
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.result.trace.profiled_steps import StepOverlap

LAUNCHES = int(os.environ.get("LAUNCHES", "4"))
SYNCHRONIZING = """
    import torch
    import torch.distributed as dist
    from pytest_aorta.worker import RankEnv, capture_overlap, recorder

    device = RankEnv.read().join("synchronizing")
    weight = torch.randn(4096, 4096, device=device)
    gradient = torch.randn(1 << 24, device=device)

    def step():
        dist.all_reduce(gradient, async_op=True)
        product = weight
        for _ in range(20):
            product = product @ weight
        return product.sum().item()

    recorder.start(device, warmup=5)
    for _ in range(25):
        with recorder.step():
            step()
    recorder.overlap(capture_overlap(step, 2, device))
"""


@pytest.mark.world(size="all", device="cuda", warm=True)
@pytest.mark.parametrize("name", list(SIZES))
def test_head_start(distributed_world: DistributedWorld, name: str) -> None:
    """Print the captured steps of each launch, rank by rank."""
    spreads: list[float] = []
    for _ in range(LAUNCHES):
        result = distributed_world.run(name, steps=40, warmup=10, profile_steps=4, **SIZES[name])
        assert result.passed, result.failure_details
        spreads += show(name, result)
    if spreads:
        print(f"{name}: overlap_ratio {min(spreads):.4f} to {max(spreads):.4f} over {LAUNCHES} launches")


def show(name: str, result: WorkloadResult) -> list[float]:
    """Print one launch and return the overlap ratio of every rank's head-started steps together."""
    timed_ms = result.facts.step_time_ms["p50"]
    print(f"\n{name}: timed p50 {timed_ms:.2f} ms")
    for rank, (lead, steps, as_run) in enumerate(
        zip(result.head_start, result.overlap, result.overlap_as_run, strict=True)
    ):
        print(f"  rank {rank} {lead}")
        print(f"    as run     {described(as_run, timed_ms)}")
        print(f"    head start {described(steps, timed_ms)}")
    return [value for value in map(ratio, result.overlap) if value is not None]


def ratio(steps: list[StepOverlap]) -> float | None:
    """Return hidden communication divided by all communication of the steps."""
    comm_ms = sum(step.comm_ms for step in steps)
    return sum(step.hidden_comm_ms for step in steps) / comm_ms if comm_ms else None


def described(steps: list[StepOverlap], timed_ms: float) -> str:
    """Return step times as ratios to the timed median, idle time and overlap of profiled steps."""
    ratios = [step.step_ms / timed_ms for step in steps]
    idle_ms = median(step.idle_ms for step in steps)
    each = " ".join(f"{step.overlap_ratio:.3f}" for step in steps if step.overlap_ratio is not None)
    return f"{min(ratios):.3f} to {max(ratios):.3f} of p50, idle {idle_ms:.2f} ms, overlap {each}"


@pytest.mark.world(size="all", device="cuda", warm=True)
def test_step_that_synchronizes_is_named(distributed_world: DistributedWorld, tmp_path) -> None:
    """Print the blocking call of a script that reads its loss on the host in each step."""
    script = tmp_path / "synchronizing.py"
    script.write_text(dedent(SYNCHRONIZING))
    result = distributed_world.run_script(str(script))
    print("\n", result.head_start, result.rank_metrics)
    assert all("Synchronize" in (lead.blocked_by or "") for lead in result.head_start)
