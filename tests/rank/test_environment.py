"""Environment facts of a rank: the CPU kernels that numbers depend on."""

from __future__ import annotations

import cProfile
import sys
import warnings

import coverage
import pytest
import torch
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


def test_pinned_kernels_are_recorded(pinned):
    assert environment_facts(CPU)["cpu_kernels"] == PINNED


def test_vendor_is_recorded_unless_the_workload_computes_the_same_on_every_cpu(pinned):
    assert "cpu_vendor" not in environment_facts(CPU, any_cpu=True)
    assert environment_facts(CPU)["cpu_vendor"]


def test_vendor_is_recorded_where_kernels_are_not_pinned(monkeypatch):
    for name in CPU_KERNELS:
        monkeypatch.delenv(name, raising=False)
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


def test_rank_without_a_tracer_reports_none():
    assert python_tracer() is None


def test_function_that_traces_is_named():
    def trace(*_: object) -> None:
        return None

    sys.settrace(trace)
    try:
        assert python_tracer() == f"{__name__}.test_function_that_traces_is_named.<locals>.trace"
    finally:
        sys.settrace(None)


def test_profiler_of_python_is_named():
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
        ({"optimizer_fused": True}, True),
        # The other kernels of AdamW take square roots from MKL.
        ({"optimizer_fused": False}, False),
        ({"compile_loss": True}, False),
    ],
)
def test_llama_claims_equal_bits_on_every_cpu_only_without_kernels_that_depend_on_it(workload_class, changes, expected):
    workload = workload_class(default_config(workload_class.name, **changes))
    workload._settings = workload.read_settings()
    assert workload.is_same_on_any_cpu is expected
