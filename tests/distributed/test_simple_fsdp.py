"""Compiler-based FSDP against eager FSDP2: every bit of every step."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.numerics, pytest.mark.world(size=2, device="cpu", warm=True)]

TRAINING = {"size": "debug", "steps": 25, "warmup": 0, "hash_every": 1}
BUCKETINGS = {
    "none": {},
    "transformer_block": {},
    "auto": {},
    "manual": {"bucket_modules": ["tok_embeddings", "layers.[0-1]", "norm+output"]},
}


@pytest.mark.parametrize(
    ("param_dtype", "bucketings"), [("float32", ["transformer_block"]), ("bfloat16", list(BUCKETINGS))]
)
def test_aot_eager_has_every_bit_of_fsdp2(workload, param_dtype, bucketings):
    eager = workload.run("llama_fsdp2", param_dtype=param_dtype, **TRAINING)
    assert len(eager.weight_hashes) == len(eager.grad_norm) == TRAINING["steps"]
    for bucketing in bucketings:
        config = TRAINING | BUCKETINGS[bucketing] | {"bucketing": bucketing, "param_dtype": param_dtype}
        traced = workload.run("llama_simple_fsdp", **config)
        assert traced.weight_hashes == eager.weight_hashes, bucketing
        assert (traced.loss, traced.grad_norm) == (eager.loss, eager.grad_norm), bucketing
