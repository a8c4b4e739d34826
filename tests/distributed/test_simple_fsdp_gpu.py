"""Compiler-based FSDP against eager FSDP2 under NCCL: every bit of every step, on all GPUs of the run."""

from __future__ import annotations

import pytest

pytestmark = [
    pytest.mark.numerics,
    pytest.mark.world(size="all", device="cuda", warm=True),
    pytest.mark.timeout(240),
]

TRAINING = {
    "size": "debug",
    "dim": 512,
    "n_layers": 3,
    "n_heads": 8,
    "n_kv_heads": 2,
    "ffn_hidden": 1536,
    "seq_len": 256,
    "param_dtype": "bfloat16",
    "steps": 25,
    "warmup": 0,
    "hash_every": 1,
    "deterministic": True,
}


@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
def test_aot_eager_has_every_bit_of_fsdp2(workload, reduce_dtype):
    training = TRAINING | {"reduce_dtype": reduce_dtype}
    eager = workload.run("llama_fsdp2", **training)
    assert len(eager.weight_hashes) == TRAINING["steps"]
    for bucketing in ("transformer_block", "auto"):
        traced = workload.run("llama_simple_fsdp", bucketing=bucketing, **training)
        assert traced.weight_hashes == eager.weight_hashes, bucketing
        assert traced.loss == eager.loss, bucketing
