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
from pytest_aorta.worker.accelerator import Moment, elapsed_ms, memory_in_use, now, on_accelerator
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

    On an accelerator two events on the current stream bracket each step, so the loop never waits for the device;
    :meth:`step_times_ms` waits for them. Work on other streams counts as far as the current stream waits for it. On
    ``cpu`` the host's monotonic clock times each step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._progress = Progress.of_this_rank()
        self._moments: list[tuple[Moment, Moment]] = []
        self._times_ms: list[float] = []
        self._began_ns: list[int] = []
        self._ended_ns: list[int] = []
        self._memory_bytes: list[int] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time the body as one step; a body that raises adds no time."""
        self._progress.advance()
        memory_bytes = [memory_in_use(self._device)] if len(self._began_ns) % MEMORY_EVERY_STEPS == 0 else []
        began_ns = time.time_ns()
        begin = now(self._device)
        yield
        self._moments.append((begin, now(self._device)))
        self._ended_ns.append(time.time_ns())
        self._began_ns.append(began_ns)
        self._memory_bytes += memory_bytes

    def step_times_ms(self) -> list[float]:
        """Return every step's duration in order, in milliseconds, and wait for the device."""
        self._times_ms += [elapsed_ms(*moments) for moments in self._moments]
        self._moments.clear()
        return list(self._times_ms)

    def wait_ms(self) -> list[float]:
        """Return the milliseconds that each of the last steps spent in collectives.

        The list covers all steps, or as many of the last steps as NCCL has recorded. The list is empty on CPU, where a
        wait depends on the other ranks: this rank writes its arrivals at collectives into a file, and the waits are
        computed later from the files of all ranks. Call this after :meth:`step_times_ms` and before leaving the process
        group.
        """
        if not on_accelerator(self._device):
            leave_arrivals(self._began_ns, self._ended_ns)
            return []
        return waits_of_steps_ms(recorded_collectives(), self._began_ns, self._ended_ns)

    def memory_bytes(self) -> list[int]:
        """Return the memory in use before every tenth step, in bytes: allocated on the device, or resident on CPU."""
        return list(self._memory_bytes)
