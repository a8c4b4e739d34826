"""Communication keys of the Llama workloads under NCCL: the bits that they keep, and the kernels that run."""

import re

import pytest

from pytest_aorta import WorkloadRunner
from pytest_aorta.result.trace.profiled_steps import Collective
from tests.distributed import ONE_GPU, small_llama

pytestmark = [pytest.mark.numerics, pytest.mark.launch_timeout(240)]
two_gpus = pytest.mark.world(size=2, device="cuda", warm=True)

EXACT = small_llama.THREE_BLOCKS | {"deterministic": True, "attention": "flash"}
STEPS = 5
LARGE = {"size": "1b", "n_layers": 4, "seq_len": 2048, "steps": 5, "warmup": 2, "profile_steps": 2}


def kernels_of(result, pattern):
    """Return the calls per step of the first rank's kernels whose family matches."""
    return {name: family.calls for name, family in result.kernels[0].items() if re.search(pattern, name)}


@ONE_GPU
def test_real_rotations_have_the_same_bits_in_both_implementations(workload: WorkloadRunner):
    eager = workload.run("llama_fsdp2", steps=STEPS, warmup=0, hash_every=1, rotary="real", **EXACT)
    traced = {"workload": "llama_simple_fsdp", "rotary": "real"}
    workload.compare(traced | EXACT, eager, steps=STEPS, metrics=["loss", "weight_hash"])


@two_gpus
def test_keys_that_move_parameters_keep_every_bit(workload: WorkloadRunner):
    plain = workload.run("llama_fsdp2", steps=STEPS, warmup=0, hash_every=1, **EXACT)
    buckets = {"blocks_per_bucket": 2}
    changed = {
        "buckets": {"workload": "llama_fsdp2"} | buckets,
        "traced buckets": {"workload": "llama_simple_fsdp"} | buckets,
        "symmetric": {"workload": "llama_fsdp2", "all_gather": "symmetric"},
        "copy engine": {"workload": "llama_fsdp2", "all_gather": "copy_engine"},
    }
    for label, keys in changed.items():
        workload.compare(keys | EXACT, plain, steps=STEPS, label=label, metrics=["loss", "weight_hash"])


@two_gpus
def test_copy_engines_gather_without_a_kernel_and_symmetric_memory_with_its_own(workload: WorkloadRunner):
    by_kernels, by_engines, symmetric = (
        workload.run("llama_fsdp2", all_gather=kind, **LARGE) for kind in ("default", "copy_engine", "symmetric")
    )
    assert kernels_of(by_kernels, "^nccl.*AllGather")
    assert kernels_of(by_engines, "^nccl.*AllGather") == {}
    # The copies are communication, as the kernels are.
    assert all(Collective.ALL_GATHER in step.collectives for step in by_engines.overlap[0]), by_engines.kernels[0]
    assert kernels_of(by_engines, "^nccl.*ReduceScatter")
    assert kernels_of(symmetric, "^ncclSym.*AllGather"), sorted(symmetric.kernels[0])


@two_gpus
def test_async_tensor_parallelism_replaces_collectives_of_blocks_and_trains_alike(workload: WorkloadRunner):
    keys = {"tensor_parallel_degree": 2, "compile_blocks": True}
    whole = workload.run("llama_fsdp2", **LARGE | keys)
    divided = workload.run("llama_fsdp2", async_tensor_parallel=True, **LARGE | keys)

    assert divided.loss == pytest.approx(whole.loss, rel=2e-3)
    calls = [sum(kernels_of(result, "^nccl.*(AllGather|ReduceScatter)").values()) for result in (whole, divided)]
    assert calls[1] < 0.6 * calls[0], calls
