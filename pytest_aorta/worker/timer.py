"""Step times without disturbing the steps: device events on CUDA and HIP, the monotonic clock on CPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pytest_aorta.worker.progress import Progress


class StepTimer:
    """Times steps on one device.

    On ``cuda`` each step is bracketed by two events on the current stream, so the loop never waits for the
    device; :meth:`step_times_ms` synchronises once. A step's work on other streams counts from when the current
    stream waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._progress = Progress.of_this_rank()
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._times_ms: list[float] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time the body as one step; a body that raises is not counted."""
        self._progress.advance()
        if self._on_device:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((begin, end))
        else:
            began_ns = time.perf_counter_ns()
            yield
            self._times_ms.append((time.perf_counter_ns() - began_ns) / 1e6)

    def step_times_ms(self) -> list[float]:
        """Every step's duration in order, in milliseconds. Waits for the device."""
        if self._events:
            self._events[-1][1].synchronize()
            self._times_ms += [begin.elapsed_time(end) for begin, end in self._events]
            self._events.clear()
        return list(self._times_ms)
