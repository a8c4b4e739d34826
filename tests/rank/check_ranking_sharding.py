"""When FSDP2 gathers the units of the ranking model: one of two ranks, the other one only thought of."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from aorta_workloads.ranking import sharding
from aorta_workloads.ranking.data import make_batch
from aorta_workloads.ranking.model import RankingConfig, RankingModel, initialize
from torch.testing._internal.distributed.fake_pg import FakeStore

CPU = torch.device("cpu")
CONFIG = {
    "batch_size": 4,
    "gradient_accumulation": 1,
    "seed": 0,
    "num_dense": 3,
    "num_tables": 2,
    "rows_per_table": 8,
    "bag_size": 2,
    "dim": 8,
    "n_layers": 3,
    "n_heads": 2,
    "ffn_hidden": 16,
    "param_dtype": "float32",
    "reduce_dtype": "float32",
    "reshard_after_forward": True,
    "forward_prefetch": 0,
    "backward_prefetch": 0,
    "one_stream": False,
}


@pytest.fixture(scope="module", autouse=True)
def world_of_two():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


class Done(dist.distributed_c10d.Work):
    def wait(self, *_):
        return True


@pytest.fixture
def events(monkeypatch):
    """What happens, in order: "gather", and the name of each unit whose forward begins."""
    found = []

    def gather(output, own, _group, *, async_op):
        found.append("gather")
        # Both ranks hold what this one holds.
        output.view(2, -1).copy_(own.clone())
        return Done() if async_op else None

    monkeypatch.setattr(sharding, "all_gather", gather)
    return found


def train(events, **changes):
    config = CONFIG | changes
    model = RankingModel(RankingConfig.from_config(config))
    initialize(model, 0)
    sharding.shard(model, config, CPU)
    for name, unit in [("tables", model.tables), *((f"block {n}", block) for n, block in enumerate(model.blocks))]:
        unit.register_forward_hook(lambda *_, name=name: events.append(name))
    batch = make_batch(config, 0, 0, 2)
    logits = model(batch.dense[0], batch.rows[0])
    events.append("backward")
    logits.sum().backward()
    return events


def forward_part(events):
    return events[: events.index("backward")]


def test_without_prefetch_each_unit_is_gathered_when_it_is_called(events):
    train(events)
    assert forward_part(events) == [
        "gather", "tables", "gather", "block 0", "gather", "block 1", "gather", "block 2",
    ]  # fmt: skip


def test_prefetch_gathers_so_many_units_ahead(events):
    train(events, forward_prefetch=2)
    assert forward_part(events) == [
        "gather", "gather", "gather", "tables", "gather", "block 0", "block 1", "block 2",
    ]  # fmt: skip


@pytest.mark.parametrize(("reshard", "count"), [(True, 8), (False, 4)])
def test_units_that_are_not_resharded_are_gathered_once_a_step(events, reshard, count):
    assert train(events, reshard_after_forward=reshard).count("gather") == count


def test_in_one_stream_cpu_ranks_use_fsdp2s_own_collectives(events):
    assert "gather" not in train(events, one_stream=True)


def test_tower_and_head_are_replicated_and_all_else_is_sharded(events):
    model = RankingModel(RankingConfig.from_config(CONFIG))
    sharding.shard(model, CONFIG, CPU)
    plain = {name.split(".")[0] for name, p in model.named_parameters() if not hasattr(p, "placements")}
    sharded = {name.split(".")[0] for name, p in model.named_parameters() if hasattr(p, "placements")}
    assert (plain, sharded) == ({"dense_tower", "head"}, {"tables", "blocks"})
