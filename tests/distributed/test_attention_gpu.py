"""Attention kernels of the Llama workloads on GPUs: which one runs, and every layout's bits under it."""

import importlib.util

import pytest

from pytest_aorta.common.errors import LaunchError
from tests.distributed import small_llama

pytestmark = [
    pytest.mark.numerics,
    pytest.mark.world(size=2, device="cuda", warm=True),
    pytest.mark.launch_timeout(240),
]

TRAINING = small_llama.TRAINING | {"seq_len": 512, "param_dtype": "bfloat16", "steps": 5}
DETERMINISTIC = TRAINING | {"deterministic": True}
# Of the package nvidia-cudnn-frontend.
HAS_CUDNN = importlib.util.find_spec("cudnn") is not None
LAYOUTS = {
    "plain": {},
    "selective": {"activation_checkpointing": "selective"},
    "tp": {"tensor_parallel_degree": 2, "batch_size": 4},
    "cp": {"context_parallel_degree": 2, "batch_size": 4},
    "float32": {"param_dtype": "float32"},
}


@pytest.mark.parametrize(("deterministic", "kernel"), [(False, "cudnn"), (True, "cudnn" if HAS_CUDNN else "flex")])
def test_auto_takes_the_fastest_kernel_of_the_mode(workload, deterministic, kernel):
    result = workload.run("llama_fsdp2", **TRAINING | {"deterministic": deterministic})
    assert result.environment["attention"] == kernel


def test_every_kernel_trains_alike(workload):
    # The efficient kernel takes as many heads of keys as of queries.
    whole = TRAINING | {"n_kv_heads": TRAINING["n_heads"]}
    plain = workload.run("llama_fsdp2", attention="math", **whole)
    for kernel in ("cudnn", "flash", "efficient", "flex"):
        result = workload.run("llama_fsdp2", attention=kernel, **whole)
        assert result.environment["attention"] == kernel
        assert result.loss == pytest.approx(plain.loss, rel=2e-3)


def test_efficient_kernel_is_refused_for_fewer_heads_of_keys(workload):
    message = r"attention is 'efficient', which can't run on cuda .+ Allowed here are auto, cudnn, flash, math, flex"
    with pytest.raises(LaunchError, match=message):
        workload.run("llama_fsdp2", attention="efficient", **TRAINING)


@pytest.mark.skipif(HAS_CUDNN, reason="nvidia-cudnn-frontend is installed")
def test_cudnn_is_refused_in_a_deterministic_run_without_its_package(workload):
    message = r"attention is 'cudnn', which can't run on cuda \(deterministic, .+ nvidia-cudnn-frontend.+ flex"
    with pytest.raises(LaunchError, match=message):
        workload.run("llama_fsdp2", attention="cudnn", **DETERMINISTIC)


@pytest.mark.parametrize("kernel", ["flash", "flex", "cudnn"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_aot_eager_has_every_bit_of_fsdp2(workload, kernel, layout):
    if layout == "float32" and kernel != "flex":
        pytest.skip(f"the {kernel} kernel takes no float32")
    if kernel == "cudnn" and (not HAS_CUDNN or layout == "cp"):
        pytest.skip("which needs nvidia-cudnn-frontend, and as many keys as queries")
    training = DETERMINISTIC | LAYOUTS[layout] | {"attention": kernel}
    eager, again, traced = (
        workload.run(name, **training) for name in ("llama_fsdp2", "llama_fsdp2", "llama_simple_fsdp")
    )
    assert eager.environment["attention"] == traced.environment["attention"] == kernel
    for other in (again, traced):
        assert (other.weight_hashes, other.loss, other.grad_norm) == (eager.weight_hashes, eager.loss, eager.grad_norm)


def test_recomputed_flex_has_every_bit_of_a_kept_one(workload):
    kept = workload.run("llama_fsdp2", **DETERMINISTIC)
    for checkpointing in ("selective", "full"):
        again = workload.run("llama_fsdp2", activation_checkpointing=checkpointing, **DETERMINISTIC)
        assert again.weight_hashes == kept.weight_hashes, checkpointing


@pytest.mark.parametrize("workload_name", ["llama_fsdp2", "llama_simple_fsdp"])
def test_no_step_reads_memory_that_was_not_written(workload, workload_name):
    plain = workload.run(workload_name, **DETERMINISTIC)
    filled = workload.run(workload_name, fill_uninitialized_memory=True, **DETERMINISTIC)
    assert filled.weight_hashes == plain.weight_hashes
    assert filled.loss == plain.loss
