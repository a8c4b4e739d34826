"""Environment variables in a workload's config: variables that change the speed or the kernels of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.text import brief
from pytest_aorta.plan.workload.command import is_passable

# Config key that every workload has: variables of the ranks, name -> value, set before they start.
ENVIRONMENT_KEY = "environment"
ENVIRONMENT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "additionalProperties": {"type": "string"},
    "default": {},
    "description": "environment variables of the ranks",
}
ALLOWED_PREFIXES = (
    "CUBLAS_", "CUDNN_", "GLOO_", "HSA_", "MIOPEN_", "NCCL_", "OMP_", "RCCL_", "TORCHINDUCTOR_", "TORCH_NCCL_",
)  # fmt: skip
ALLOWED = (
    "CUDA_DEVICE_MAX_CONNECTIONS", "GPU_MAX_HW_QUEUES", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
)  # fmt: skip
# Variables in old guides that RCCL does not read -> variables that replace them.
_REPLACED = {
    "RCCL_BUFFER_SIZE": "NCCL_BUFFSIZE",
    "RCCL_ENABLE_SDMA": "HSA_ENABLE_SDMA",
    "RCCL_NUM_CHANNELS": "NCCL_MIN_NCHANNELS and NCCL_MAX_NCHANNELS",
}
# Variables that the launcher sets: they switch on the flight recorder and name its files.
_LAUNCHERS_OWN = ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT")

# One code path of ATen, MKL and oneDNN on every x86-64 CPU with AVX2. By default these libraries choose kernels by CPU
# model, and results depend on the choice. COMPATIBLE is MKL's only mode that is the same on CPUs of several vendors.
CPU_KERNELS = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "AVX2"}


def pinned_cpu_kernels(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Return the variables that pin the kernels of CPU ranks; none on a CPU without AVX2, where ATen would crash."""
    return dict(CPU_KERNELS) if "avx2" in cpu_field("flags", cpuinfo).split() else {}


def cpu_field(name: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the field ``name``, such as ``vendor_id``, of this host's first CPU in ``cpuinfo``; "" if unknown."""
    with suppress(OSError), cpuinfo.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return ""


def is_allowed(name: str) -> bool:
    """Return whether a config may set the variable; the launcher's own variables are not allowed."""
    return name not in _LAUNCHERS_OWN and (name in ALLOWED or name.startswith(ALLOWED_PREFIXES))


def check_environment(where: str, environment: object) -> None:
    """Check the value of the config key ``environment``; ``where`` starts the message.

    Raises:
        SpecError: A variable is not allowed in a config, or its value is not text.
    """
    if not isinstance(environment, Mapping):
        raise SpecError(
            f"{where}: {ENVIRONMENT_KEY}: got {brief(ascii(environment))}, allowed is a mapping from names to texts"
        )
    if wrong := sorted(str(name) for name in environment if not isinstance(name, str) or not is_allowed(name)):
        patterns = sorted([*(f"{prefix}*" for prefix in ALLOWED_PREFIXES), *ALLOWED])
        raise SpecError(
            f"{where}: {ENVIRONMENT_KEY}: got {wrong}, allowed is {patterns} without {list(_LAUNCHERS_OWN)}, which "
            f"the launcher sets"
        )
    if unread := sorted(_REPLACED.keys() & environment.keys()):
        replaced = ", ".join(f"{_REPLACED[name]} for {name}" for name in unread)
        raise SpecError(f"{where}: {ENVIRONMENT_KEY}: got {unread}, which RCCL does not read; set {replaced}")
    for name, value in environment.items():
        if not isinstance(value, str) or not is_passable(value):
            raise SpecError(
                f"{where}: {ENVIRONMENT_KEY}.{name}: got {brief(ascii(value))}, allowed is text without NUL "
                f"characters and lone surrogates"
            )


def case_suffix(environment: Mapping[str, str]) -> str:
    """Return the suffix of a case's name; empty if the config sets no variables."""
    pairs = ",".join(f"{name}={value}" for name, value in sorted(environment.items()))
    return f"[{pairs}]" if pairs else ""
