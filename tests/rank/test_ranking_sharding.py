"""The times at which FSDP2 gathers the units of the ranking model, on one of two ranks; the other rank is simulated."""

import pytest
import torch
from aorta_workloads.ranking import sharding
from aorta_workloads.ranking.data import make_batch
from aorta_workloads.ranking.model import RankingModel, initialize
from aorta_workloads.ranking.settings import RankingSettings

from tests.rank.ranks import Requests, fake_group
from tests.rank.settings import make_settings
from tests.unit.builders import each_of

CPU = torch.device("cpu")
SIZES = {"num_dense": 3, "num_tables": 2, "rows_per_table": 8, "bag_size": 2}
MODEL = {"dim": 8, "n_layers": 3, "n_heads": 2, "ffn_hidden": 16}
NO_PREFETCH = {"forward_prefetch": 0, "backward_prefetch": 0}


@pytest.fixture(scope="module", autouse=True)
def world_of_two():
    with fake_group(2):
        yield


def ranking_settings(**changes):
    return make_settings(RankingSettings, "ranking", **{"batch_size": 4, **SIZES, **MODEL, **NO_PREFETCH, **changes})


def train(**changes):
    """Return the events of a step: "gather" or, if FSDP2 waits at once, "wait", and each unit whose forward ends."""
    events = []

    def note(name, _args, is_async):
        if name == "_allgather_base_":
            events.append("gather" if is_async else "wait")

    settings = ranking_settings(**changes)
    model = RankingModel(settings.model)
    initialize(model, 0)
    sharding.shard(model, settings, CPU)
    for name, unit in [("tables", model.tables), *((f"block {n}", block) for n, block in enumerate(model.blocks))]:
        unit.register_forward_hook(lambda *_, name=name: events.append(name))
    batch = make_batch(settings, 0, 0, 2)
    with Requests(note):
        logits = model(batch.dense[0], batch.rows[0])
        events.append("backward")
        logits.sum().backward()
    return events


@each_of(
    "changes, forward",
    {
        "when it is called": ({}, "gather, tables, gather, block 0, gather, block 1, gather, block 2"),
        "two units ahead": (
            {"forward_prefetch": 2},
            "gather, gather, gather, tables, gather, block 0, block 1, block 2",
        ),
        # CPU ranks run FSDP2's own gathers.
        "in line": ({"one_stream": True}, "wait, tables, wait, block 0, wait, block 1, wait, block 2"),
    },
)
def test_each_unit_is_gathered_when_the_settings_say(changes, forward):
    events = train(**changes)
    assert events[: events.index("backward")] == forward.split(", ")


@pytest.mark.parametrize(("reshard", "count"), [(True, 8), (False, 4)])
def test_units_that_are_not_resharded_are_gathered_once_a_step(reshard, count):
    assert train(reshard_after_forward=reshard).count("gather") == count


@pytest.mark.parametrize(("gathered", "reduced"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_parameters_are_gathered_and_gradients_reduced_in_their_dtypes(gathered, reduced):
    dtypes = {}
    with Requests(lambda name, args, _is_async: dtypes.setdefault(name, set()).add(args[1].dtype)):
        train(param_dtype=gathered, reduce_dtype=reduced)
    assert dtypes == {
        "_allgather_base_": {getattr(torch, gathered)},
        "_reduce_scatter_base_": {getattr(torch, reduced)},
    }


def test_tower_and_head_are_replicated_and_all_else_is_sharded():
    settings = ranking_settings()
    model = RankingModel(settings.model)
    sharding.shard(model, settings, CPU)
    plain = {name.split(".")[0] for name, p in model.named_parameters() if not hasattr(p, "placements")}
    sharded = {name.split(".")[0] for name, p in model.named_parameters() if hasattr(p, "placements")}
    assert (plain, sharded) == ({"dense_tower", "head"}, {"tables", "blocks"})
