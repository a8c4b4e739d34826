"""Pipeline parallelism in one process: the layers of each stage."""

import pytest
import torch
from aorta_workloads.distributed.pipeline import count_stages, keep_stage, split_stages, stage_layers, stages_of_rank
from aorta_workloads.models import build_model
from aorta_workloads.models.common.data import initialize
from aorta_workloads.models.config import ModelConfig
from hypothesis import given
from hypothesis import strategies as st

from pytest_aorta.worker import WeightHash, hash_parameters

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
