"""The ranking workloads' model, samples and compile block, without ranks."""

from types import SimpleNamespace

import pytest
import torch
from aorta_workloads.common.compiling import CompileSettings
from aorta_workloads.common.fsdp2 import CustomCollective
from aorta_workloads.common.gradients import whole_norm
from aorta_workloads.common.rules import check_rules
from aorta_workloads.common.streams import InlineStream
from aorta_workloads.ddp_overlap.workload import DdpOverlapSettings
from aorta_workloads.ranking.data import InputFeed, make_batch, uniform
from aorta_workloads.ranking.model import RankingModel, initialize
from aorta_workloads.ranking.replicated import GradientSum
from aorta_workloads.ranking.settings import RankingSettings
from aorta_workloads.ranking.workload import RankingWorkload
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.rank.ranks import Requests, doubling, own_group
from tests.rank.settings import default_config, make_settings

CPU = torch.device("cpu")
SIZES = {"num_dense": 3, "num_tables": 4, "rows_per_table": 50, "bag_size": 2}
MODEL = {"dim": 16, "n_layers": 2, "n_heads": 4, "ffn_hidden": 32}
bounded = settings(max_examples=25, deadline=None, database=None)


def ranking_settings(**changes):
    return make_settings(RankingSettings, "ranking", **{"batch_size": 8, **SIZES, **MODEL, **changes})


def make_model(seed=0, **changes):
    model = RankingModel(ranking_settings(**changes).model)
    initialize(model, seed)
    return model


@bounded
@given(
    log_world_size=st.integers(0, 3), num_micro=st.integers(1, 3), seed=st.integers(0, 2**40), number=st.integers(0, 99)
)
def test_global_batch_is_the_same_however_many_ranks_share_it(log_world_size, num_micro, seed, number):
    world_size = 2**log_world_size
    whole = make_batch(ranking_settings(gradient_accumulation=num_micro, seed=seed), number, 0, 1)
    of_one = ranking_settings(batch_size=8 // world_size, gradient_accumulation=num_micro, seed=seed)
    shares = [make_batch(of_one, number, rank, world_size) for rank in range(world_size)]
    for tensor, parts in zip(whole, zip(*shares, strict=True), strict=True):
        assert torch.equal(tensor, torch.cat(parts, dim=1))


def test_seed_and_number_change_every_part_of_a_batch():
    first = make_batch(ranking_settings(), 0, 0, 1)
    for other in (make_batch(ranking_settings(seed=1), 0, 0, 1), make_batch(ranking_settings(), 1, 0, 1)):
        assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@bounded
@given(key=st.integers(0, 2**63 - 1))
def test_drawn_numbers_are_spread_over_the_unit_interval(key):
    drawn = uniform(key, torch.arange(4096))
    assert (drawn >= 0).all()
    assert (drawn < 1).all()
    counts = torch.histc(drawn, 16, 0, 1)
    # The expected count is 256, with a standard deviation of 15.5.
    assert (counts - 256).abs().max() < 6 * 15.5
    assert len(drawn.unique()) == 4096


def test_rows_are_of_their_own_table_and_low_ones_popular():
    rows = make_batch(ranking_settings(batch_size=512), 0, 0, 1).rows[0]
    table = torch.arange(SIZES["num_tables"])[:, None]
    assert torch.equal(rows // SIZES["rows_per_table"], table.expand_as(rows))
    within = rows % SIZES["rows_per_table"]
    assert (within < 5).float().mean() > 0.4


def test_model_learns_to_tell_clicks():
    model, batch = make_model(), make_batch(ranking_settings(batch_size=256), 0, 0, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        logits = model(batch.dense[0], batch.rows[0])
        assert logits.shape == (256, 1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.clicks[0])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_values_of_a_parameter_depend_on_its_name_and_the_seed_alone():
    small, deep, other = make_model(), make_model(n_layers=3), make_model(seed=1)
    name = "blocks.1.up.weight"
    values = [dict(model.named_parameters())[name] for model in (small, deep, other)]
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])


def test_every_parameter_is_trained():
    model, batch = make_model(), make_batch(ranking_settings(), 0, 0, 1)
    model(batch.dense[0], batch.rows[0]).sum().backward()
    assert [name for name, parameter in model.named_parameters() if not parameter.grad.abs().sum()] == []


class CountingStream(InlineStream):
    """An inline stream that counts its transfers."""

    def __init__(self):
        self.num_submitted = 0

    def submit(self, transfer):
        self.num_submitted += 1
        return super().submit(transfer)


@pytest.mark.parametrize("ahead", [0, 1])
def test_feed_hands_out_the_hosts_batches_in_turn(ahead):
    batches = [make_batch(ranking_settings(), number, 0, 1) for number in range(3)]
    stream, copied = CountingStream(), []
    feed = InputFeed(batches, CPU, stream, ahead)
    for step in range(7):
        taken = next(feed)
        expected = batches[step % 3]
        assert all(torch.equal(a, b) for a, b in zip(taken, expected, strict=True))
        copied.append(stream.num_submitted)
    # The first step also makes the copies that later steps make ahead.
    assert copied == [1 + ahead + step for step in range(7)]


@pytest.mark.parametrize(("changes", "num_copies"), [({}, 2), ({"h2d_prefetch": False}, 1), ({"one_stream": True}, 1)])
def test_first_step_copies_the_next_inputs_too_unless_the_config_says_otherwise(monkeypatch, changes, num_copies):
    workload, stream = RankingWorkload(default_config("ranking", **SIZES | MODEL | changes)), CountingStream()
    monkeypatch.setattr("aorta_workloads.ranking.training.InlineStream", lambda: stream)
    workload.device, workload.env = CPU, SimpleNamespace(rank=0, world_size=2)
    next(workload.make_batches(0))
    assert stream.num_submitted == num_copies


def test_gradients_of_a_replicated_module_are_summed_once_a_step_as_one_message(tmp_path):
    module, stream = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), CountingStream()
    gradients = GradientSum(module, stream)
    with own_group(tmp_path), Requests(doubling):
        for is_last in (False, True):
            gradients.enabled = is_last
            module(torch.ones(1, 3)).sum().backward()
        alone = [parameter.grad.clone() for parameter in module.parameters()]
        assert stream.num_submitted == 1
        gradients.finish()
    for parameter, local in zip(module.parameters(), alone, strict=True):
        assert torch.equal(parameter.grad, 2 * local)


@pytest.fixture
def make_workload(set_up):
    """Return a function that returns the workload of rank 0 after setup()."""
    return lambda world_size=1, **changes: set_up(
        RankingWorkload, world_size, **SIZES | MODEL | {"batch_size": 8} | changes
    )


def test_only_the_last_micro_batch_reduces_sharded_and_replicated_gradients(make_workload):
    workload, reduced = make_workload(world_size=2, gradient_accumulation=3), []
    workload.model.blocks[0].register_forward_hook(lambda *_: reduced.append("forward"))
    collective = CustomCollective(lambda *_, **__: reduced.append("block"))
    workload.model.blocks[0].set_custom_reduce_scatter(collective)
    with Requests(lambda name, *_: reduced.append("tower or head") if name == "allreduce_" else None):
        workload.train_step(next(workload.batches))
    assert reduced == ["forward"] * 3 + ["tower or head", "block", "tower or head"]


def test_each_step_trains_with_the_rate_of_the_schedule(make_workload):
    workload, rates = make_workload(lr=0.5, lr_schedule={"warmup": 4}), []
    for _ in range(2):
        workload.train_step(next(workload.batches))
        rates += {group["lr"] for group in workload.optimizer.param_groups}
    assert rates == [0.125, 0.25]


def test_gradients_that_backward_did_not_make_are_an_error():
    gradients = GradientSum(nn.Linear(2, 2), CountingStream())
    with pytest.raises(RuntimeError, match="backward has not made all of them"):
        gradients.finish()


@pytest.mark.parametrize(
    ("workload", "changes", "message", "right"),
    [
        ("ranking", {"dim": 16, "n_heads": 3}, "dim is 16 and n_heads is 3: ", {"n_heads": 4}),
        ("ranking", {"hash_operators_step": 21}, "hash_operators_step is 21 and steps is 20: ", {"steps": 21}),
        ("ranking", {"loss_scale": 1000}, "loss_scale is 1000: only powers of 2", {"loss_scale": 2**16}),
        ("ranking", {"param_dtype": "float16"}, "param_dtype is 'float16' and loss_scale is 1: .*", {"loss_scale": 2}),
        ("ddp_overlap", {"compute_dtype": "float16"}, "compute_dtype is .*: .*underflow", {"loss_scale": 2}),
    ],
)
def test_keys_that_contradict_each_other_are_an_error_that_says_what_to_do(workload, changes, message, right):
    settings_type = {"ranking": RankingSettings, "ddp_overlap": DdpOverlapSettings}[workload]

    def check(**keys):
        rules = make_settings(settings_type, workload, **keys).rules("cpu", 1)
        check_rules(rules, default_config(workload, **keys))

    with pytest.raises(ValueError, match=message):
        check(**changes)
    check(**changes | right)


def test_gradients_are_divided_by_the_scale_before_they_are_clipped(make_workload):
    changes = [{}, {"loss_scale": 64}, {"max_grad_norm": 0.01}, {"loss_scale": 64, "max_grad_norm": 0.01}]
    found = []
    for keys in changes:
        workload = make_workload(**keys)
        _, before = workload.train_step(next(workload.batches))
        found.append((before, whole_norm(workload.total_norm())))
        workload.cleanup()
    (_, plain), (_, scaled), (before, clipped), (scaled_before, scaled_clipped) = found
    assert plain > 0.1
    assert plain == scaled == whole_norm(before) == whole_norm(scaled_before)
    assert clipped == scaled_clipped == pytest.approx(0.01, rel=1e-4)


@pytest.mark.parametrize(
    ("block", "error", "message"),
    [
        (
            {"backend": "eager", "mode": "max-autotune"},
            ValueError,
            r"compile\.mode is 'max-autotune' .*inductor's alone",
        ),
        (
            {"backend": "eager", "options": {"epilogue_fusion": True}},
            ValueError,
            r"compile\.options is .*inductor's alone",
        ),
        ({"mode": "default", "options": {"epilogue_fusion": True}}, RuntimeError, "mode or options"),
        ({"options": {"epilog_fusion": True}}, RuntimeError, "epilog_fusion"),
    ],
)
def test_wrong_key_of_the_compile_block_is_named(block, error, message):
    with pytest.raises(error, match=message):
        CompileSettings(enabled=True, **block).apply([Doubles()])


class Breaks(nn.Module):
    def forward(self, x):
        torch._dynamo.graph_break()
        return x


def test_block_that_does_not_compile_whole_fails():
    module = Breaks()
    CompileSettings(enabled=True, backend="eager").apply([module])
    with pytest.raises(torch._dynamo.exc.Unsupported):
        module(torch.ones(2))


class Doubles(nn.Module):
    def forward(self, x):
        return 2 * x


def test_block_that_is_compiled_too_often_fails():
    module = Doubles()
    CompileSettings(enabled=True, backend="eager", dynamic=False).apply([module])

    def run_with_many_shapes():
        for size in range(1, 20):
            module(torch.ones(size, 2))

    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        run_with_many_shapes()


def test_compiled_blocks_keep_names_and_values():
    batch = make_batch(ranking_settings(), 0, 0, 1)
    eager, compiled = make_model(), make_model()
    CompileSettings(enabled=True, backend="eager").apply(compiled.blocks)
    assert [name for name, _ in eager.named_parameters()] == [name for name, _ in compiled.named_parameters()]
    with torch.no_grad():
        assert torch.equal(eager(batch.dense[0], batch.rows[0]), compiled(batch.dense[0], batch.rows[0]))
