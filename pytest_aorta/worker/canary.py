"""The speed check of a rank: a fixed product and a fixed all-reduce, which tell a slow host from slow code."""

from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from pytest_aorta.common.clock import time
from pytest_aorta.worker.accelerator import group_device, on_accelerator, synchronize
from pytest_aorta.worker.simulation import is_simulated

_REPETITIONS = 9
# Sizes that take about a millisecond each: long enough to time, and short compared with a launch.
_GEMM_SIZE, _DEVICE_GEMM_SIZE = 256, 6144
_REDUCED_ELEMENTS, _DEVICE_REDUCED_ELEMENTS = 1 << 14, 1 << 25


def run_canary(device: torch.device) -> dict[str, float]:
    """Return the median milliseconds ``gemm_ms`` and ``all_reduce_ms`` on ``device``; collective.

    The result is empty without a process group, and in a simulated world, which exchanges nothing.
    """
    if not dist.is_initialized() or is_simulated():
        return {}
    reducing = group_device(device)
    size, dtype = (_DEVICE_GEMM_SIZE, torch.bfloat16) if on_accelerator(device) else (_GEMM_SIZE, torch.float32)
    elements = _DEVICE_REDUCED_ELEMENTS if on_accelerator(reducing) else _REDUCED_ELEMENTS
    # Constant operands, since drawing random numbers would change the workload's random numbers.
    operand = torch.full((size, size), 1 / size, dtype=dtype, device=device)
    product, reduced = torch.empty_like(operand), torch.ones(elements, device=reducing)
    times_ms: dict[str, list[float]] = {"gemm_ms": [], "all_reduce_ms": []}
    for _ in range(_REPETITIONS):
        times_ms["gemm_ms"].append(_timed_ms(device, lambda: torch.mm(operand, operand, out=product)))
        dist.barrier()
        times_ms["all_reduce_ms"].append(_timed_ms(reducing, lambda: dist.all_reduce(reduced, dist.ReduceOp.MAX)))
    # The first two repetitions warm up.
    return {name: median(values[2:]) for name, values in times_ms.items()}


def _timed_ms(device: torch.device, work: Callable[[], object]) -> float:
    synchronize(device)
    began_ns = time.perf_counter_ns()
    work()
    synchronize(device)
    return (time.perf_counter_ns() - began_ns) / 1e6
