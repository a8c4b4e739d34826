"""What the real launches have in common: sizes for the device at hand."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_aorta.launching import DistributedWorld

FSDP = {
    "cpu": {"steps": 20, "warmup": 3, "verify": 3},
    "cuda": {
        "steps": 150,
        "warmup": 20,
        "verify": 10,
        "layers": 16,
        "gemm_size": 4096,
        "fsdp_shard_size": 1 << 23,
        "h2d_tensor_size": 1 << 23,
        "dtype": "bfloat16",
    },
}
LLAMA = {
    "cpu": {"size": "debug", "steps": 10, "warmup": 2},
    "cuda": {
        "size": "1b",
        "steps": 100,
        "warmup": 10,
        "n_layers": 8,
        "seq_len": 4096,
        "param_dtype": "bfloat16",
        "reduce_dtype": "float32",
    },
}


@pytest.fixture
def fsdp_config(distributed_world: DistributedWorld) -> dict[str, Any]:
    """Config of `fsdp` that takes a second or two of steps on the world's device."""
    return dict(FSDP[distributed_world.device])


@pytest.fixture
def llama_config(distributed_world: DistributedWorld) -> dict[str, Any]:
    """Config of the Llama workloads, likewise."""
    return dict(LLAMA[distributed_world.device])
