"""Pipeline parallelism in one process: the layers of each stage, and keys that contradict stages."""

from __future__ import annotations

import pytest
import torch
from aorta_workloads.distributed.pipeline import (
    check_pipeline,
    count_stages,
    keep_stage,
    split_stages,
    stage_layers,
    stages_of_rank,
)
from aorta_workloads.llama_fsdp2.settings import LlamaFsdp2Settings
from aorta_workloads.models import build_model
from aorta_workloads.models.common.data import initialize
from aorta_workloads.models.config import ModelConfig
from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.worker import WeightHash, hash_parameters
from tests.rank.settings import make_settings

TOKENS = torch.arange(16).reshape(2, 8)
MODEL = ModelConfig(16, 4, 2, 1, 32, 32, 500000.0, 1e-5)
ROTATIONS = MODEL.freqs_cis(torch.arange(8))


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
        model = build_model(MODEL)
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


TWO_STAGES = {"n_layers": 8, "reshard_after_forward": False}
INTERLEAVED = {"pipeline_parallel_schedule": "Interleaved1F1B"}
ZERO_BUBBLE = {"pipeline_parallel_schedule": "ZBVZeroBubble"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (INTERLEAVED | {"n_layers": 7}, "n_layers is 7: Interleaved1F1B has 8 stages"),
        (INTERLEAVED | {"gradient_accumulation": 9}, "gradient_accumulation is 9: Interleaved1F1B .* multiples of 2"),
        (ZERO_BUBBLE | {"activation_checkpointing": "selective"}, "activation_checkpointing is 'selective': a saved"),
        (ZERO_BUBBLE | {"reshard_after_forward": True}, "these are true: reshard_after_forward;"),
        (ZERO_BUBBLE | {"reduce_every_micro_batch": True}, "these are true: reduce_every_micro_batch;"),
        (ZERO_BUBBLE | {"compile_blocks": True}, "these are true: compile_blocks;"),
    ],
)
def test_a_key_that_contradicts_a_schedule_is_an_error_that_names_it(given, message):
    for allowed in (INTERLEAVED, ZERO_BUBBLE):
        check_all(settings(**TWO_STAGES | allowed))
    refused = settings(**TWO_STAGES | given)
    with pytest.raises(ValueError, match=message):
        check_all(refused)


def check_all(settings):
    check_pipeline(4, settings)
    settings.check_own()


def test_a_schedule_without_stages_is_refused():
    with pytest.raises(ValueError, match="'ZBVZeroBubble' and pipeline_parallel_degree is 1"):
        check_pipeline(1, settings(**ZERO_BUBBLE))


@pytest.mark.parametrize(
    ("schedule", "held"),
    [("1F1B", [(0,), (1,)]), ("Interleaved1F1B", [(0, 2), (1, 3)]), ("ZBVZeroBubble", [(0, 3), (1, 2)])],
)
def test_each_rank_runs_the_models_of_its_own_stages(schedule, held):
    assert [stages_of_rank(schedule, 2, rank) for rank in range(2)] == held
    num_stages = count_stages(schedule, 2)
    models = {}
    for stages in held:
        with torch.device("meta"):
            rank_model = build_model(MODEL)
        keep_stage(rank_model, num_stages, *stages)
        models |= dict(zip(stages, split_stages(rank_model, num_stages, stages), strict=True))
        rank_model.to_empty(device="cpu")
        initialize(rank_model, 4, seed=0)

    passed = TOKENS
    for stage in range(num_stages):
        passed = models[stage](passed, ROTATIONS)

    assert torch.equal(passed, make_model()(TOKENS, ROTATIONS))
