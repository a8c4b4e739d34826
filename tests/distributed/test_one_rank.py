"""A world of one rank: a model without any collective."""

import pytest


@pytest.mark.world(size=1, device="cpu", warm=True)
@pytest.mark.extended
@pytest.mark.parametrize("bucketing", ["none", "transformer_block"])
def test_one_rank_trains_the_llama_with_the_same_bits_in_both_implementations(workload, bucketing):
    training = {"size": "debug", "n_layers": 1}
    traced = {"workload": "llama_simple_fsdp", "bucketing": bucketing}
    workload.compare(traced | training, {"workload": "llama_fsdp2"} | training, steps=3)
