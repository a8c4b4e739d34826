"""The measured loop, which all workloads share."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from pytest_aorta.worker.accelerator import on_accelerator, synchronize
from pytest_aorta.worker.timing.timer import StepTimer


def measure(
    run_step: Callable[[int, StepTimer], None], num_steps: int, device: torch.device
) -> tuple[StepTimer, float]:
    """Run the measured steps; return their timer and the wall time of all steps in seconds; collective.

    On an accelerator the peak of allocated memory is reset before the first step.

    Args:
        run_step: Runs one step, given its number and the timer, with ``timer.step()`` around the part to be timed.
        num_steps: Number of steps; their numbers begin at 0.
        device: Device that the steps run on.
    """
    timer = StepTimer(device)
    # Ranks enter together and with empty streams, since the first step would otherwise include earlier work.
    synchronize(device)
    dist.barrier()
    if on_accelerator(device):
        torch.accelerator.reset_peak_memory_stats(device)
    began_s = time.perf_counter()
    for number in range(num_steps):
        run_step(number, timer)
    synchronize(device)
    return timer, time.perf_counter() - began_s
