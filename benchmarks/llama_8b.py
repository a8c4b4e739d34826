"""Tokens a second and peak memory of Llama 3 8B, batch 1 x 8192, selective checkpointing, on all GPUs of the run.

Run: python -m pytest benchmarks/llama_8b.py -s --aorta-gpus=8
LLAMA_VARIANTS picks some of the variants, LLAMA_STEPS the measured steps.
"""

from __future__ import annotations

import os
from statistics import median
from typing import Any

import pytest

from pytest_aorta.errors import LaunchError
from pytest_aorta.fixtures import DistributedWorld

SIMPLE, FSDP2 = "llama_simple_fsdp", "llama_fsdp2"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "FSDP2 eager": (FSDP2, {}),
    "FSDP2 compile": (FSDP2, {"compile_blocks": True}),
    "SimpleFSDP block aot_eager": (SIMPLE, {"backend": "aot_eager", "bucketing": "transformer_block"}),
    "SimpleFSDP auto aot_eager": (SIMPLE, {"backend": "aot_eager", "bucketing": "auto"}),
    "SimpleFSDP block inductor": (SIMPLE, {"backend": "inductor", "bucketing": "transformer_block"}),
    "SimpleFSDP auto inductor": (SIMPLE, {"backend": "inductor", "bucketing": "auto"}),
}


@pytest.mark.world(size="all", device="cuda", warm=True)
@pytest.mark.timeout(400)
def test_llama_8b(distributed_world: DistributedWorld) -> None:
    """Print a row a variant; one that can't run says why."""
    names = os.environ.get("LLAMA_VARIANTS", ",".join(VARIANTS)).split(",")
    steps = int(os.environ.get("LLAMA_STEPS", "12"))
    print(f"\n{distributed_world.platform}")
    for name in names:
        workload, switches = VARIANTS[name]
        size = {"size": "8b", "activation_checkpointing": "selective", "warmup": 5, "steps": steps}
        try:
            result = distributed_world.launch(workload, **size, **switches)
        except LaunchError as error:
            print(f"| {name} | {str(error)[:1500]}", flush=True)
            continue
        step_ms = median(result.step_times_max_ms)
        memory = max(result.metrics["peak_memory_bytes"]) / 2**30
        print(
            f"| {name} | {8192 / step_ms * 1e3:,.0f} tokens/s a GPU | {step_ms:.0f} ms | {memory:.1f} GiB | "
            f"loss {result.loss[0]:.4f} to {result.loss[-1]:.4f} | wall {result.launch_times_s['wall']:.0f} s",
            flush=True,
        )
