"""The canary: a fixed GEMM and a fixed all-reduce beside the timed steps, to distinguish a slow host from slow code."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

_REPETITIONS = 9
# Sizes that take about a millisecond each: long enough to time, and short compared with a launch.
_GEMM_SIZE = {"cpu": 256, "cuda": 6144}
_REDUCED_ELEMENTS = {"cpu": 1 << 14, "cuda": 1 << 25}
_DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}


def run_canary() -> dict[str, float]:
    """Return the median milliseconds ``gemm_ms`` and ``all_reduce_ms`` on this rank's device; collective.

    The result is empty without a process group.
    """
    if not dist.is_initialized():
        return {}
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    size, dtype = _GEMM_SIZE[device.type], _DTYPE[device.type]
    # Constant operands, since drawing random numbers would change the workload's random numbers.
    operand = torch.full((size, size), 1 / size, dtype=dtype, device=device)
    product, reduced = torch.empty_like(operand), torch.ones(_REDUCED_ELEMENTS[device.type], device=device)
    times_ms: dict[str, list[float]] = {"gemm_ms": [], "all_reduce_ms": []}
    for _ in range(_REPETITIONS):
        times_ms["gemm_ms"].append(_timed_ms(device, lambda: torch.mm(operand, operand, out=product)))
        dist.barrier()
        times_ms["all_reduce_ms"].append(_timed_ms(device, lambda: dist.all_reduce(reduced, dist.ReduceOp.MAX)))
    # The first two repetitions warm up.
    return {name: median(values[2:]) for name, values in times_ms.items()}


def _timed_ms(device: torch.device, work: Callable[[], object]) -> float:
    _synchronize(device)
    began_ns = time.perf_counter_ns()
    work()
    _synchronize(device)
    return (time.perf_counter_ns() - began_ns) / 1e6


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
