"""The order of parameters in a bucket, with a reduce-scatter whose order of summation depends on the offset."""

import json

import pytest

from pytest_aorta import ComparisonFailed

# The order of two addends does not matter, so the world has more ranks.
pytestmark = [pytest.mark.numerics, pytest.mark.world(size=3, device="cpu", warm=True), pytest.mark.extended]

# Every dimension is a multiple of the world size, and a norm's shard has 64 bytes, so a changed order shifts the
# parameters that follow.
STEPS = 3
TRAINING = {
    "steps": STEPS,
    "warmup": 0,
    "hash_every": 1,
    "dim": 96,
    "n_layers": 1,
    "n_heads": 3,
    "n_kv_heads": 3,
    "vocab_size": 258,
    "param_dtype": "bfloat16",
    "reduce_dtype": "bfloat16",
    "hash_tensors": ["gradients", "weights"],
    "max_grad_norm": None,
}


def train(workload, name, **more):
    arguments = [name, json.dumps(TRAINING | more)]
    return workload.run_script("tests/distributed/scripts/rotated_sum.py", arguments)


def test_buckets_in_registration_order_have_the_bits_of_fsdp2(workload):
    traced = train(workload, "llama_simple_fsdp", bucket_order="registration")
    workload.compare(traced, train(workload, "llama_fsdp2"), steps=STEPS)


def test_buckets_in_the_order_of_the_graph_have_other_bits_than_fsdp2(workload):
    traced, eager = train(workload, "llama_simple_fsdp", bucket_order="graph"), train(workload, "llama_fsdp2")
    with pytest.raises(ComparisonFailed) as regression:
        workload.compare(traced, eager, steps=STEPS)
    assert set(regression.value.metrics) == {"loss", "grad_norm", "weight_hash"}
    assert "first difference: step 1, " in str(regression.value)
    # Some parameters keep their offset in both orders.
    assert "step 1, gradients: 6 of 12 gradients differ, first layers.0.attention_norm.weight [96]" in str(
        regression.value
    )
    assert "step 1, weights: 6 of 12 parameters differ, first layers.0.attention_norm.weight [96]" in str(
        regression.value
    )
