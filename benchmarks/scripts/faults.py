"""A change that breaks a training script: ``plant`` runs before the script, which stays as it is.

The script's number of optimizer steps tells which step is the last one. Faults of one rank are those of rank 1.
"""

from __future__ import annotations

import atexit
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

IN_STEP = 10
_SCALE = 1 + 1e-6


def plant(fault: str, steps: int) -> None:
    """Plant ``fault`` into the steps of the first optimizer that steps, of ``steps`` in all."""
    optimizers: dict[int, int] = {}
    began_s = time.perf_counter()

    def before_step(optimizer: torch.optim.Optimizer, _args: object, _keywords: object) -> None:
        nonlocal began_s
        number = optimizers[id(optimizer)] = optimizers.get(id(optimizer), 0) + 1
        is_first = id(optimizer) == next(iter(optimizers))
        rank = dist.get_rank() if dist.is_initialized() else 0
        took_s, began_s = time.perf_counter() - began_s, time.perf_counter()
        match fault:
            case "slow" if rank == 1 and is_first:
                time.sleep(0.2 * min(took_s, 1.0))
            case "scaled" if is_first:
                _scale(optimizer, _SCALE)
            case "last step" if is_first and number == steps:
                _scale(optimizer, 0.0)
            case "second" if not is_first:
                _scale(optimizer, _SCALE)
            case "all-gather" if is_first:
                parts = [torch.zeros(4) for _ in range(dist.get_world_size())]
                dist.all_gather(parts, torch.ones(4))
            case "raise" | "hang" | "killed" if is_first and rank == 1 and number == IN_STEP:
                _end(fault)

    register_optimizer_step_pre_hook(before_step)
    if fault == "exit code":
        atexit.register(_exit)
    if fault in ("lost", "NaN"):
        _change_backward(optimizers, 0.0 if fault == "lost" else float("nan"))


def _scale(optimizer: torch.optim.Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def _end(fault: str) -> None:
    if fault == "raise":
        raise RuntimeError("planted by a test")
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3600)


def _exit() -> None:
    if os.environ.get("RANK") == "1":
        os._exit(3)


def _change_backward(optimizers: dict[int, int], factor: float) -> None:
    """Multiply the gradients that rank 1 adds in one step by ``factor``, before they are reduced."""
    backward = torch.autograd.backward

    def changed(tensors: Any, grad_tensors: Any = None, *args: Any, **keywords: Any) -> None:
        is_step = next(iter(optimizers.values()), 0) == IN_STEP - 1
        if is_step and dist.is_initialized() and dist.get_rank() == 1:
            roots = [tensors] if isinstance(tensors, torch.Tensor) else tensors
            grad_tensors = [torch.full_like(root, factor) for root in roots]
        backward(tensors, grad_tensors, *args, **keywords)

    torch.autograd.backward = changed
