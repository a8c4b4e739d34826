"""Worlds of one rank: too small for some workloads, and a model without any collective for others."""

import pytest

from pytest_aorta.common.errors import LaunchError


@pytest.mark.world(size=1, device="cpu", warm=True)
@pytest.mark.parametrize(
    "name", ["fsdp", *(pytest.param(n, marks=pytest.mark.extended) for n in ("ddp_overlap", "ranking"))]
)
def test_one_rank_is_a_runtime_error_that_says_what_to_do(workload, name):
    with pytest.raises(LaunchError) as caught:
        workload.run(name)
    text = str(caught.value)
    assert f"RuntimeError: workload '{name}' needs at least 2 ranks and was started with WORLD_SIZE=1" in text
    assert "@pytest.mark.world(size=2)" in text


@pytest.mark.world(size=1, device="cpu", warm=True)
@pytest.mark.extended
@pytest.mark.parametrize("bucketing", ["none", "transformer_block"])
def test_one_rank_trains_the_llama_with_the_same_bits_in_both_implementations(workload, bucketing):
    training = {"size": "debug", "n_layers": 1}
    traced = {"workload": "llama_simple_fsdp", "bucketing": bucketing}
    workload.compare(traced | training, {"workload": "llama_fsdp2"} | training, steps=3)
