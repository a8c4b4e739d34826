"""A comparison of profiled with timed steps of the same launches, with and without the host's operators recorded.

Run: python -m pytest benchmarks/overlap/profiled_steps.py -s --aorta-profiler=torch --aorta-results=results
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import pytest

from pytest_aorta import DistributedWorld
from pytest_aorta.result.trace.profiled_steps import Profile
from tests.unit.kineto_traces import overlap_with_host, read_trace

LAUNCHES = 3
PROFILED = {"warmup": 10, "profile_steps": 8}
MODEL = {"batch_size": 256, "num_tables": 26, "bag_size": 10, "dim": 2048, "n_heads": 16, "ffn_hidden": 8192}
SIZES = {
    "fsdp": {"layers": 16, "gemm_size": 4096, "fsdp_shard_size": 1 << 23, "dtype": "bfloat16"},
    "llama_fsdp2": {"size": "1b", "n_layers": 8, "seq_len": 4096, "param_dtype": "bfloat16"},
    "ranking": MODEL | {"n_layers": 12, "param_dtype": "bfloat16", "reduce_dtype": "bfloat16"},
    "ddp_overlap": MODEL | {"n_layers": 6, "compute_dtype": "bfloat16"},
}


@pytest.mark.world(size="all", device="cuda", warm=True)
@pytest.mark.launch_timeout(300)
@pytest.mark.parametrize("name", list(SIZES))
def test_profiled_steps(distributed_world: DistributedWorld, name: str) -> None:
    """Print the times of timed and of both kinds of profiled steps of each launch, and their overlap."""
    for _ in range(LAUNCHES):
        result = distributed_world.run(name, steps=40, **PROFILED | SIZES[name])
        assert result.passed, result.failure_details
        launch = distributed_world.launcher.find(result)
        assert launch is not None
        folder = launch.plan.run_dir
        timed_ms = result.facts.step_time_ms["p50"]
        kept = [read_trace(folder / "ranks" / str(rank) / "trace.json.gz") for rank in range(result.world_size)]
        with_host = [overlap_with_host(trace) for trace in kept]
        print(f"\n{name}: timed p50 {timed_ms:.2f} ms")
        print(f"  device alone {described([Profile(steps, {}) for steps in result.overlap], timed_ms)}")
        print(f"  with host    {described(with_host, timed_ms)}")


def described(ranks: Sequence[Profile], timed_ms: float) -> str:
    """Return step times as ratios to those of timed steps, and each rank's overlap."""
    ratios = sorted(step.step_ms / timed_ms for capture in ranks for step in capture.steps)
    overlap = " ".join(f"{capture.metrics()['overlap_ratio']:.3f}" for capture in ranks)
    return f"{median(ratios):.3f} of it ({ratios[0]:.3f} to {ratios[-1]:.3f}), overlap_ratio by rank {overlap}"
