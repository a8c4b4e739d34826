"""Experts distributed over CPU ranks: the same model, gradients and training as with all experts on each rank."""

import json
from pathlib import Path

import pytest

from tests.distributed import TWO_CPU_RANKS
from tests.distributed.small_llama import trains_alike
from tests.unit.builders import each_of, nightly, run_python

pytestmark = [pytest.mark.numerics, pytest.mark.world(size=4, device="cpu", warm=True), pytest.mark.launch_timeout(180)]

COMPARE = Path(__file__).parent / "scripts" / "compare_checkpoints.py"
TRAINING = {"size": "debug", "n_layers": 1, "n_kv_heads": 4, "num_experts": 8, "steps": 5, "warmup": 0, "hash_every": 1}
# The global batch is four sequences in each layout.
LAYOUTS = {
    "fsdp 4": {"batch_size": 1},
    "hsdp 2, ep 2": {"batch_size": 1, "data_parallel_replicate_degree": 2, "expert_parallel_degree": 2},
    "cp 2, ep 4": {"batch_size": 2, "context_parallel_degree": 2, "expert_parallel_degree": 4},
    "ep 2": {"batch_size": 1, "expert_parallel_degree": 2},
    "fsdp 2, tp 2": {"batch_size": 2, "tensor_parallel_degree": 2},
    "ep 2, tp 2": {"batch_size": 2, "expert_parallel_degree": 2, "tensor_parallel_degree": 2},
    "cp 2, tp 2": {"batch_size": 4, "context_parallel_degree": 2, "tensor_parallel_degree": 2},
}
DEEPSEEK = {"size": "deepseek_debug", "n_layers": 2, "steps": 5, "warmup": 0, "hash_every": 1}
# AdamW then does not change any bit of a weight, and its first moment is a tenth of the gradient.
UNCHANGED = {"lr": 1e-60, "steps": 1, "max_grad_norm": None}


def differences(first, second):
    """Return the differences of two checkpoints by tensor, relative to each tensor's largest value."""
    return json.loads(run_python(COMPARE, first, second, check=True).stdout)


def calls(result, kinds):
    """Return how often rank 0 calls collectives of each kind in the profiled steps."""
    return tuple(sum(len(one.ms) for one in result.collectives[0] if one.kind == kind) for kind in kinds)


@pytest.mark.extended
@each_of("model, block, last", {"experts": (TRAINING, 0, "cp 2, ep 4"), "DeepSeek": (DEEPSEEK, 1, "cp 2, tp 2")})
def test_distributed_and_split_experts_begin_with_the_same_weights_and_train_alike(
    workload, tmp_path, model, block, last
):
    names = ("fsdp 4", "ep 2", "hsdp 2, ep 2", "fsdp 2, tp 2", "ep 2, tp 2", last)
    layouts = {name: LAYOUTS[name] for name in names}
    trains_alike(workload, model, layouts, unchanged=UNCHANGED, rel_loss=1e-5, rel_norm=1e-4, saved=tmp_path)
    for name in names:
        # AdamW hides a wrong factor of all gradients, and the norm hides a wrong factor of a small gradient.
        apart = differences(str(tmp_path / "fsdp 4"), str(tmp_path / name))
        assert f"optimizer.layers.{block}.feed_forward.experts.w1.exp_avg" in apart
        assert max(apart.values()) < 1e-4, apart

    first, loaded = (
        workload.run("llama_fsdp2", **model | LAYOUTS[layout] | UNCHANGED | given).weight_hashes["1"]
        for layout, given in (("fsdp 4", {}), (last, {"load_checkpoint": str(tmp_path / "hsdp 2, ep 2")}))
    )
    assert loaded == first


@pytest.mark.parametrize(
    ("layout", "accumulated"),
    [
        pytest.param("ep 2", 1, id="a micro-batch", marks=TWO_CPU_RANKS),
        nightly("ep 2", 3, id="stages of 3 micro-batches"),
        nightly("ep 2, tp 2", 1, id="split experts"),
    ],
)
def test_selective_recomputation_changes_no_bit_and_repeats_no_exchange(workload, layout, accumulated):
    training = TRAINING | LAYOUTS[layout] | {"steps": 2, "n_layers": 2, "gradient_accumulation": accumulated}
    training["pipeline_parallel_degree"] = 2 if accumulated > 1 else 1
    reference = workload.run("llama_fsdp2", **training)
    result = workload.run("llama_fsdp2", activation_checkpointing="selective", **training)
    assert result.weight_hashes == reference.weight_hashes
    assert (result.loss, result.grad_norm) == (reference.loss, reference.grad_norm)
    kinds = ("all_to_all", "reduce_scatter")
    assert calls(result, kinds) == calls(reference, kinds) > (0, 0)


@pytest.mark.extended
def test_compiled_blocks_with_distributed_experts_train_as_eager_ones(workload):
    training = TRAINING | LAYOUTS["ep 2"] | {"n_layers": 2, "steps": 3, "forward_prefetch": 1}
    eager = workload.run("llama_fsdp2", **training)
    for given in ({}, {"activation_checkpointing": "selective"}):
        compiled = workload.run("llama_fsdp2", compile_blocks=True, **training | given)
        assert compiled.loss == pytest.approx(eager.loss, rel=1e-5), given
        assert compiled.grad_norm == pytest.approx(eager.grad_norm, rel=1e-4), given


@pytest.mark.extended
def test_experts_fewer_than_their_ranks_are_sharded_along_their_width(workload, tmp_path):
    training = TRAINING | UNCHANGED | {"batch_size": 1, "num_experts": 2}
    reference = workload.run("llama_fsdp2", save_checkpoint=str(tmp_path / "whole"), **training)
    # One expert sharded over two ranks.
    result = workload.run(
        "llama_fsdp2", expert_parallel_degree=2, save_checkpoint=str(tmp_path / "shared out"), **training
    )
    assert result.weight_hashes == reference.weight_hashes
    assert max(differences(str(tmp_path / "whole"), str(tmp_path / "shared out")).values()) < 1e-4


@pytest.mark.extended
def test_stages_share_out_their_experts(workload):
    training = TRAINING | {"n_layers": 2, "steps": 3, "gradient_accumulation": 2, "pipeline_parallel_degree": 2}
    whole = workload.run("llama_fsdp2", **training)
    shared_out = workload.run("llama_fsdp2", expert_parallel_degree=2, **training)
    assert shared_out.loss == pytest.approx(whole.loss, rel=1e-5)
    assert shared_out.grad_norm == pytest.approx(whole.grad_norm, rel=1e-4)


@pytest.mark.extended
def test_ranks_to_which_no_token_goes_take_part_in_both_implementations(workload):
    # Four tokens per step.
    starved = TRAINING | {"seq_len": 1, "batch_size": 1, "top_k": 1, "steps": 3}
    whole = workload.run("llama_fsdp2", **starved)
    eager, traced = (
        workload.run(f"llama_{name}", expert_parallel_degree=4, **starved) for name in ("fsdp2", "simple_fsdp")
    )
    assert eager.loss == pytest.approx(whole.loss, rel=1e-5)
    assert eager.grad_norm == pytest.approx(whole.grad_norm, rel=1e-4)
    assert traced.weight_hashes == eager.weight_hashes
    assert (traced.loss, traced.grad_norm) == (eager.loss, eager.grad_norm)
