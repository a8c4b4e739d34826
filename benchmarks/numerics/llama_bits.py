"""Every bit of deterministic steps of Llama 3 8B: `llama_simple_fsdp` (aot_eager) against `llama_fsdp2`, by layout.

Run: python -m pytest benchmarks/numerics/llama_bits.py -s --aorta-gpus=N
Two GPUs and more train all 32 blocks, one GPU trains 8 blocks, and CPU ranks train a tiny model. Layouts that the
number of ranks does not allow are skipped. Environment variable: BITS_STEPS, the number of steps, 25 by default.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from pytest_aorta import DistributedWorld, WorkloadRunner
from pytest_aorta.plan.device_kind import DeviceKind

STEPS = int(os.environ.get("BITS_STEPS", "25"))
LAYOUTS: dict[str, dict[str, Any]] = {
    "FSDP": {},
    "FSDP x TP 2": {"tensor_parallel_degree": 2},
    "FSDP x CP 2": {"context_parallel_degree": 2},
    "FSDP x PP 2": {"pipeline_parallel_degree": 2, "gradient_accumulation": 2},
}
METRICS = ("loss", "grad_norm", "weight_hash")


def _training(world: DistributedWorld, layout: str) -> dict[str, Any]:
    """Return the config of both sides, or skip if the world is too small for the layout."""
    degrees = LAYOUTS[layout]
    if world.size < 2 * len([key for key in degrees if key.endswith("_degree")]):
        pytest.skip(f"{layout}: needs 2 ranks")
    common = {"param_dtype": "bfloat16", "deterministic": True, "activation_checkpointing": "selective"} | degrees
    if world.device != DeviceKind.CUDA:
        return common | {"size": "debug"}
    return common | {"size": "8b", "seq_len": 8192, "n_layers": 8 if world.size == 1 else 32}


@pytest.mark.world(size="all", warm=True)
@pytest.mark.launch_timeout(400)
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_steps_are_equal(distributed_world: DistributedWorld, workload: WorkloadRunner, layout: str) -> None:
    """Compare loss, gradient norm and the hash of all weights of every step, and print the last of each."""
    training = _training(distributed_world, layout)
    eager = {"workload": "llama_fsdp2", "reduce_every_micro_batch": True} | training
    traced = {"workload": "llama_simple_fsdp", "backend": "aot_eager", "bucketing": "transformer_block"} | training
    verdicts = workload.compare(traced, eager, steps=STEPS, metrics=METRICS, label=layout, locate=False)
    print(f"\n{layout} on {distributed_world.platform}, {STEPS} steps")
    for row in verdicts.rows:
        print(f"  {row}")
