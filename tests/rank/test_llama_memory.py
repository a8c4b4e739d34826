"""The estimate of a step's memory and the choice of activation checkpointing, in one process.

The process group does nothing, so one process can run a rank's part of any layout.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack

import pytest
import torch
from aorta_workloads.config import MemorySettings
from aorta_workloads.distributed.activation_checkpoint import LADDER, choices, first_that_fits, same_on_all
from aorta_workloads.distributed.memory.budget import DeviceMemory, Options, decide, own_budget
from aorta_workloads.distributed.memory.estimate import Gathering, estimate
from aorta_workloads.distributed.memory.live import LiveBytes
from aorta_workloads.distributed.memory.step import Activations, Communication, StepMemory, Unit
from aorta_workloads.distributed.parallel_dims import ParallelDims, ParallelMesh
from aorta_workloads.llama_fsdp2.settings import LlamaFsdp2Settings
from aorta_workloads.llama_fsdp2.workload import LlamaFsdp2Workload
from aorta_workloads.models.common.decoder import Block
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed._tools.mem_tracker import MemTracker

from pytest_aorta.worker import RankEnv
from tests.rank.ranks import fake_group
from tests.rank.settings import default_config, make_settings

OPEN = Options(tuple(choices(4)), (0,), 4)
CPU, GIB = torch.device("cpu"), 1 << 30
SMALL = {
    "dim": 128,
    "n_layers": 4,
    "n_kv_heads": 4,
    "ffn_hidden": 384,
    "seq_len": 256,
    "steps": 1,
    "warmup": 1,
    "profile_steps": 0,
}


@pytest.fixture
def world():
    """Return a function that makes a process group that does nothing."""

    def join(size, rank=0):
        groups.close()
        groups.enter_context(fake_group(size, rank))

    with ExitStack() as groups:
        yield join


def test_results_count_until_they_are_freed_and_views_do_not():
    given = torch.ones(1024)
    with LiveBytes() as live:
        doubled = given * 2
        row, _ = doubled.view(2, 512).unbind(), doubled.add_(1)
        assert live.current == 4096
        squared = doubled * doubled
        assert live.current == live.peak == 8192
        del doubled, row, squared, _
    assert (live.current, live.peak) == (0, 8192)


def test_fused_results_count_if_a_product_reads_them_or_they_are_kept():
    given = torch.ones(32, 32)
    with LiveBytes(fused=True) as live:
        read, kept, lost = given + 1, given + 2, given + 3
        assert live.current == 0
        product = read @ given
        assert live.current == 2 * 4096
        live.keep([kept])
        assert live.current == 3 * 4096
        del read, kept, lost, product
    assert (live.current, live.peak) == (0, 3 * 4096)


def test_a_kind_is_on_all_blocks_before_the_next_is_on_any():
    names = list(map(str, choices(2)))
    assert names == [
        "none on all 2 blocks",
        "elementwise on 1 of 2 blocks, none on 1",
        "elementwise on all 2 blocks",
        "selective on 1 of 2 blocks, elementwise on 1",
        "selective on all 2 blocks",
        "full on 1 of 2 blocks, selective on 1",
        "full on all 2 blocks",
    ]


@given(st.integers(1, 40))
def test_each_choice_recomputes_more_on_one_block_than_the_choice_before(num_blocks):
    kinds = [[LADDER.index(choice.kind(block)) for block in range(num_blocks)] for choice in choices(num_blocks)]
    assert (sum(kinds[0]), kinds[-1]) == (0, [3] * num_blocks)
    for before, after in itertools.pairwise(kinds):
        assert sum(after) == sum(before) + 1
        assert after == sorted(after, reverse=True)


@given(st.lists(st.integers(0, 100)), st.integers(0, 100))
def test_the_first_that_fits_is_chosen(estimates, budget):
    position = first_that_fits(estimates, budget)
    before = estimates if position is None else estimates[:position]
    assert all(estimate > budget for estimate in before)
    assert position is None or estimates[position] <= budget


def make_step(**changes):
    facts = {
        "embedding": Unit(10, 20, 40),
        "block": Unit(5, 10, 20),
        "head": Unit(10, 20, 40),
        "blocks": range(4),
        "inputs": 1,
        "by_kind": {kind: Activations(kept, 10) for kind, kept in zip(LADDER, (1000, 500, 300, 1), strict=True)},
        "loss": Activations(50, 50),
        "communication": Communication(20, 20, 0, dict.fromkeys(LADDER, 0)),
        "num_in_flight": 1,
        "keeps_gradients": False,
        "batches": 3,
        "workspace": 0,
        "optimizer": 0,
    }
    return StepMemory(**facts | changes)


def test_the_peak_is_that_of_the_loss_while_activations_outweigh_gradients():
    # Shards and two moments, batches, inputs; activations; gathered blocks, the gathered head twice; the loss.
    assert make_step().peak(["none"] * 4) == (3 * 40 + 3 + 1) + 4000 + (20 + 40) + 100


def test_the_peak_is_that_of_the_optimizer_if_it_takes_more():
    assert make_step(optimizer=9999).peak(["full"] * 4) == 3 * 40 + 3 + 40 + 9999


def test_gradients_of_earlier_micro_batches_and_whole_gradients_are_there_all_the_time():
    plain = make_step().peak(["none"] * 4)
    assert make_step(keeps_gradients=True).peak(["none"] * 4) == plain + 40
    communication = Communication(20, 20, 7777, dict.fromkeys(LADDER, 0))
    assert make_step(communication=communication).peak(["none"] * 4) == plain + 7777


def test_each_micro_batch_in_flight_keeps_its_activations():
    assert make_step(num_in_flight=3).peak(["none"] * 4) == make_step().peak(["none"] * 4) + 2 * 4001


def test_gathered_parameters_that_blocks_keep_count_under_their_kinds_alone():
    communication = Communication(20, 20, 0, dict.fromkeys(LADDER, 0) | {"none": 10})
    kept = make_step(communication=communication)
    assert kept.peak(["none"] * 4) == make_step().peak(["none"] * 4) + 40
    assert kept.peak(["full"] * 4) == make_step().peak(["full"] * 4)


def test_last_blocks_that_stay_unsharded_keep_their_parameters_under_every_kind():
    kept = dict.fromkeys(LADDER, 0) | {"none": 10}
    communication = Communication(20, 20, 0, kept, gathered=7, no_reshard_blocks=2)
    assert communication.kept(["full", "none", "none", "full"]) == [0, 10, 7, 7]


def test_a_budget_in_bytes_replaces_the_fraction_and_nothing_exceeds_what_is_free():
    gpu = DeviceMemory(total=1000, available=900)
    assert own_budget(MemorySettings(0.8, None), gpu) == 800
    assert own_budget(MemorySettings(0.8, None), DeviceMemory(1000, 700)) == 700
    assert own_budget(MemorySettings(0.8, 500), gpu) == 500
    assert own_budget(MemorySettings(0.8, 950), gpu) == 900
    assert own_budget(MemorySettings(0.8, 950), None) == 950


def test_cpu_ranks_need_a_budget_in_bytes():
    with pytest.raises(ValueError, match="memory_budget_bytes is null: CPU ranks have no device"):
        own_budget(MemorySettings(0.8, None), None)


def test_less_memory_gives_more_recomputation_and_too_little_is_refused(world):
    world(1)
    step = make_step()
    most, least = step.peak(["none"] * 4), step.peak(["full"] * 4)
    chosen = [decide(step, OPEN, budget, CPU) for budget in (most, most - 1, least)]
    assert [str(decision.choice) for decision in chosen] == [
        "none on all 4 blocks",
        "elementwise on 1 of 4 blocks, none on 3",
        "full on all 4 blocks",
    ]
    assert [decision.estimate for decision in chosen] == [most, most - 500, least]
    assert "auto chose none on all 4 blocks; estimated" in str(chosen[0])
    with pytest.raises(ValueError, match=r"even full recomputation of all 4 blocks needs an estimated .+ on one rank"):
        decide(step, OPEN, least - 1, CPU)


def check_all(settings):
    settings.check()
    settings.check_own()


def test_a_budget_without_auto_is_refused():
    settings = make_settings(LlamaFsdp2Settings, "llama_fsdp2", memory_budget_bytes=1)
    with pytest.raises(ValueError, match="activation_checkpointing is 'none' and no_reshard_blocks is 0"):
        settings.check()


def test_memory_that_activations_leave_keeps_blocks_unsharded(world):
    world(1)
    step = make_step(communication=Communication(20, 20, 0, dict.fromkeys(LADDER, 0), gathered=100))
    whole = step.peak(["none"] * 4)
    options = Options(tuple(choices(4)), (0, 2, 4), 4)
    chosen = [decide(step, options, budget, CPU) for budget in (whole + 400, whole + 399, whole, whole - 1)]
    assert [decision.unsharded for decision in chosen] == [4, 2, 0, 4]
    assert [str(decision.choice) for decision in chosen[:3]] == ["none on all 4 blocks"] * 3
    # One block that recomputes frees more than all four blocks keep.
    assert chosen[3].facts == {
        "activation_checkpointing": "elementwise on 1 of 4 blocks, none on 3",
        "no_reshard_blocks": "4 of 4",
    }
    assert "no_reshard_blocks: null chose 2 of 4; estimated" in str(chosen[1])


def test_no_block_stays_unsharded_where_nothing_fits_and_the_config_gives_the_checkpointing(world):
    world(1)
    step = make_step(communication=Communication(20, 20, 0, dict.fromkeys(LADDER, 0), gathered=100))
    decision = decide(step, Options((same_on_all("full", 4),), (0, 2, 4), 4), 1, CPU)
    assert (decision.unsharded, decision.facts) == (0, {"no_reshard_blocks": "0 of 4"})
    assert decision.estimate == step.peak(["full"] * 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline_parallel_degree": 2}, "no_reshard_blocks is null and pipeline_parallel_degree is 2"),
        ({"reshard_after_forward": False}, "no_reshard_blocks is null and reshard_after_forward is false"),
    ],
)
def test_unsharded_blocks_by_memory_are_refused_where_they_can_not_be_chosen(changes, message):
    settings = make_settings(LlamaFsdp2Settings, "llama_fsdp2", no_reshard_blocks=None, **changes)
    with pytest.raises(ValueError, match=message):
        check_all(settings)


def make_workload(monkeypatch, world, size, **changes):
    """Return the workload of rank 0 after setup()."""
    monkeypatch.setattr(RankEnv, "join", lambda *_, **__: world(size) or CPU)
    for name, value in {"RANK": 0, "WORLD_SIZE": size, "LOCAL_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    workload = LlamaFsdp2Workload(default_config("llama_fsdp2", **SMALL | changes))
    workload.setup()
    return workload


def estimated(workload, kind):
    gathering = workload.gathering(workload._model)
    step = estimate(workload._settings, workload._mesh, CPU, gathering)
    return step.peak([kind] * len(step.blocks))


KINDS = ("none", "full")
LAYOUTS = {
    "FSDP 2": (2, {}),
    "FSDP 2, TP 2": (4, {"tensor_parallel_degree": 2}),
}
OTHER_LAYOUTS = {
    "FSDP 2, bfloat16": (2, {"param_dtype": "bfloat16"}),
    "FSDP 2, not resharded": (2, {"reshard_after_forward": False}),
    "FSDP 2, CP 2": (4, {"context_parallel_degree": 2}),
}
LATENT = {"kv_lora_rank": 64, "q_lora_rank": 96, "qk_rope_head_dim": 16}
DEEPSEEK = LATENT | {"num_experts": 4, "shared_experts": 1, "moe_inter_dim": 128, "load_balance_coeff": 0.01}


@pytest.mark.parametrize(
    ("size", "changes", "kind"),
    [
        *[pytest.param(*layout, kind, id=f"{kind}-{name}") for name, layout in LAYOUTS.items() for kind in KINDS],
        pytest.param(2, DEEPSEEK, "none", id="none-FSDP 2, latent attention and experts"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of DTensor, on the order of its collectives
def test_the_estimate_is_up_to_a_tenth_above_what_torchs_tracker_measures(monkeypatch, world, size, changes, kind):
    assert_estimated(monkeypatch, world, size, changes, kind)


@pytest.mark.extended
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "changes"), OTHER_LAYOUTS.values(), ids=OTHER_LAYOUTS)
@pytest.mark.filterwarnings("ignore")  # as above
def test_the_estimate_of_other_layouts_is_up_to_a_tenth_above_it(monkeypatch, world, size, changes, kind):
    assert_estimated(monkeypatch, world, size, changes, kind)


def assert_estimated(monkeypatch, world, size, changes, kind):
    workload = make_workload(monkeypatch, world, size, activation_checkpointing=kind, **changes)
    # This step makes the optimizer's state.
    workload._train_step(0, workload._batches[0])
    workload._optimizer.zero_grad()
    tracker = MemTracker()
    tracker.track_external(workload._model, workload._optimizer, *workload._batches)
    with tracker:
        workload._train_step(0, workload._batches[1])
    measured = tracker.get_tracker_snapshot("peak")[CPU]["Total"]
    assert measured <= estimated(workload, kind) <= 1.1 * measured
    workload.cleanup()


# The allocated peaks in docs/benchmarks.md, and others of the same runs; since then, the model's code has changed a
# little.
H200 = {
    "2 GPUs, eager, selective": (2, None, "selective", 73.3),
    "4 GPUs, eager, selective": (4, None, "selective", 50.9),
    "2 GPUs, compiled, none": (2, "inductor", "none", 86.0),
    "4 GPUs, compiled, selective": (4, "inductor", "selective", 41.1),
}


@pytest.mark.extended
@pytest.mark.parametrize("launch", H200)
def test_llama_8b_on_h200s_took_what_is_estimated_to_a_twentieth(world, launch):
    size, compiler, kind, measured_gib = H200[launch]
    world(size)
    settings = make_settings(
        LlamaFsdp2Settings,
        "llama_fsdp2",
        size="8b",
        attention="flash",
        activation_checkpointing=kind,
        compile_blocks=compiler is not None,
        compile_loss=compiler is not None,
    )
    mesh = ParallelMesh.build(ParallelDims(1, size, 1, 1), "cpu")
    step = estimate(settings, mesh, CPU, Gathering(compiler))
    assert step.peak([kind] * 32) / GIB == pytest.approx(measured_gib, rel=0.05)


def test_a_rank_of_distributed_experts_is_given_the_most_rows_that_it_can_get(world):
    world(2)
    experts = {"attention": "flash", "num_experts": 4, "top_k": 2, "expert_parallel_degree": 2}
    settings, alone = (
        make_settings(LlamaFsdp2Settings, "llama_fsdp2", **SMALL | keys)
        for keys in (experts, experts | {"expert_parallel_degree": 1})
    )
    distributed, local = (
        estimate(given, ParallelMesh.build(ParallelDims(1, 2, 1, 1, 1, degree), "cpu"), CPU, Gathering(None))
        for given, degree in ((settings, 2), (alone, 1))
    )
    # Both of a token's experts may be on this rank, which then evaluates the tokens of both ranks.
    kept = [step.by_kind["none"].kept for step in (distributed, local)]
    assert 1.5 < kept[0] / kept[1] < 2.5


@pytest.mark.parametrize("rotary", ["real", "complex"])
def test_the_measured_block_is_given_rotations_in_the_form_of_the_config(world, monkeypatch, rotary):
    world(1)
    given = []
    run = Block.forward
    monkeypatch.setattr(
        Block, "forward", lambda block, x, freqs_cis: given.append(freqs_cis) or run(block, x, freqs_cis)
    )
    settings = make_settings(LlamaFsdp2Settings, "llama_fsdp2", **SMALL | {"attention": "flash", "rotary": rotary})
    estimate(settings, ParallelMesh.build(ParallelDims(1, 1, 1, 1), "cpu"), CPU, Gathering(None))
    assert {freqs_cis.is_complex() for freqs_cis in given} == {rotary == "complex"}


def test_earlier_stages_of_a_pipeline_keep_more_micro_batches(monkeypatch, world):
    keys = SMALL | {"attention": "flash", "pipeline_parallel_degree": 2, "gradient_accumulation": 4}
    steps = []
    for rank in range(2):
        world(2, rank)
        settings = make_settings(LlamaFsdp2Settings, "llama_fsdp2", **keys)
        mesh = ParallelMesh.build(ParallelDims(1, 1, 1, 1, 2), "cpu")
        steps.append(estimate(settings, mesh, CPU, Gathering(None, accumulates_unsharded=True)))
    assert [step.num_in_flight for step in steps] == [2, 1]
    assert [list(step.blocks) for step in steps] == [[0, 1], [2, 3]]
    assert (steps[0].head, steps[0].loss, steps[1].embedding) == (Unit(), Activations(0, 0), Unit())
    assert all(step.communication.unsharded_gradients > 0 for step in steps)


def test_same_kind_on_all_blocks():
    assert [same_on_all("selective", 2).kind(block) for block in range(2)] == ["selective"] * 2
