"""The measured loop, which all workloads share."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from pytest_aorta.worker.timing.timer import StepTimer


def measure(
    run_step: Callable[[int, StepTimer], None], num_steps: int, device: torch.device
) -> tuple[StepTimer, float]:
    """Run steps 0 to ``num_steps`` - 1; return their timer and the wall time of all steps in seconds; collective.

    ``run_step`` takes the step's number and the timer, and puts ``timer.step()`` around the part to be timed. Peak
    memory counts from the first step on.
    """
    timer = StepTimer(device)
    # Ranks enter together and with empty streams, since the first step would otherwise include earlier work.
    _synchronize(device)
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    began_s = time.perf_counter()
    for number in range(num_steps):
        run_step(number, timer)
    _synchronize(device)
    return timer, time.perf_counter() - began_s


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
