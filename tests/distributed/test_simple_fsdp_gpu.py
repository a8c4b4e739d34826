"""Compiler-based FSDP against eager FSDP2 under NCCL: every bit of every step, on all GPUs of the run."""

import importlib.util

import pytest

from pytest_aorta import ComparisonFailed, WorkloadRunner
from tests.distributed import ALL_GPUS, ONE_GPU, small_llama

pytestmark = [
    pytest.mark.numerics,
    ALL_GPUS,
    pytest.mark.launch_timeout(240),
]

TRAINING = small_llama.THREE_BLOCKS | {"deterministic": True, "attention": "flash"}
# Two blocks of the 8B model.
WIDE = {
    "size": "8b",
    "n_layers": 2,
    "seq_len": 1024,
    "param_dtype": "bfloat16",
    "deterministic": True,
    "profile_steps": 0,
}


def test_aot_eager_has_every_bit_of_fsdp2_in_two_blocks_of_the_8b(workload: WorkloadRunner):
    eager = workload.run("llama_fsdp2", steps=8, warmup=0, hash_every=1, **WIDE)
    for bucketing in ("transformer_block", "auto"):
        traced = {"workload": "llama_simple_fsdp", "bucketing": bucketing}
        workload.compare(traced | WIDE, eager, steps=8, label=bucketing, metrics=["loss", "weight_hash"])


DEEPSEEK = {
    "size": "deepseek_debug",
    "n_layers": 2,
    "seq_len": 256,
    "batch_size": 1,
    "deterministic": True,
    "profile_steps": 0,
}


@ONE_GPU
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"activation_checkpointing": "full"}, marks=pytest.mark.extended),
        {"param_dtype": "bfloat16", "activation_checkpointing": "selective", "optimizer": "compiled"},
    ],
    ids=["float32, full", "bfloat16, selective, compiled AdamW"],
)
def test_latent_attention_and_experts_on_one_gpu_have_every_bit_of_fsdp2(workload: WorkloadRunner, options):
    training = DEEPSEEK | {"steps": 5, "warmup": 0, "hash_every": 1} | options
    eager = workload.run("llama_fsdp2", **training)
    traced = {"workload": "llama_simple_fsdp", "bucketing": "transformer_block"}
    workload.compare(traced | training, eager, steps=5, label="aot_eager")


@ONE_GPU
@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.extended), {"activation_checkpointing": "selective"}],
    ids=["kept", "selective"],
)
def test_one_graph_of_a_step_and_its_cuda_graph_have_every_bit_of_fsdp2(workload: WorkloadRunner, options):
    training = TRAINING | {"steps": 25, "warmup": 0, "hash_every": 1} | options
    eager = workload.run("llama_fsdp2", **training)
    for label, keys in {"one graph": {}, "CUDA graph": {"cuda_graphs": True}}.items():
        traced = {"workload": "llama_simple_fsdp", "trace": "step"} | keys
        workload.compare(traced | training, eager, steps=25, label=label)


@ONE_GPU
@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.parametrize(
    ("recipe", "with_output", "bucketing"),
    [("tensorwise", True, "transformer_block"), ("rowwise", False, "transformer_block"), ("tensorwise", False, "auto")],
)
def test_float8_on_one_gpu_has_every_bit_of_fsdp2(workload: WorkloadRunner, recipe, with_output, bucketing):
    training = TRAINING | {"float8_linear": True, "float8_recipe": recipe, "float8_output": with_output}
    eager = workload.run("llama_fsdp2", steps=5, warmup=0, hash_every=1, **training)
    traced = {"workload": "llama_simple_fsdp", "bucketing": bucketing}
    workload.compare(traced | training, eager, steps=5, label=bucketing)


@pytest.mark.world(size=2, device="cuda", warm=True)
def test_fault_is_located_to_parameter_module_and_rank(workload: WorkloadRunner):
    """Locate the fault with the kernel of the weight hash and compiled graphs on CUDA."""
    reference = {"workload": "llama_fsdp2"} | TRAINING
    candidate = {"workload": "llama_simple_fsdp", "fault": {"kind": "drop_gradient", "step": 2, "rank": 1}} | TRAINING
    with pytest.raises(ComparisonFailed) as regression:
        workload.compare(candidate, reference, steps=3, locate=True)
    assert set(regression.value.metrics) == {"loss", "grad_norm", "weight_hash"}
    for part in ("first difference: step 2, ", "step 2, gradients: ", "step 2, weights: ", "step 2, operators: "):
        assert part in str(regression.value)
