"""Environment variables that are part of a config, since they change how fast ranks run or which kernels they pick."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_aorta.common.errors import SpecError

# The reserved config key of every workload: name -> value, in the ranks' environment before they start.
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
# Where a launch's evidence goes, and that it is written at all.
_LAUNCHERS_OWN = ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT")


def is_allowed(name: str) -> bool:
    """Whether a config may set the variable; what the launcher sets itself, it may not."""
    return name not in _LAUNCHERS_OWN and (name in ALLOWED or name.startswith(ALLOWED_PREFIXES))


def check_environment(where: str, environment: Mapping[str, Any]) -> None:
    """Check the value of ``environment`` in what ``where`` names.

    Raises:
        SpecError: a variable is not a config's, or its value is no text.
    """
    if wrong := sorted(name for name in environment if not is_allowed(name)):
        patterns = sorted([*(f"{prefix}*" for prefix in ALLOWED_PREFIXES), *ALLOWED])
        raise SpecError(
            f"{where}: {ENVIRONMENT_KEY}: got {wrong}, allowed is {patterns} without {list(_LAUNCHERS_OWN)}, which "
            f"the launcher sets"
        )
    for name, value in environment.items():
        if not isinstance(value, str) or "\0" in value:
            raise SpecError(f"{where}: {ENVIRONMENT_KEY}.{name}: got {value!r}, allowed is text")


def case_suffix(environment: Mapping[str, str]) -> str:
    """What the name of a case ends in: nothing for ranks with the caller's environment."""
    pairs = ",".join(f"{name}={value}" for name, value in sorted(environment.items()))
    return f"[{pairs}]" if pairs else ""
