"""Activation checkpointing that is chosen by estimated memory, on CPU ranks."""

import re

import pytest

from pytest_aorta.common.errors import LaunchError
from tests.distributed import TWO_CPU_RANKS

pytestmark = [pytest.mark.numerics, TWO_CPU_RANKS, pytest.mark.launch_timeout(240)]

# Sequences are so long that activations outweigh parameters.
TRAINING = {
    "size": "debug",
    "n_layers": 4,
    "n_kv_heads": 4,
    "seq_len": 512,
    "steps": 2,
    "warmup": 0,
    "profile_steps": 0,
    "hash_every": 1,
}
PLENTY, FEW = 1 << 30, 1 << 20
KINDS = {"elementwise": 0.8, "selective": 0.62, "full": 0.41}


def auto(budget_bytes):
    return {"activation_checkpointing": "auto", "memory_budget_bytes": budget_bytes}


def chosen(result):
    """Return the recorded choice, estimate and budget."""
    facts = [result.environment["activation_checkpointing"]]
    for name in ("memory_estimate_bytes", "memory_budget_bytes"):
        (value,) = set(result.rank_metrics[name])
        facts.append(int(value))
    return facts


@pytest.mark.extended
def test_smaller_budgets_choose_more_recomputation_with_the_bits_of_none(workload):
    plain = workload.run("llama_fsdp2", **TRAINING)
    assert "activation_checkpointing" not in plain.environment
    roomy = workload.run("llama_fsdp2", **TRAINING | auto(PLENTY))
    kinds, most, budget = chosen(roomy)
    assert (kinds[:4], budget) == ("none", PLENTY)
    assert (roomy.loss, roomy.weight_hashes) == (plain.loss, plain.weight_hashes)
    for kind, part in KINDS.items():
        result = workload.run("llama_fsdp2", **TRAINING | auto(int(part * most)))
        kinds, estimate, budget = chosen(result)
        assert kinds.startswith(f"{kind} on "), kinds
        assert estimate <= budget == int(part * most)
        assert (result.loss, result.weight_hashes) == (plain.loss, plain.weight_hashes), kinds
    with pytest.raises(LaunchError, match=r"even full recomputation of all 4 blocks needs an estimated .+ of 1 MiB"):
        workload.run("llama_fsdp2", **TRAINING | auto(FEW))


@pytest.mark.extended
@pytest.mark.parametrize(("dtype", "more_than_full"), [("bfloat16", 1.22), ("float32", 1.26)])
def test_mixed_kinds_in_one_graph_have_the_bits_of_none_under_fsdp2(workload, dtype, more_than_full):
    training = TRAINING | {"param_dtype": dtype, "n_layers": 2}
    with pytest.raises(LaunchError, match=r"even full recomputation of all 2 blocks needs") as refused:
        workload.run("llama_simple_fsdp", **training | auto(FEW))
    full_mib = float(re.search(r"needs an estimated ([\d.]+) MiB", str(refused.value))[1])
    mixed = workload.run("llama_simple_fsdp", **training | auto(int(more_than_full * full_mib * 2**20)))
    kinds, *_ = chosen(mixed)
    assert ", " in kinds, kinds
    plain = workload.run("llama_fsdp2", reduce_every_micro_batch=True, **training)
    assert (mixed.loss, mixed.weight_hashes) == (plain.loss, plain.weight_hashes), kinds


@pytest.mark.extended
@pytest.mark.parametrize(
    "model",
    [{}, {"num_experts": 4, "shared_experts": 1, "kv_lora_rank": 32, "qk_rope_head_dim": 8}],
    ids=["Llama", "DeepSeek"],
)
def test_graph_with_split_matrices_is_estimated(workload, model):
    """Under torch 2.13, the recomputed blocks of such a graph save meshes before random states."""
    training = TRAINING | {"tensor_parallel_degree": 2} | model
    assert chosen(workload.run("llama_simple_fsdp", **training | auto(PLENTY)))[0].startswith("none")


def test_ranks_with_different_free_memory_or_different_needs_choose_alike(workload):
    result = workload.run_script("tests/distributed/scripts/unequal_memory.py")
    # The first rank alone would recompute no block.
    assert result.rank_metrics["by_free_memory"] == [3, 3]
    assert result.rank_metrics["by_need"] == [2, 2]
