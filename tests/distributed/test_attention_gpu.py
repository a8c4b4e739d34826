"""Attention kernels of the Llama workloads on GPUs: which one runs, and every layout's bits under it."""

import importlib.util

import pytest

from pytest_aorta import WorkloadRunner
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
# `test_layouts_gpu.py` has further layouts under flash, and latent attention under flex.
CELLS = {
    ("flex", "cp"): {"context_parallel_degree": 2, "batch_size": 4},
    ("cudnn", "selective"): {"activation_checkpointing": "selective"},
    ("cudnn", "tp"): {"tensor_parallel_degree": 2, "batch_size": 4},
}


def test_every_kernel_trains_alike_and_auto_takes_the_fastest(workload: WorkloadRunner):
    # The efficient kernel takes as many heads of keys as of queries.
    whole = TRAINING | {"n_kv_heads": TRAINING["n_heads"]}
    plain = workload.run("llama_fsdp2", attention="math", **whole)
    for asked, kernel in {"auto": "cudnn", "flash": "flash", "efficient": "efficient", "flex": "flex"}.items():
        result = workload.run("llama_fsdp2", attention=asked, **whole)
        assert result.environment["attention"] == kernel
        assert result.loss == pytest.approx(plain.loss, rel=2e-3)


def test_efficient_kernel_is_refused_for_fewer_heads_of_keys(workload: WorkloadRunner):
    message = r"attention is 'efficient', which can't run on cuda .+ Allowed here are auto, cudnn, flash, math, flex"
    with pytest.raises(LaunchError, match=message):
        workload.run("llama_fsdp2", attention="efficient", **TRAINING)


@pytest.mark.skipif(HAS_CUDNN, reason="nvidia-cudnn-frontend is installed")
def test_cudnn_is_refused_in_a_deterministic_run_without_its_package(workload: WorkloadRunner):
    message = r"attention is 'cudnn', which can't run on cuda \(deterministic, .+ nvidia-cudnn-frontend.+ flex"
    with pytest.raises(LaunchError, match=message):
        workload.run("llama_fsdp2", attention="cudnn", **DETERMINISTIC)


@pytest.mark.parametrize(("kernel", "layout"), CELLS)
def test_aot_eager_has_every_bit_of_fsdp2(workload: WorkloadRunner, kernel, layout):
    if kernel == "cudnn" and not HAS_CUDNN:
        pytest.skip("needs nvidia-cudnn-frontend")
    training = DETERMINISTIC | CELLS[kernel, layout] | {"attention": kernel}
    eager, traced = (workload.run(name, **training) for name in ("llama_fsdp2", "llama_simple_fsdp"))
    assert eager.environment["attention"] == traced.environment["attention"] == kernel
    assert (traced.weight_hashes, traced.loss, traced.grad_norm) == (eager.weight_hashes, eager.loss, eager.grad_norm)


def test_recomputed_flex_and_filled_memory_have_every_bit_of_a_plain_run(workload: WorkloadRunner):
    kept = workload.run("llama_fsdp2", **DETERMINISTIC)
    assert kept.environment["attention"] == ("cudnn" if HAS_CUDNN else "flex")
    for changed in (
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective", "fill_uninitialized_memory": True},
        {"fill_uninitialized_memory": True, "workload": "llama_simple_fsdp"},
    ):
        other = DETERMINISTIC | changed
        again = workload.run(other.pop("workload", "llama_fsdp2"), **other)
        assert (again.weight_hashes, again.loss) == (kept.weight_hashes, kept.loss), changed
