"""Costs of a step on GPUs: FLOP/s of the Llama workloads, the loss in chunks in bfloat16, and schedules of float8."""

import importlib.util

import pytest

from pytest_aorta import WorkloadRunner
from tests.distributed import ONE_GPU, small_llama

pytestmark = [
    pytest.mark.numerics,
    ONE_GPU,
    pytest.mark.launch_timeout(240),
]

TRAINING = small_llama.TRAINING | {"param_dtype": "bfloat16", "steps": 10, "deterministic": True}


@pytest.mark.parametrize("name", ["llama_fsdp2", "llama_simple_fsdp"])
def test_throughput_is_that_of_the_operations_of_the_model(workload: WorkloadRunner, name):
    metrics = workload.run(name, **TRAINING).metrics
    # Without attention and the embedding, which is not multiplied.
    least = 5 * metrics["num_parameters"] * metrics["tokens_per_s"] / 1e12
    assert least < metrics["model_tflops"] < 10 * least
    assert 0 < metrics.get("mfu", 0.5) < 1


def test_the_loss_in_chunks_trains_as_whole_logits(workload: WorkloadRunner):
    whole, chunked = (workload.run("llama_fsdp2", loss_chunks=number, **TRAINING) for number in (0, 4))
    assert chunked.loss == pytest.approx(whole.loss, rel=2e-3)
    assert chunked.grad_norm == pytest.approx(whole.grad_norm, rel=2e-2)


def test_gradients_are_in_memory_that_activations_can_have(workload: WorkloadRunner):
    wide = {"size": "8b", "n_layers": 2, "seq_len": 1024, "vocab_size": 32768, "steps": 4, "profile_steps": 0}
    metrics = workload.run("llama_fsdp2", activation_checkpointing="none", **wide).metrics
    assert metrics["peak_memory_reserved_bytes"] < 1.2 * metrics["peak_memory_bytes"]


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_schedule_by_estimated_times_has_the_bits_of_none_in_float8(workload: WorkloadRunner, recipe):
    float8 = TRAINING | {"float8_linear": True, "float8_recipe": recipe, "backend": "aot_eager"}
    plain, scheduled = (
        workload.run("llama_simple_fsdp", bucketing=bucketing, overlap_reorder=bucketing == "auto", **float8)
        for bucketing in ("none", "auto")
    )
    assert scheduled.weight_hashes == plain.weight_hashes
