"""Pipeline parallelism in one process: the layers of each stage, and keys that contradict stages."""

from __future__ import annotations

import pytest
import torch
from aorta_workloads.llama.data import initialize
from aorta_workloads.llama.model.decoder import Llama, LlamaConfig
from aorta_workloads.llama.parallel.pipeline import check_pipeline, keep_stage, stage_layers
from aorta_workloads.llama_fsdp2.settings import LlamaFsdp2Settings
from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.worker import WeightHash, hash_parameters
from tests.rank.settings import make_settings

TOKENS = torch.arange(16).reshape(2, 8)
MODEL = LlamaConfig(16, 4, 2, 1, 32, 32, 500000.0, 1e-5)
ROTATIONS = MODEL.rotations(torch.arange(8))


@given(num_stages=st.integers(1, 9), more=st.integers(0, 40))
def test_stages_share_all_blocks_in_order_and_evenly(num_stages, more):
    n_layers = num_stages + more
    shares = [stage_layers(n_layers, num_stages, stage) for stage in range(num_stages)]
    sizes = [len(share) for share in shares]

    assert [layer for share in shares for layer in share] == list(range(n_layers))
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes)


def make_model(stage=None, num_stages=3):
    with torch.device("meta"):
        model = Llama(MODEL)
    if stage is not None:
        keep_stage(model, num_stages, stage)
    model.to_empty(device="cpu")
    initialize(model, 4, seed=0)
    return model


def test_stages_one_after_another_are_the_whole_model():
    whole, stages = make_model(), [make_model(stage) for stage in range(3)]

    passed = TOKENS
    for stage in stages:
        passed = stage(passed, ROTATIONS)

    assert torch.equal(passed, whole(TOKENS, ROTATIONS))
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert names == [name for name, _ in whole.named_parameters()]


def test_hashes_of_stages_make_that_of_the_whole_model():
    whole = hash_parameters(make_model().named_parameters())
    stages = [hash_parameters(make_model(stage).named_parameters()).per_tensor for stage in range(3)]

    assert WeightHash.of(stages[2] | stages[0] | stages[1]) == whole
    assert WeightHash.of(stages[2] | stages[0]) != whole


def settings(**changes):
    kept = {"n_layers": 4, "gradient_accumulation": 4, "hash_tensors": ["weights", "gradients", "optimizer"]}
    return make_settings(LlamaFsdp2Settings, "llama_fsdp2", **kept | changes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n_layers": 3}, "pipeline_parallel_degree is 4 and n_layers is 3"),
        ({"gradient_accumulation": 3}, "pipeline_parallel_degree is 4 and gradient_accumulation is 3"),
        ({"hash_tensors": ["weights", "forward"]}, r"hash_tensors has \['forward'\]"),
        ({"fault": {"kind": "drop_gradient"}}, "fault is 'drop_gradient'"),
    ],
)
def test_a_key_that_contradicts_stages_is_an_error_that_names_it(given, message):
    check_pipeline(4, settings())
    check_pipeline(1, settings(**given))
    with pytest.raises(ValueError, match=message):
        check_pipeline(4, settings(**given))
