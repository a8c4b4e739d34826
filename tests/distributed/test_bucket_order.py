"""The order of parameters in a bucket is seen where a reduce-scatter's order of summation depends on the offset."""

from __future__ import annotations

import json

import pytest

# Of two addends the order does not matter.
pytestmark = [pytest.mark.numerics, pytest.mark.world(size=3, device="cpu", warm=True)]

# Every dimension is a multiple of the ranks, and a norm's shard 64 bytes, so that order shifts what follows it.
TRAINING = {
    "steps": 3,
    "warmup": 0,
    "hash_every": 1,
    "dim": 96,
    "n_layers": 1,
    "n_heads": 3,
    "n_kv_heads": 3,
    "vocab_size": 258,
    "param_dtype": "bfloat16",
    "reduce_dtype": "bfloat16",
}


def test_only_buckets_in_registration_order_have_the_bits_of_fsdp2(workload):
    def train(name, **more):
        arguments = [name, json.dumps(TRAINING | more)]
        return workload.run_script("tests/distributed/scripts/rotated_sum.py", arguments).weight_hashes

    eager = train("llama_fsdp2")
    assert train("llama_simple_fsdp", bucket_order="registration") == eager
    assert train("llama_simple_fsdp", bucket_order="graph")["1"] != eager["1"]
    # The order is all there is to it: gloo's own sum has one order for all offsets.
    plain = workload.run("llama_fsdp2", **TRAINING).weight_hashes
    assert plain["1"] != eager["1"]
    assert workload.run("llama_simple_fsdp", bucket_order="graph", **TRAINING).weight_hashes == plain
