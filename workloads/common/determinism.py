"""Deterministic algorithms, with what they need of the environment."""

from __future__ import annotations

import os

import torch

# The only settings under which cuBLAS is deterministic: docs.nvidia.com/cuda/cublas, "Results reproducibility".
_CUBLAS = (":4096:8", ":16:8")


def use_deterministic_algorithms(device: torch.device) -> None:
    """Have torch use deterministic algorithms only, or fail.

    Raises:
        RuntimeError: on CUDA, cuBLAS is configured otherwise.
    """
    # Read when the first cuBLAS handle is made, which is after setup().
    given = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _CUBLAS[0])
    if device.type == "cuda" and torch.version.cuda and given not in _CUBLAS:
        raise RuntimeError(
            f"deterministic is true and CUBLAS_WORKSPACE_CONFIG is {given!r}: cuBLAS is deterministic only with "
            f"one of {_CUBLAS}; unset it or set one of them"
        )
    torch.use_deterministic_algorithms(True)
