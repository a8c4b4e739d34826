"""Compiler-based FSDP against eager FSDP2: every bit of every step."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.numerics, pytest.mark.world(size=2, device="cpu", warm=True)]

TRAINING = {"size": "debug"}
STEPS = 10
MANUAL = {"bucketing": "manual", "bucket_modules": ["tok_embeddings", "layers.[0-1]", "norm+output"]}
# With this key, eager FSDP2 reduces each micro-batch, like the traced model.
MICRO_BATCHES = {"gradient_accumulation": 2, "activation_checkpointing": "selective", "max_grad_norm": None}


@pytest.mark.parametrize(
    ("param_dtype", "bucketings"),
    [
        pytest.param("bfloat16", ["transformer_block", "auto"], id="bfloat16 on 2 ranks"),
        pytest.param(
            "float32",
            ["transformer_block"],
            id="float32 on 4 ranks",
            marks=[pytest.mark.world(size=4, device="cpu", warm=True), pytest.mark.extended],
        ),
    ],
)
def test_aot_eager_has_every_bit_of_fsdp2(workload, param_dtype, bucketings):
    training = TRAINING | {"param_dtype": param_dtype}
    eager = workload.run("llama_fsdp2", steps=STEPS, warmup=0, hash_every=1, **training)
    for bucketing in bucketings:
        traced = {"workload": "llama_simple_fsdp", "bucketing": bucketing}
        workload.compare(traced | training, eager, steps=STEPS, label=bucketing)


@pytest.mark.extended
def test_micro_batches_in_buckets_by_hand_have_every_bit_of_fsdp2(workload):
    eager = {"workload": "llama_fsdp2", "reduce_every_micro_batch": True}
    traced = {"workload": "llama_simple_fsdp", "overlap_reorder_modules": ["layers.1"]} | MANUAL
    workload.compare(traced | TRAINING | MICRO_BATCHES, eager | TRAINING | MICRO_BATCHES, steps=STEPS)
