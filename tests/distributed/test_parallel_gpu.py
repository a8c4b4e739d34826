"""The axes of the Llama workloads under NCCL: each layout trains as FSDP does, and traced as eager."""

from __future__ import annotations

import importlib.util

import pytest

pytestmark = [
    pytest.mark.numerics,
    pytest.mark.world(size=4, device="cuda", warm=True),
    pytest.mark.timeout(240),
]

TRAINING = {
    "size": "debug",
    "dim": 512,
    "n_layers": 2,
    "n_heads": 8,
    "n_kv_heads": 4,
    "ffn_hidden": 1536,
    "seq_len": 256,
    "param_dtype": "bfloat16",
    "steps": 10,
    "warmup": 0,
    "hash_every": 1,
    "deterministic": True,
}
# Of each the global batch is four sequences.
LAYOUTS = {
    "fsdp 4": {"batch_size": 1},
    "hsdp 2x2": {"batch_size": 1, "data_parallel_replicate_degree": 2},
    "fsdp 2, tp 2": {"batch_size": 2, "tensor_parallel_degree": 2},
    "replicas 2, tp 2": {"batch_size": 2, "data_parallel_replicate_degree": 2, "tensor_parallel_degree": 2},
    "tp alone": {"batch_size": 4, "tensor_parallel_degree": 4},
    "fsdp 2, cp 2": {"batch_size": 2, "context_parallel_degree": 2},
    "cp 2, tp 2": {"batch_size": 4, "context_parallel_degree": 2, "tensor_parallel_degree": 2},
}
UNCHANGED = {"lr": 1e-30, "steps": 1}


def test_all_layouts_begin_with_the_same_weights_and_train_alike(workload):
    initial, trained = {}, {}
    for layout, axes in LAYOUTS.items():
        initial[layout] = workload.run("llama_fsdp2", **TRAINING | axes | UNCHANGED).weight_hashes["1"]
        trained[layout] = workload.run("llama_fsdp2", **TRAINING | axes)
    assert len(set(initial.values())) == 1, initial

    reference = trained["fsdp 4"]
    for layout, result in trained.items():
        assert result.loss == pytest.approx(reference.loss, rel=2e-3), layout
        assert result.grad_norm == pytest.approx(reference.grad_norm, rel=2e-2), layout


@pytest.mark.parametrize("layout", ["hsdp 2x2", "fsdp 2, tp 2", "fsdp 2, cp 2"])
def test_aot_eager_has_every_bit_of_fsdp2(workload, layout):
    eager = workload.run("llama_fsdp2", **TRAINING | LAYOUTS[layout])
    traced = workload.run("llama_simple_fsdp", **TRAINING | LAYOUTS[layout])
    assert traced.weight_hashes == eager.weight_hashes
    assert (traced.loss, traced.grad_norm) == (eager.loss, eager.grad_norm)


@pytest.mark.parametrize("layout", ["hsdp 2x2", "fsdp 2, tp 2", "fsdp 2, cp 2"])
def test_compiled_blocks_train_as_eager_ones(workload, layout):
    eager = workload.run("llama_fsdp2", **TRAINING | LAYOUTS[layout])
    compiled = workload.run("llama_fsdp2", compile_blocks=True, **TRAINING | LAYOUTS[layout])
    assert compiled.loss == pytest.approx(eager.loss, rel=2e-3)
    assert compiled.grad_norm == pytest.approx(eager.grad_norm, rel=2e-2)


def test_a_checkpoint_goes_on_in_another_layout(workload, tmp_path):
    folder = str(tmp_path / "saved")
    training = TRAINING | {"steps": 3}
    saved = workload.run("llama_fsdp2", save_checkpoint=folder, **training | LAYOUTS["replicas 2, tp 2"])
    loading = {"load_checkpoint": folder}
    for layout in ("fsdp 4", "fsdp 2, cp 2"):
        same = workload.run("llama_fsdp2", **training | LAYOUTS[layout] | loading | UNCHANGED)
        assert same.weight_hashes["1"] == saved.weight_hashes["3"], layout


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_float8_trains_nearly_as_bfloat16(workload):
    plain = workload.run("llama_fsdp2", **TRAINING | LAYOUTS["fsdp 4"])
    float8 = workload.run("llama_fsdp2", float8_linear=True, **TRAINING | LAYOUTS["fsdp 4"])
    assert float8.weight_hashes["1"] != plain.weight_hashes["1"]
    assert float8.loss == pytest.approx(plain.loss, rel=2e-2)


EXPERTS = TRAINING | {"num_experts": 8}
EXPERT_LAYOUTS = {
    "fsdp 4": LAYOUTS["fsdp 4"],
    "ep 2": LAYOUTS["fsdp 4"] | {"expert_parallel_degree": 2},
    "ep 4": LAYOUTS["fsdp 4"] | {"expert_parallel_degree": 4},
    "hsdp 2x2, ep 2": LAYOUTS["hsdp 2x2"] | {"expert_parallel_degree": 2},
    "cp 2, ep 4": LAYOUTS["fsdp 2, cp 2"] | {"expert_parallel_degree": 4},
}


def test_shared_out_experts_begin_with_the_same_weights_and_train_alike(workload):
    # Rounded to bfloat16, near ties of a router go to other experts in other layouts.
    training = EXPERTS | {"param_dtype": "float32", "steps": 5}
    initial, trained = {}, {}
    for layout, axes in EXPERT_LAYOUTS.items():
        initial[layout] = workload.run("llama_fsdp2", **training | axes | UNCHANGED).weight_hashes["1"]
        trained[layout] = workload.run("llama_fsdp2", **training | axes)
    assert len(set(initial.values())) == 1, initial

    reference = trained["fsdp 4"]
    for layout, result in trained.items():
        assert result.loss == pytest.approx(reference.loss, rel=1e-4), layout
        assert result.grad_norm == pytest.approx(reference.grad_norm, rel=1e-3), layout


def test_recomputed_exchanges_have_every_bit_in_bfloat16(workload):
    training = EXPERTS | EXPERT_LAYOUTS["ep 2"]
    kept = workload.run("llama_fsdp2", **training)
    for kind in ("selective", "full"):
        recomputed = workload.run("llama_fsdp2", activation_checkpointing=kind, **training)
        assert recomputed.weight_hashes == kept.weight_hashes
        assert (recomputed.loss, recomputed.grad_norm) == (kept.loss, kept.grad_norm)


def test_a_gpu_to_which_no_token_goes_takes_part(workload):
    # Four tokens a step.
    starved = EXPERTS | {"seq_len": 1, "batch_size": 1, "experts_per_token": 1, "steps": 3}
    reference = workload.run("llama_fsdp2", **starved)
    result = workload.run("llama_fsdp2", expert_parallel_degree=4, **starved)
    assert result.loss == pytest.approx(reference.loss, rel=2e-2)


def test_traced_experts_have_every_bit_of_fsdp2(workload):
    eager = workload.run("llama_fsdp2", **EXPERTS | LAYOUTS["fsdp 4"])
    traced = workload.run("llama_simple_fsdp", **EXPERTS | LAYOUTS["fsdp 4"])
    assert traced.weight_hashes == eager.weight_hashes
    assert (traced.loss, traced.grad_norm) == (eager.loss, eager.grad_norm)


def test_compiled_blocks_with_experts_train_as_eager_ones(workload):
    eager = workload.run("llama_fsdp2", **EXPERTS | LAYOUTS["fsdp 4"])
    compiled = workload.run("llama_fsdp2", compile_blocks=True, **EXPERTS | LAYOUTS["fsdp 4"])
    assert compiled.loss == pytest.approx(eager.loss, rel=1e-2)
