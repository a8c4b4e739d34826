"""Experts distributed over GPUs under NCCL: the same training as with all experts on each GPU."""

import pytest

from tests.distributed import small_llama

pytestmark = [
    pytest.mark.numerics,
    pytest.mark.world(size=4, device="cuda", warm=True),
    pytest.mark.launch_timeout(240),
]

TRAINING = small_llama.TRAINING | {"num_experts": 8, "batch_size": 1, "steps": 5, "deterministic": True}
# The global batch is four sequences in each layout.
LAYOUTS = {
    "fsdp 4": {},
    "ep 2": {"expert_parallel_degree": 2},
    "ep 4": {"expert_parallel_degree": 4},
    "hsdp 2x2, ep 2": {"data_parallel_replicate_degree": 2, "expert_parallel_degree": 2},
    "cp 2, ep 4": {"batch_size": 2, "context_parallel_degree": 2, "expert_parallel_degree": 4},
}
BFLOAT16 = TRAINING | {"param_dtype": "bfloat16"}
UNCHANGED = {"lr": 1e-60, "steps": 1}


@pytest.fixture(scope="module")
def known():
    return {}


@pytest.fixture
def eager(workload, known):
    """Return a function for results of `llama_fsdp2` by layout and dtype, each launched once."""

    def result_of(layout, training=TRAINING):
        key = layout, training.get("param_dtype")
        if key not in known:
            known[key] = workload.run("llama_fsdp2", **training | LAYOUTS[layout])
        return known[key]

    return result_of


def test_layouts_begin_with_the_same_weights(workload):
    initial = {
        layout: workload.run("llama_fsdp2", **TRAINING | LAYOUTS[layout] | UNCHANGED).weight_hashes["1"]
        for layout in ("fsdp 4", "ep 2", "hsdp 2x2, ep 2")
    }
    assert len(set(initial.values())) == 1, initial


# In float32, since bfloat16 rounding sends near ties of a router to different experts in different layouts.
@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_layout_trains_as_fsdp_does(eager, layout):
    assert eager(layout).loss == pytest.approx(eager("fsdp 4").loss, rel=1e-4)
    assert eager(layout).grad_norm == pytest.approx(eager("fsdp 4").grad_norm, rel=1e-3)


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_recomputed_exchanges_have_every_bit(workload, eager, kind):
    recomputed = workload.run("llama_fsdp2", activation_checkpointing=kind, **BFLOAT16 | LAYOUTS["ep 2"])
    kept = eager("ep 2", BFLOAT16)
    assert recomputed.weight_hashes == kept.weight_hashes
    assert (recomputed.loss, recomputed.grad_norm) == (kept.loss, kept.grad_norm)


def test_a_rank_to_which_no_token_goes_takes_part(workload):
    # Four tokens per step.
    starved = BFLOAT16 | {"seq_len": 1, "top_k": 1, "steps": 3}
    reference = workload.run("llama_fsdp2", **starved)
    result = workload.run("llama_fsdp2", expert_parallel_degree=4, **starved)
    assert result.loss == pytest.approx(reference.loss, rel=2e-2)


@pytest.mark.parametrize("layout", ["fsdp 4", "ep 2"])
def test_compiled_blocks_train_as_eager_ones(workload, eager, layout):
    compiled = workload.run("llama_fsdp2", compile_blocks=True, **BFLOAT16 | LAYOUTS[layout])
    assert compiled.loss == pytest.approx(eager(layout, BFLOAT16).loss, rel=1e-2)


def test_experts_gathered_ahead_have_every_bit(workload, eager):
    ahead = workload.run("llama_fsdp2", forward_prefetch=1, backward_prefetch=1, **BFLOAT16 | LAYOUTS["ep 2"])
    assert ahead.weight_hashes == eager("ep 2", BFLOAT16).weight_hashes
