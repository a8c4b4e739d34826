"""A change that breaks a training script: ``plant`` runs before the script, which stays as it is.

Faults of one rank are those of rank 1.
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

_SCALE = 1 + 1e-6


def plant(fault: str, in_step: int, steps: int) -> None:
    """Plant ``fault`` into the steps of the first optimizer that steps, of ``steps`` in all; some only ``in_step``."""
    optimizers: dict[int, int] = {}
    began_s = time.perf_counter()

    def before_step(optimizer: torch.optim.Optimizer, args: Any, keywords: Any) -> Any:
        nonlocal began_s
        number = optimizers[id(optimizer)] = optimizers.get(id(optimizer), 0) + 1
        is_first = id(optimizer) == next(iter(optimizers))
        rank = dist.get_rank() if dist.is_initialized() else 0
        took_s, began_s = time.perf_counter() - began_s, time.perf_counter()
        match fault:
            case "slow" if rank == 1 and is_first:
                time.sleep(0.2 * min(took_s, 1.0))
            case "scaled" if is_first:
                return _scaled(optimizer, _SCALE, args, keywords)
            case "last step" if is_first and number == steps:
                return _scaled(optimizer, 0.0, args, keywords)
            case "second" if not is_first:
                return _scaled(optimizer, _SCALE, args, keywords)
            case "all-gather" if is_first:
                parts = [torch.zeros(4) for _ in range(dist.get_world_size())]
                dist.all_gather(parts, torch.ones(4))
            case "kernel" if is_first:
                optimizer.param_groups[0]["params"][0].detach().sin()
            case "raise" | "hang" | "killed" if is_first and rank == 1 and number == in_step:
                _end(fault)
        return None

    register_optimizer_step_pre_hook(before_step)
    if fault == "exit code":
        atexit.register(_exit)
    if fault in ("lost", "NaN"):
        _change_backward(optimizers, in_step, 0.0 if fault == "lost" else float("nan"))


def _scaled(optimizer: torch.optim.Optimizer, factor: float, args: Any, keywords: Any) -> Any:
    """Scale the gradients; if a closure computes them in the step, return arguments with one that scales them."""
    closure = keywords.get("closure") or next(iter(args[1:]), None)
    if closure is None:
        _scale(optimizer, factor)
        return None

    def changed() -> Any:
        result = closure()
        _scale(optimizer, factor)
        return result

    return args[:1], {"closure": changed}


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


def _change_backward(optimizers: dict[int, int], in_step: int, factor: float) -> None:
    """Multiply the gradients that rank 1 adds in one step by ``factor``, before they are reduced."""
    backward = torch.autograd.backward

    def changed(tensors: Any, grad_tensors: Any = None, *args: Any, **keywords: Any) -> None:
        is_step = next(iter(optimizers.values()), 0) == in_step - 1
        if is_step and dist.is_initialized() and dist.get_rank() == 1:
            roots = [tensors] if isinstance(tensors, torch.Tensor) else tensors
            grad_tensors = [torch.full_like(root, factor) for root in roots]
        backward(tensors, grad_tensors, *args, **keywords)

    torch.autograd.backward = changed
