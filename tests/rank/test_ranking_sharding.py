"""The times at which FSDP2 gathers the units of the ranking model, on one of two ranks; the other rank is simulated."""

import pytest
import torch
import torch.distributed as dist
from aorta_workloads.ranking import sharding
from aorta_workloads.ranking.data import make_batch
from aorta_workloads.ranking.model import RankingModel, initialize
from aorta_workloads.ranking.settings import RankingSettings

from tests.rank.ranks import fake_group
from tests.rank.settings import make_settings

CPU = torch.device("cpu")
SIZES = {"num_dense": 3, "num_tables": 2, "rows_per_table": 8, "bag_size": 2}
MODEL = {"dim": 8, "n_layers": 3, "n_heads": 2, "ffn_hidden": 16}
NO_PREFETCH = {"forward_prefetch": 0, "backward_prefetch": 0}


@pytest.fixture(scope="module", autouse=True)
def world_of_two():
    with fake_group(2):
        yield


class Late(dist.distributed_c10d.Work):
    """An all-gather that lasts until the end of the wait for it."""

    def wait(self, *_):
        return True


@pytest.fixture
def events(monkeypatch):
    """Return the log of events: "gather" or "wait", and the name of each unit whose forward ends."""
    found = []

    def gather(output, own, *, group, async_op):
        # FSDP2 waits at once for a gather that is not asynchronous.
        found.append("gather" if async_op else "wait")
        # Both ranks hold equal shards.
        output.view(2, -1).copy_(own.clone())
        return Late() if async_op else None

    monkeypatch.setattr(sharding, "all_gather", gather)
    return found


def ranking_settings(**changes):
    return make_settings(RankingSettings, "ranking", **{"batch_size": 4, **SIZES, **MODEL, **NO_PREFETCH, **changes})


def train(events, **changes):
    settings = ranking_settings(**changes)
    model = RankingModel(settings.model)
    initialize(model, 0)
    sharding.shard(model, settings, CPU)
    for name, unit in [("tables", model.tables), *((f"block {n}", block) for n, block in enumerate(model.blocks))]:
        unit.register_forward_hook(lambda *_, name=name: events.append(name))
    batch = make_batch(settings, 0, 0, 2)
    logits = model(batch.dense[0], batch.rows[0])
    events.append("backward")
    logits.sum().backward()
    return events


def forward_part(events):
    return ", ".join(events[: events.index("backward")])


def test_without_prefetch_each_unit_is_gathered_when_it_is_called(events):
    train(events)
    assert forward_part(events) == "gather, tables, gather, block 0, gather, block 1, gather, block 2"


def test_prefetch_gathers_so_many_units_ahead(events):
    train(events, forward_prefetch=2)
    assert forward_part(events) == "gather, gather, gather, tables, gather, block 0, block 1, block 2"


@pytest.mark.parametrize(("reshard", "count"), [(True, 8), (False, 4)])
def test_units_that_are_not_resharded_are_gathered_once_a_step(events, reshard, count):
    assert train(events, reshard_after_forward=reshard).count("gather") == count


def test_in_one_stream_cpu_ranks_run_fsdp2s_own_gathers_which_are_not_logged(events):
    assert not {"gather", "wait"} & set(train(events, one_stream=True))


@pytest.mark.parametrize(("gathered", "reduced"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_parameters_are_gathered_and_gradients_reduced_in_their_dtypes(monkeypatch, gathered, reduced):
    dtypes = {"gathered": set(), "reduced": set()}

    def gather(output, own, *, group, async_op):
        dtypes["gathered"].add(str(own.dtype))
        output.view(2, -1).copy_(own.clone())

    def scatter(output, gradients, *, op, group, async_op):
        dtypes["reduced"].add(str(gradients.dtype))
        output.copy_(gradients.view(2, -1)[0])

    monkeypatch.setattr(sharding, "all_gather", gather)
    monkeypatch.setattr(sharding, "reduce_scatter", scatter)

    train([], param_dtype=gathered, reduce_dtype=reduced)

    assert dtypes == {"gathered": {f"torch.{gathered}"}, "reduced": {f"torch.{reduced}"}}


def test_tower_and_head_are_replicated_and_all_else_is_sharded(events):
    settings = ranking_settings()
    model = RankingModel(settings.model)
    sharding.shard(model, settings, CPU)
    plain = {name.split(".")[0] for name, p in model.named_parameters() if not hasattr(p, "placements")}
    sharded = {name.split(".")[0] for name, p in model.named_parameters() if hasattr(p, "placements")}
    assert (plain, sharded) == ({"dense_tower", "head"}, {"tables", "blocks"})
