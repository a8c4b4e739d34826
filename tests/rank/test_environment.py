"""Environment facts of a rank: the CPU kernels that numbers depend on."""

import cProfile
import sys
import warnings
from importlib.metadata import distributions
from types import SimpleNamespace

import coverage
import pytest
import torch
from aorta_workloads.common.determinism import use_deterministic_algorithms
from aorta_workloads.llama_fsdp2.workload import LlamaFsdp2Workload

from pytest_aorta.plan.workloads import CPU_KERNELS
from pytest_aorta.worker import environment_facts
from pytest_aorta.worker.environment import python_tracer
from tests.rank.settings import default_config

with warnings.catch_warnings():
    # Inductor's own imports warn.
    warnings.simplefilter("ignore", DeprecationWarning)
    from aorta_workloads.llama_simple_fsdp.workload import LlamaSimpleFsdpWorkload

CPU = torch.device("cpu")
PINNED = "ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=AVX2"


@pytest.fixture
def pinned(monkeypatch):
    for name, value in CPU_KERNELS.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_pinned_kernels_are_recorded_and_the_vendor_unless_every_cpu_computes_alike(pinned):
    assert environment_facts(CPU)["cpu_kernels"] == PINNED
    assert environment_facts(CPU)["cpu_vendor"]
    assert "cpu_vendor" not in environment_facts(CPU, any_cpu=True)
    for name in CPU_KERNELS:
        pinned.delenv(name)
    facts = environment_facts(CPU, any_cpu=True)
    assert facts["cpu_kernels"] is None
    assert facts["cpu_vendor"]


@pytest.fixture
def on_gpu(monkeypatch):
    """Make a GPU that exists in name only, and restore the precision of matrix products."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    precision = torch.backends.cuda.matmul.fp32_precision
    yield torch.device("cuda")
    torch.backends.cuda.matmul.fp32_precision = precision


def test_precision_of_products_is_known_by_either_interface_of_torch(on_gpu):
    assert environment_facts(on_gpu)["tf32_matmul"] is False
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert environment_facts(on_gpu)["tf32_matmul"] is True
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert environment_facts(on_gpu)["tf32_matmul"] is False
    torch.set_float32_matmul_precision("high")
    try:
        assert environment_facts(on_gpu)["tf32_matmul"] is True
    finally:
        torch.set_float32_matmul_precision("highest")
    assert environment_facts(on_gpu)["tf32_matmul"] is False


def test_versions_of_the_libraries_that_generate_kernels_are_known(on_gpu, tmp_path, monkeypatch):
    (installed := tmp_path / "pytorch_triton_rocm-3.4.0.dist-info").mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: pytorch-triton-rocm\nVersion: 3.4.0\n")
    triton = [one.version for one in distributions(name="triton")]
    assert environment_facts(on_gpu)["triton"] == (triton[0] if triton else None)
    monkeypatch.syspath_prepend(tmp_path)
    facts = environment_facts(on_gpu)
    assert (facts["cudnn"], facts["cudnn_frontend"]) == (torch.backends.cudnn.version(), None)
    assert facts["triton"] == [*triton, "3.4.0"][0]
    # It serves cuDNN's kernels once it is imported.
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(__version__="1.32.0"))
    assert environment_facts(on_gpu)["cudnn_frontend"] == "1.32.0"


def test_a_deterministic_run_compiles_deterministic_kernels(deterministic, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    use_deterministic_algorithms(CPU)
    # Padding of products and blocks of reductions follow this switch alone.
    assert torch._inductor.config.deterministic is True


REPRODUCIBLE = {
    "CUDA": (None, None, False),
    "CUDA, deterministic": (None, {}, True),
    "CUDA, warned": (None, {"warn_only": True}, False),
    "HIP": ("6.4", None, False),
    "HIP, deterministic": ("6.4", {}, False),
}


@pytest.mark.parametrize(("hip", "mode", "reproducible"), REPRODUCIBLE.values(), ids=REPRODUCIBLE, indirect=["hip"])
def test_bits_of_a_gpu_are_reproducible_where_it_is_known(on_gpu, deterministic, hip, mode, reproducible):
    if mode is not None:
        deterministic(True, **mode)
    assert environment_facts(on_gpu)["bitwise_reproducible"] is reproducible
    assert environment_facts(on_gpu, bitwise_reproducible=True)["bitwise_reproducible"] is True
    assert environment_facts(CPU)["bitwise_reproducible"] is True


def test_function_or_profiler_that_traces_is_named():
    def trace(*_: object) -> None:
        return None

    assert python_tracer() is None
    sys.settrace(trace)
    try:
        assert python_tracer() == f"{__name__}.test_function_or_profiler_that_traces_is_named.<locals>.trace"
    finally:
        sys.settrace(None)
    with cProfile.Profile():
        assert "cProfile" in (python_tracer() or "")


@pytest.mark.parametrize("core", ["ctrace", "pytrace", *(["sysmon"] if sys.version_info >= (3, 12) else [])])
def test_each_core_of_coverage_is_named(tmp_path, core):
    config = tmp_path / "traced.ini"
    config.write_text(f"[run]\ncore = {core}\n")
    with coverage.Coverage(data_file=None, config_file=str(config)).collect():
        tracer = python_tracer()
    assert (tracer or "").startswith("coverage")


@pytest.mark.parametrize("workload_class", [LlamaFsdp2Workload, LlamaSimpleFsdpWorkload])
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"optimizer": "fused"}, True),
        # The other kernels of AdamW take square roots from MKL.
        ({"optimizer": "unfused"}, False),
        ({"compile_loss": True}, False),
    ],
)
def test_llama_claims_equal_bits_on_every_cpu_only_without_kernels_that_depend_on_it(workload_class, changes, expected):
    workload = workload_class(default_config(workload_class.name, **changes))
    assert workload.is_same_on_any_cpu is expected
