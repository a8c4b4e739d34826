"""Deterministic algorithms, with the environment that cuBLAS needs for them."""

import os

import torch

# The only settings under which cuBLAS is deterministic: docs.nvidia.com/cuda/cublas, "Results reproducibility".
_CUBLAS = (":4096:8", ":16:8")


def use_deterministic_algorithms(device: torch.device, *, fill_uninitialized_memory: bool = False) -> None:
    """Have torch use only deterministic algorithms; from torch 2.11 on, this switches inductor's benchmarks off too.

    By default, torch also fills every new tensor. Filling costs time and does not make a program deterministic. It
    exposes reads of memory that was never written, so ``fill_uninitialized_memory`` is for runs that look for such a
    read.

    Raises:
        RuntimeError: ``CUBLAS_WORKSPACE_CONFIG`` has a value under which cuBLAS is not deterministic.
    """
    # cuBLAS reads the variable when its first handle is made, which is after setup().
    given = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _CUBLAS[0])
    if device.type == "cuda" and torch.version.cuda and given not in _CUBLAS:
        raise RuntimeError(
            f"deterministic is true and CUBLAS_WORKSPACE_CONFIG is {given!r}: cuBLAS is deterministic only with "
            f"one of {_CUBLAS}; unset the variable or set one of them"
        )
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = fill_uninitialized_memory  # type: ignore[attr-defined]
