"""The gains of `fsdp` from its communication stream and from host-to-device prefetch, in alternating launches.

Run: python -m pytest benchmarks/overlap/fsdp_overlap.py -s
"""

from __future__ import annotations

from statistics import median

import pytest

from pytest_aorta import DistributedWorld

LAUNCHES = 3
SIZES = {
    "cpu": {"steps": 100, "warmup": 10, "verify": 2, "layers": 8, "gemm_size": 384, "fsdp_shard_size": 1 << 18},
    "cuda": {
        "steps": 200,
        "warmup": 20,
        "verify": 4,
        "layers": 16,
        "gemm_size": 4096,
        "fsdp_shard_size": 1 << 23,
        "h2d_tensor_size": 1 << 25,
        "dtype": "bfloat16",
    },
}
VARIANTS = {
    "both off": {"comm_stream": False, "h2d_prefetch": False},
    "comm_stream": {"comm_stream": True, "h2d_prefetch": False},
    "h2d_prefetch": {"comm_stream": False, "h2d_prefetch": True},
    "both on": {"comm_stream": True, "h2d_prefetch": True},
}


@pytest.mark.world(size="all")
def test_fsdp_overlap_gain(distributed_world: DistributedWorld) -> None:
    """Print the median step time of each variant and its ratio to both off, with the range over rounds."""
    sizes = SIZES[distributed_world.device]
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(LAUNCHES):
        for name, switches in VARIANTS.items():
            result = distributed_world.run("fsdp", **sizes, **switches)
            assert result.passed, result.failure_details
            times[name].append(result.facts.step_time_ms["p50"])
    print(f"\n{distributed_world.platform}, {LAUNCHES} rounds, {sizes}")
    for name, values in times.items():
        ratios = sorted(value / off for value, off in zip(values, times["both off"], strict=True))
        print(
            f"{name:13} p50 {median(values):8.3f} ms, ratio to both off {median(ratios):.3f} "
            f"({ratios[0]:.3f} to {ratios[-1]:.3f})"
        )
