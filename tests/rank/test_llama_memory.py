"""The estimate of a step's memory and the choice of activation checkpointing, in one process.

The process group does nothing, so one process can run a rank's part of any layout.
"""

import itertools
from contextlib import ExitStack

import pytest
import torch
from aorta_workloads.config import MemorySettings
from aorta_workloads.distributed.activation_checkpoint import LADDER, choices, describe
from aorta_workloads.distributed.memory import Activations, Gathering, StepMemory, Unit, decide, estimate, own_budget
from aorta_workloads.distributed.parallel_dims import ParallelDims, ParallelMesh
from aorta_workloads.llama_fsdp2.settings import LlamaFsdp2Settings
from aorta_workloads.llama_fsdp2.workload import LlamaFsdp2Workload
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed._tools.mem_tracker import MemTracker

from tests.rank.ranks import fake_group
from tests.rank.settings import make_settings

CPU, GPU = torch.device("cpu"), torch.device("cuda")
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


def test_kinds_are_described_with_their_numbers_of_blocks():
    assert describe(["full", "none"]) == "full on 1 of 2 blocks, none on 1"


@given(st.integers(1, 40))
def test_each_choice_recomputes_more_on_one_block_than_the_choice_before(num_blocks):
    kinds = [list(map(LADDER.index, choice)) for choice in choices(num_blocks)]
    assert (sum(kinds[0]), kinds[-1]) == (0, [3] * num_blocks)
    for before, after in itertools.pairwise(kinds):
        assert sum(after) == sum(before) + 1
        assert after == sorted(after, reverse=True)


def make_step(**changes):
    facts = {
        "embedding": Unit(10, 20, 40),
        "block": Unit(5, 10, 20),
        "head": Unit(10, 20, 40),
        "blocks": range(4),
        "inputs": 1,
        "by_kind": {kind: Activations(kept, 10) for kind, kept in zip(LADDER, (1000, 500, 300, 1), strict=True)},
        "loss": Activations(50, 50),
        "in_flight": 20,
        "always": 3,
    }
    return StepMemory(**facts | changes)


@pytest.mark.parametrize(
    ("changes", "kind", "more"),
    [
        ({"keeps_gradients": True}, "none", 40),
        ({"num_in_flight": 3}, "none", 2 * 4001),
        ({"kept_by": frozenset(["none"])}, "none", 4 * 10),
        ({"kept_by": frozenset(["none"])}, "full", 0),
        ({"embedding": Unit(10, 2000, 4000)}, "full", 2 * 6000 - (20 + 40 + 100 + 4) + 30),
    ],
    ids=str,
)
def test_the_peak_counts_each_part_of_a_step(changes, kind, more):
    # Shards and two moments, batches, inputs; activations; gathered blocks, the gathered head twice; the loss.
    kept = make_step().by_kind[kind].kept
    plain = (3 * 40 + 3 + 1) + 4 * kept + (20 + 40) + 100
    assert make_step().peak([kind] * 4) == plain
    assert make_step(**changes).peak([kind] * 4) == plain + more


@pytest.mark.parametrize(
    ("given", "free", "budget"),
    [((0.8, None), 900, 800), ((0.8, None), 700, 700), ((0.8, 500), 900, 500), ((0.8, 950), 900, 900)],
)
def test_a_budget_in_bytes_replaces_the_fraction_and_nothing_exceeds_what_is_free(monkeypatch, given, free, budget):
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (free - 50, 1000))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda _: 50)
    assert own_budget(MemorySettings(*given), GPU) == budget


def test_cpu_ranks_need_a_budget_in_bytes():
    assert own_budget(MemorySettings(0.8, 950), CPU) == 950
    with pytest.raises(ValueError, match="memory_budget_bytes is null: CPU ranks have no device"):
        own_budget(MemorySettings(0.8, None), CPU)


def test_less_memory_gives_more_recomputation_and_too_little_is_refused(world):
    world(1)
    step = make_step()
    most, least = step.peak(["none"] * 4), step.peak(["full"] * 4)
    chosen = [decide(step, 4, budget, CPU) for budget in (most, most - 1, least)]
    none, full = ["none"] * 4, ["full"] * 4
    assert [[*decision.kinds] for decision in chosen] == [none, ["elementwise", *none[1:]], full]
    assert [decision.estimate for decision in chosen] == [most, most - 500, least]
    assert "auto chose none on all 4 blocks; estimated" in str(chosen[0])
    with pytest.raises(ValueError, match=r"even full recomputation of all 4 blocks needs an estimated .+ on one rank"):
        decide(step, 4, least - 1, CPU)


def estimated(workload, kind):
    gathering = workload.gathering(workload.model, workload.mesh, workload.settings)
    step = estimate(workload.settings, workload.mesh, CPU, gathering)
    return step.peak([kind] * len(step.blocks))


KINDS = ("none", "full")
LAYOUTS = {
    "FSDP 2": (2, {}),
    "FSDP 2, TP 2": (4, {"tensor_parallel_degree": 2}),
    "FSDP 2, bfloat16": (2, {"param_dtype": "bfloat16"}),
    "FSDP 2, not resharded": (2, {"reshard_after_forward": False}),
    "FSDP 2, CP 2": (4, {"context_parallel_degree": 2}),
}
IN_CI = ("full-FSDP 2", "none-FSDP 2, TP 2")
LATENT = {"kv_lora_rank": 64, "q_lora_rank": 96, "qk_rope_head_dim": 16}
DEEPSEEK = LATENT | {"num_experts": 4, "shared_experts": 1, "moe_inter_dim": 128, "load_balance_coeff": 0.01}


@pytest.mark.parametrize(
    ("size", "changes", "kind"),
    [
        *[
            pytest.param(*layout, kind, id=name, marks=[] if name in IN_CI else [pytest.mark.extended])
            for layout_name, layout in LAYOUTS.items()
            for kind in KINDS
            for name in [f"{kind}-{layout_name}"]
        ],
        pytest.param(2, DEEPSEEK, "none", id="none-FSDP 2, latent attention and experts"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of DTensor, on the order of its collectives
def test_the_estimate_is_up_to_a_seventh_above_what_torchs_tracker_measures(set_up, size, changes, kind):
    workload = set_up(LlamaFsdp2Workload, size, **SMALL | {"activation_checkpointing": kind} | changes)
    batches = [next(workload.batches) for _ in range(2)]
    # This step makes the optimizer's state.
    workload.train_step(batches[0])
    workload.optimizer.zero_grad()
    tracker = MemTracker()
    tracker.track_external(workload.model, workload.optimizer, *batches)
    with tracker:
        workload.train_step(batches[1])
    measured = tracker.get_tracker_snapshot("peak")[CPU]["Total"]
    assert measured <= estimated(workload, kind) <= 1.14 * measured
    workload.cleanup()


def test_a_rank_of_distributed_experts_evaluates_as_many_rows_as_it_sends(world):
    world(2)
    experts = {"attention": "flash", "num_experts": 4, "top_k": 2, "expert_parallel_degree": 2}
    settings, alone = (
        make_settings(LlamaFsdp2Settings, "llama_fsdp2", **SMALL | keys)
        for keys in (experts, experts | {"expert_parallel_degree": 1})
    )
    distributed, local = (
        estimate(given, ParallelMesh(ParallelDims(1, 2, 1, 1, 1, degree), "cpu"), CPU, Gathering(False))
        for given, degree in ((settings, 2), (alone, 1))
    )
    kept = [step.by_kind["none"].kept for step in (distributed, local)]
    assert kept[0] / kept[1] == pytest.approx(1, rel=0.01)
    assert distributed.block.gathered < local.block.gathered


def test_earlier_stages_of_a_pipeline_keep_more_micro_batches(world):
    keys = SMALL | {"attention": "flash", "pipeline_parallel_degree": 2, "gradient_accumulation": 4}
    steps = []
    for rank in range(2):
        world(2, rank)
        settings = make_settings(LlamaFsdp2Settings, "llama_fsdp2", **keys)
        mesh = ParallelMesh(ParallelDims(1, 1, 1, 1, 2), "cpu")
        steps.append(estimate(settings, mesh, CPU, Gathering(False, accumulates_unsharded=True)))
    assert [step.num_in_flight for step in steps] == [2, 1]
    assert [list(step.blocks) for step in steps] == [[0, 1], [2, 3]]
    assert (steps[0].head, steps[0].loss, steps[1].embedding) == (Unit(), Activations(0, 0), Unit())


@pytest.mark.parametrize(("changes", "less"), [({"compile_loss": True}, 2), ({"loss_chunks": 8}, 2.5)], ids=str)
def test_a_fused_loss_and_a_loss_in_chunks_keep_fewer_logits(world, changes, less):
    world(1)
    mesh = ParallelMesh(ParallelDims(1, 1, 1, 1), "cpu")
    keys = SMALL | {"attention": "flash", "vocab_size": 8192, "param_dtype": "bfloat16"}
    plain, given = (
        estimate(make_settings(LlamaFsdp2Settings, "llama_fsdp2", **keys | more), mesh, CPU, Gathering(False)).loss
        for more in ({}, changes)
    )
    assert plain.kept + plain.working > less * (given.kept + given.working)


def test_compiled_blocks_keep_less_than_eager_ones(world):
    world(1)
    settings = make_settings(LlamaFsdp2Settings, "llama_fsdp2", **SMALL | {"attention": "flash"})
    mesh = ParallelMesh(ParallelDims(1, 1, 1, 1), "cpu")
    eager, compiled = (estimate(settings, mesh, CPU, Gathering(given)).by_kind for given in (False, True))
    assert eager["elementwise"].kept < compiled["none"].kept < eager["none"].kept
    # The last product of a compiled block is part of the block's output.
    output = settings.batch_size * settings.seq_len * settings.model.dim * settings.param_dtype.itemsize
    less = {kind: eager[kind].kept - compiled[kind].kept for kind in LADDER[1:]}
    assert less == {"elementwise": output, "selective": output, "full": 0}
