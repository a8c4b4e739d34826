"""Compiler-based FSDP against eager FSDP2: every bit of every step."""

import pytest

from pytest_aorta.verdict.statistics.decision import Outcome
from tests.distributed.test_costs import judged

pytestmark = [pytest.mark.numerics, pytest.mark.world(size=2, device="cpu", warm=True)]

TRAINING = {"size": "debug"}
STEPS = 5
MANUAL = {"bucketing": "manual", "bucket_modules": ["tok_embeddings", "layers.[0-1]", "norm+output"]}
# With this key, eager FSDP2 reduces each micro-batch, like the traced model.
MICRO_BATCHES = {"gradient_accumulation": 2, "activation_checkpointing": "selective", "max_grad_norm": None}


@pytest.mark.parametrize(
    ("given", "bucketings"),
    [
        pytest.param(
            {"param_dtype": "bfloat16", "n_layers": 1}, ["none", "transformer_block"], id="bfloat16 on 2 ranks"
        ),
        pytest.param(
            {"param_dtype": "float32"},
            ["none", "transformer_block", "auto"],
            id="float32 on 4 ranks",
            marks=[pytest.mark.world(size=4, device="cpu", warm=True), pytest.mark.extended],
        ),
    ],
)
def test_aot_eager_has_every_bit_of_fsdp2(workload, given, bucketings):
    training = TRAINING | given
    training |= {"steps": STEPS, "warmup": 0, "hash_every": 1}
    eager = workload.run("llama_fsdp2", **training)
    traced = {name: workload.run("llama_simple_fsdp", bucketing=name, **training) for name in bucketings}
    for bucketing, result in traced.items():
        workload.compare(result, eager, steps=STEPS, label=bucketing)
    # One launch shows that bucketing was lost.
    row = judged(traced["none"], traced["transformer_block"], "collectives")
    assert row.outcome is Outcome.REGRESSION
    assert row.detail.startswith("all_gather over ")


@pytest.mark.extended
def test_micro_batches_in_buckets_by_hand_have_every_bit_of_fsdp2(workload):
    eager = {"workload": "llama_fsdp2", "reduce_every_micro_batch": True}
    traced = {"workload": "llama_simple_fsdp", "overlap_reorder_modules": ["layers.1"]} | MANUAL
    workload.compare(traced | TRAINING | MICRO_BATCHES, eager | TRAINING | MICRO_BATCHES, steps=STEPS)
