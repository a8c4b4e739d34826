"""Activation checkpointing that is chosen by estimated memory, against the memory that a GPU allocates."""

import pytest

from pytest_aorta import WorkloadRunner
from tests.distributed import ONE_GPU

pytestmark = [
    pytest.mark.numerics,
    ONE_GPU,
    pytest.mark.launch_timeout(300),
]

TRAINING = {
    "size": "debug",
    "dim": 1024,
    "n_layers": 8,
    "n_heads": 16,
    "n_kv_heads": 8,
    "ffn_hidden": 3584,
    "vocab_size": 16384,
    "seq_len": 4096,
    "batch_size": 2,
    "param_dtype": "bfloat16",
    "steps": 3,
    "warmup": 2,
    "profile_steps": 0,
}
VARIANTS = {
    "eager": {"workload": "llama_fsdp2"},
    "compiled": {"workload": "llama_fsdp2", "compile_blocks": True, "compile_loss": True},
    "loss in chunks": {"workload": "llama_fsdp2", "loss_chunks": 8},
    "aot_eager": {"workload": "llama_simple_fsdp", "bucketing": "transformer_block"},
    "inductor": {"workload": "llama_simple_fsdp", "backend": "inductor", "compile_loss": True},
}


NIGHTLY = [pytest.param(name, marks=pytest.mark.extended) for name in ("compiled", "aot_eager", "inductor")]


def launch(workload: WorkloadRunner, variant, **changes):
    keys = TRAINING | VARIANTS[variant] | {"activation_checkpointing": "auto"} | changes
    return workload.run(keys.pop("workload"), **keys)


def bytes_of(result, name):
    (value,) = result.rank_metrics[name]
    return value


# Those that compile take minutes.
@pytest.mark.parametrize("variant", [*NIGHTLY, "eager", "loss in chunks"])
def test_the_estimate_is_near_the_allocated_peak_and_the_choice_fits(workload: WorkloadRunner, variant):
    most = None
    for part in (None, 0.85, 0.7):
        budget = {} if part is None else {"memory_budget_bytes": int(part * most)}
        result = launch(workload, variant, **budget)
        kinds = result.environment["activation_checkpointing"]
        estimate, allocated = (bytes_of(result, name) for name in ("memory_estimate_bytes", "peak_memory_bytes"))
        assert 0.97 * allocated < estimate < 1.15 * allocated, kinds
        assert allocated <= 1.03 * bytes_of(result, "memory_budget_bytes"), kinds
        assert (kinds == "none on all 8 blocks") is (part is None), kinds
        most = most or estimate


@pytest.mark.parametrize("variant", [pytest.param("eager", marks=pytest.mark.extended), "aot_eager"])
def test_recomputation_keeps_every_bit(workload: WorkloadRunner, variant):
    exact = {"deterministic": True, "hash_every": 1, "warmup": 0}
    roomy = launch(workload, variant, **exact)
    budget = int(0.75 * bytes_of(roomy, "memory_estimate_bytes"))
    tight = launch(workload, variant, memory_budget_bytes=budget, **exact)
    assert tight.environment["activation_checkpointing"] != roomy.environment["activation_checkpointing"]
    assert (tight.loss, tight.weight_hashes) == (roomy.loss, roomy.weight_hashes)
