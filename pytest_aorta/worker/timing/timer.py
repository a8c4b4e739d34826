"""How far this rank came, kept where it can be read when the rank can't be asked any more."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from pytest_aorta.common import variables
from pytest_aorta.worker.timing.waits import recorded_collectives, waits_of_steps_ms


class Progress:
    """Counts in eight bytes of a shared mapping: one store a step, and no system call."""

    def __init__(self, path: Path | None) -> None:
        """Without a path, counts for nobody."""
        self._count = 0
        self._bytes = mmap.mmap(-1, 8)
        if path is not None:
            with path.open("wb+") as file:
                file.write(bytes(8))
                file.flush()
                self._bytes = mmap.mmap(file.fileno(), 8)

    @classmethod
    def of_this_rank(cls) -> Progress:
        """In the file that the launch has named, if it has."""
        name = os.environ.get(variables.PROGRESS_FILE)
        return cls(Path(name) if name else None)

    def advance(self) -> None:
        """One more step is entered."""
        self._count += 1
        self._bytes[:8] = self._count.to_bytes(8, "little")


# Asking CUDA's allocator takes tens of microseconds of the host.
MEMORY_EVERY_STEPS = 10


class StepTimer:
    """Times steps on one device.

    On ``cuda`` each step is bracketed by two events on the current stream, so the loop never waits for the
    device; :meth:`step_times_ms` synchronises once. A step's work on other streams counts from when the current
    stream waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_device = device.type == "cuda"
        self._progress = Progress.of_this_rank()
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._times_ms: list[float] = []
        self._began_ns: list[int] = []
        self._ended_ns = 0
        self._cpu_waits_ms: list[float] = []
        self._memory_bytes: list[int] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time the body as one step; a body that raises is not counted."""
        self._progress.advance()
        if len(self._began_ns) % MEMORY_EVERY_STEPS == 0:
            self._memory_bytes.append(self._memory_in_use())
        began_ns = time.time_ns()
        if self._on_device:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((begin, end))
        else:
            clock_ns, thread_ns = time.perf_counter_ns(), time.thread_time_ns()
            yield
            busy_ns = time.thread_time_ns() - thread_ns
            passed_ns = time.perf_counter_ns() - clock_ns
            self._times_ms.append(passed_ns / 1e6)
            # The two clocks tick apart.
            self._cpu_waits_ms.append(max(0, passed_ns - busy_ns) / 1e6)
        self._ended_ns = time.time_ns()
        self._began_ns.append(began_ns)

    def step_times_ms(self) -> list[float]:
        """Every step's duration in order, in milliseconds. Waits for the device."""
        if self._events:
            self._events[-1][1].synchronize()
            self._times_ms += [begin.elapsed_time(end) for begin, end in self._events]
            self._events.clear()
        return list(self._times_ms)

    def wait_ms(self) -> list[float]:
        """Time in collectives of each of the last steps, in milliseconds: of all steps, or as many as are known.

        Call it after :meth:`step_times_ms`, and before the process group is left.
        """
        if not self._on_device:
            return list(self._cpu_waits_ms)
        return waits_of_steps_ms(recorded_collectives(), self._began_ns, self._ended_ns)

    def memory_bytes(self) -> list[int]:
        """Memory in use before every tenth step: what is allocated on the device, or resident on CPU."""
        return list(self._memory_bytes)

    def _memory_in_use(self) -> int:
        if self._on_device:
            return torch.cuda.memory_allocated(self._device)
        resident_pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        return int(resident_pages) * os.sysconf("SC_PAGE_SIZE")
