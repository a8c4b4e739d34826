"""Pipeline parallelism on CPU ranks: the model, the tokens and the numbers of the same world without it."""

from __future__ import annotations

import pytest

from pytest_aorta.errors import LaunchError

pytestmark = [pytest.mark.numerics, pytest.mark.timeout(180)]

TRAINING = {"size": "debug", "n_layers": 3, "n_kv_heads": 4, "steps": 5, "warmup": 0, "hash_every": 1}
# Of each the global batch is four sequences.
FSDP = {"batch_size": 1}
PP = {"pipeline_parallel_degree": 2, "gradient_accumulation": 2}
LAYOUTS = {
    "pp 2, fsdp 2": PP | {"batch_size": 1},
    "pp 2, tp 2": PP | {"batch_size": 2, "tensor_parallel_degree": 2},
    "pp 2, cp 2": PP | {"batch_size": 2, "context_parallel_degree": 2},
}
# AdamW then changes no bit of a weight.
UNCHANGED = {"lr": 1e-30, "steps": 1}


@pytest.mark.world(size=4, device="cpu", warm=True)
def test_x(workload):
    reference = workload.run("llama_fsdp2", **TRAINING | FSDP)
    for layout, axes in LAYOUTS.items():
        result = workload.run("llama_fsdp2", **TRAINING | axes)
        print(layout, result.loss, reference.loss, result.grad_norm, reference.grad_norm)
        same = workload.run("llama_fsdp2", **TRAINING | axes | UNCHANGED)
        print(same.weight_hashes)
    print(workload.run("llama_fsdp2", **TRAINING | FSDP | UNCHANGED).weight_hashes)
