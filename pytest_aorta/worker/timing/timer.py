"""The timer of steps on one device, and the count of entered steps that survives the rank."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from pytest_aorta.common import variables
from pytest_aorta.worker.timing.waits import leave_arrivals, recorded_collectives, waits_of_steps_ms

# A query of CUDA's allocator takes the host tens of microseconds, so memory is not read in every step.
MEMORY_EVERY_STEPS = 10


class Progress:
    """The number of entered steps, in eight bytes of a shared file mapping.

    Other processes can read the file, even after the rank has died or while it hangs. Each step costs one store and no
    system call.
    """

    def __init__(self, path: Path | None) -> None:
        """Map the file at ``path``; without a path, map anonymous memory that nobody reads."""
        self._count = 0
        self._bytes = mmap.mmap(-1, 8)
        if path is not None:
            with path.open("wb+") as file:
                file.write(bytes(8))
                file.flush()
                self._bytes = mmap.mmap(file.fileno(), 8)

    @classmethod
    def of_this_rank(cls) -> Progress:
        """Return a count in the file that the launch names, or in memory if the launch names none."""
        name = os.environ.get(variables.PROGRESS_FILE)
        return cls(Path(name) if name else None)

    def advance(self, steps: int = 1) -> None:
        """Count more entered steps."""
        self._count += steps
        self._bytes[:8] = self._count.to_bytes(8, "little")


class StepTimer:
    """A timer of steps on one device.

    On ``cuda`` two events on the current stream bracket each step, so the loop never waits for the device;
    :meth:`step_times_ms` synchronizes once. Work on other streams counts as far as the current stream waits for it. On
    ``cpu`` the host's monotonic clock times each step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_device = device.type == "cuda"
        self._progress = Progress.of_this_rank()
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._times_ms: list[float] = []
        self._began_ns: list[int] = []
        self._ended_ns: list[int] = []
        self._memory_bytes: list[int] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time the body as one step; a body that raises adds no time."""
        self._progress.advance()
        memory_bytes = [self._memory_in_use()] if len(self._began_ns) % MEMORY_EVERY_STEPS == 0 else []
        began_ns = time.time_ns()
        if self._on_device:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((begin, end))
        else:
            clock_ns = time.perf_counter_ns()
            yield
            self._times_ms.append((time.perf_counter_ns() - clock_ns) / 1e6)
        self._ended_ns.append(time.time_ns())
        self._began_ns.append(began_ns)
        self._memory_bytes += memory_bytes

    def step_times_ms(self) -> list[float]:
        """Return every step's duration in order, in milliseconds, and wait for the device."""
        if self._events:
            self._events[-1][1].synchronize()
            self._times_ms += [begin.elapsed_time(end) for begin, end in self._events]
            self._events.clear()
        return list(self._times_ms)

    def wait_ms(self) -> list[float]:
        """Return the milliseconds that each of the last steps spent in collectives.

        The list covers all steps, or as many of the last steps as NCCL has recorded. The list is empty on CPU, where a
        wait depends on the other ranks: this rank writes its arrivals at collectives into a file, and the waits are
        computed later from the files of all ranks. Call this after :meth:`step_times_ms` and before leaving the process
        group.
        """
        if not self._on_device:
            leave_arrivals(self._began_ns, self._ended_ns)
            return []
        return waits_of_steps_ms(recorded_collectives(), self._began_ns, self._ended_ns)

    def memory_bytes(self) -> list[int]:
        """Return the memory in use before every tenth step, in bytes: allocated on the device, or resident on CPU."""
        return list(self._memory_bytes)

    def _memory_in_use(self) -> int:
        if self._on_device:
            return torch.cuda.memory_allocated(self._device)
        resident_pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        return int(resident_pages) * os.sysconf("SC_PAGE_SIZE")
