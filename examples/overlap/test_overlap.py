"""The demonstration of ``./dev overlap``: FSDP's collectives beside compute, and in line with it."""

from __future__ import annotations

import os

import pytest

from pytest_aorta.plan.accelerators import visible_devices

# Two GPUs, or else two CPU ranks: a single GPU has none to communicate with. Compute can hide every collective.
HAS_GPUS = len(visible_devices()) > 1
SIZES = (
    {"steps": 20, "warmup": 5, "layers": 16, "gemm_size": 5120, "fsdp_shard_size": 1 << 24, "dtype": "bfloat16"}
    if HAS_GPUS
    else {"steps": 5, "warmup": 1, "layers": 2, "gemm_size": 512, "fsdp_shard_size": 1 << 17}
)
# With these, unchanged code passes beside other load. CPU ranks compare the step's graph of streams alone, exactly.
WIDE = {"overlap_ratio": "10 points", "exposed_comm_ms": "5% of step", "step_time_p50": "20%", "kernel_ms": "20%"}
# Compute waits for each collective as soon as it is submitted.
LOST = {"kind": "in_line", "layer": None} if "LOSE_OVERLAP" in os.environ else {}


@pytest.mark.world(size=2, device="cuda" if HAS_GPUS else "cpu", warm=True)
@pytest.mark.tolerance(h2d_bytes_per_step="exact", **(WIDE if HAS_GPUS else {}))
def test_fsdp_overlap(workload):
    """Compare the fraction of communication that compute hides."""
    workload.check(workload.run("fsdp", verify=0, profile_steps=4, fault=LOST, **SIZES))
