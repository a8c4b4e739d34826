"""Times of the steps on a rank, with the number of entered steps and memory in use; the measured loop of a workload."""

import functools
import gc
import math
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import FileIO

import torch
import torch.distributed as dist

from pytest_aorta.common.clock import time
from pytest_aorta.result.folder import PROGRESS_FILE
from pytest_aorta.result.measurements import RankResult
from pytest_aorta.worker.accelerator import (
    Moment,
    elapsed_ms,
    memory_in_use,
    now,
    on_accelerator,
    resident_memory,
    synchronize,
)
from pytest_aorta.worker.collectives import leave_arrivals, recorded_collectives, waits_of_steps_ms
from pytest_aorta.worker.costs import begin_measured_steps
from pytest_aorta.worker.own_plan import own_folder
from pytest_aorta.worker.simulation import reset_peak_memory

# Steps between readings of memory at first: a query of CUDA's allocator or of malloc takes the host tens of
# microseconds. When there are as many readings as are kept, every other one is dropped, and memory is read half as
# often: seven readings show growth.
MEMORY_EVERY_STEPS, MEMORY_EVERY_CPU_STEPS, MOST_READINGS = 10, 3, 14
# Seconds from the first reading of waits for a CPU to the second one, which takes a fraction of a millisecond.
_WAITS_EVERY_S = 0.2


class Progress:
    """The number of entered steps, in eight bytes of a shared file mapping.

    Other processes can read the file, even after the rank has died or while it hangs. Each step costs one store and no
    system call.
    """

    def __init__(self) -> None:
        """Map the file that the launch names; without a launch, map anonymous memory that nobody reads."""
        self._count = 0
        mapped = mmap.mmap(-1, 8)
        if (folder := own_folder()) is not None:
            with (folder / PROGRESS_FILE).open("wb+") as file:
                file.write(bytes(8))
                file.flush()
                mapped = mmap.mmap(file.fileno(), 8)
        self._number = memoryview(mapped).cast("Q")

    def advance(self) -> None:
        """Count one more entered step."""
        self.enter(self._count + 1)

    def enter(self, step: int) -> None:
        """Set the number of the entered step, counted from 1."""
        self._count = step
        self._number[0] = step


class _Collections:
    """The time for which this process has collected garbage."""

    def __init__(self) -> None:
        self.total_ns = self._began_ns = 0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _: object) -> None:
        if phase == "start":
            self._began_ns = time.perf_counter_ns()
        else:
            self.total_ns += time.perf_counter_ns() - self._began_ns


collections = functools.cache(_Collections)


@dataclass(slots=True)
class _OpenStep:
    """A step that has begun, with the stretches that do not count."""

    collected_ns: int
    memory_bytes: tuple[int, int] | None
    began_ns: int
    begin: Moment
    pauses: list[tuple[Moment, Moment]] = field(default_factory=list)


class StepTimer:
    """A timer of steps on one device.

    On an accelerator two events on the current stream bracket each step, so the loop never waits for the device;
    :meth:`step_times_ms` waits for them. Work on other streams counts as far as the current stream waits for it. On
    ``cpu`` the host's monotonic clock times each step.
    """

    def __init__(self, device: torch.device, *, has_progress: bool = True) -> None:
        self.device = device
        self._progress = Progress() if has_progress else None
        self._open: _OpenStep | None = None
        self._moments: list[tuple[Moment, Moment, list[tuple[Moment, Moment]]]] = []
        self._times_ms: list[float] = []
        self._began_ns: list[int] = []
        self._ended_ns: list[int] = []
        # In use and resident.
        self._memory_bytes: list[tuple[int, int]] = []
        self._collections, self._collected_ns = collections(), 0
        # When waits for a CPU were read, and how long they were until then.
        self._waits: list[tuple[float, float | None]] = []
        on_device = on_accelerator(device)
        self._waits_due_s = math.inf if on_device else -math.inf
        self._memory_every = MEMORY_EVERY_STEPS if on_device else MEMORY_EVERY_CPU_STEPS
        self._now: Callable[[], Moment] = functools.partial(now, device) if on_device else time.perf_counter_ns

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time the body as one step; a body that raises adds no time."""
        self.open()
        yield
        self.close()

    def open(self) -> None:
        """Begin a step."""
        if self._progress is not None:
            self._progress.advance()
        if not (count := len(self._began_ns)):
            begin_measured_steps()
        if (now_s := time.perf_counter()) >= self._waits_due_s:
            self._read_waits(now_s)
        is_due = count % self._memory_every == 0
        memory_bytes = (memory_in_use(self.device), resident_memory()) if is_due else None
        self._open = _OpenStep(self._collections.total_ns, memory_bytes, time.time_ns(), self._now())

    def _read_waits(self, now_s: float) -> None:
        """Read waits for a CPU, and again when the time since the first reading has doubled."""
        self._waits.append((now_s, _waited_s()))
        self._waits_due_s = now_s + max(_WAITS_EVERY_S, now_s - self._waits[0][0])

    def close(self) -> bool:
        """End the step that has begun, and return whether there was one."""
        if (step := self._open) is None:
            return False
        self._moments.append((step.begin, self._now(), step.pauses))
        self._ended_ns.append(time.time_ns())
        self._began_ns.append(step.began_ns)
        self._collected_ns += self._collections.total_ns - step.collected_ns
        if step.memory_bytes is not None:
            self._memory_bytes.append(step.memory_bytes)
            if len(self._memory_bytes) == MOST_READINGS:
                del self._memory_bytes[1::2]
                self._memory_every *= 2
        self._open = None
        return True

    def result(self, elapsed_sec: float) -> RankResult:
        """Return what is known of all steps, which took ``elapsed_sec``; checks and metrics are the caller's to add.

        Call this before further collectives, which push entries out of NCCL's record of the steps.
        """
        return RankResult.of_steps(self.step_times_ms(), elapsed_sec).replace(
            collective_ms=self.collective_ms(),
            memory_bytes=self.memory_bytes(),
            resident_bytes=self.resident_bytes(),
            cpu_wait=self.cpu_wait(),
            gc_ms=self.gc_ms(),
        )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the body out of the time of the step that has begun, if there is one."""
        step, begin = self._open, self._now()
        yield
        if step is not None:
            step.pauses.append((begin, self._now()))

    @property
    def num_steps(self) -> int:
        """The number of steps that have ended."""
        return len(self._ended_ns)

    @property
    def spans_ns(self) -> list[tuple[int, int]]:
        """When the host entered and left each step, on the clock of ``time.time_ns``."""
        return list(zip(self._began_ns, self._ended_ns, strict=True))

    def step_times_ms(self) -> list[float]:
        """Return every step's duration in order, in milliseconds, and wait for the device."""
        self._times_ms += [
            elapsed_ms(begin, end) - sum(elapsed_ms(*pause) for pause in pauses) for begin, end, pauses in self._moments
        ]
        self._moments.clear()
        return list(self._times_ms)

    def collective_ms(self) -> list[float]:
        """Return the milliseconds that each of the last steps spent in collectives.

        The list covers all steps, or as many of the last steps as NCCL has recorded. The list is empty on CPU, where a
        wait depends on the other ranks: this rank writes its arrivals at collectives into a file, and the waits are
        computed later from the files of all ranks. Call this after :meth:`step_times_ms` and before leaving the process
        group.
        """
        if not on_accelerator(self.device):
            leave_arrivals(self._began_ns, self._ended_ns)
            return []
        return waits_of_steps_ms(recorded_collectives(), self._began_ns, self._ended_ns)

    def cpu_wait(self) -> float | None:
        """Return the part of the steps' time for which threads waited for a CPU, their sum; None if it is not known."""
        if len(self._waits) == 1 and self.num_steps > 1:
            self._read_waits(time.perf_counter())
        if len(self._waits) < 2:
            return None
        (began_s, before_s), (ended_s, after_s) = self._waits[0], self._waits[-1]
        if before_s is None or after_s is None:
            return None
        # The waits of a process that has ended are gone.
        return max(0.0, after_s - before_s) / (ended_s - began_s)

    def gc_ms(self) -> float:
        """Return the milliseconds of a step in which this process collected garbage, a mean over steps."""
        return self._collected_ns / 1e6 / max(self.num_steps, 1)

    def memory_bytes(self) -> list[int]:
        """Return the bytes in use before evenly spaced steps: those that the device's allocator or malloc gave out."""
        return [in_use for in_use, _ in self._memory_bytes]

    def resident_bytes(self) -> list[int]:
        """Return the bytes of this process in the host's memory before the same steps."""
        return [resident for _, resident in self._memory_bytes]


def _waited_s() -> float | None:
    """Return how long threads of this process and of its children have waited for a CPU; None if Linux does not tell.

    The second number in ``schedstat`` has these nanoseconds (Documentation/scheduler/sched-stats.rst).
    """
    children = b" ".join(_texts("self", "children")).decode("ascii").split()
    waits_ns = [int(text.split()[1]) for process in ("self", *children) for text in _texts(process, "schedstat")]
    return sum(waits_ns) / 1e9 if waits_ns else None


def _texts(process: str, name: str) -> Iterator[bytes]:
    """Yield what a file of the kernel tells of each thread of a process."""
    # A process may end in between, and a thread of it. Paths and buffers would take three times as long.
    with suppress(OSError), os.scandir(f"/proc/{process}/task") as threads:
        for thread in threads:
            with suppress(OSError), FileIO(f"{thread.path}/{name}") as file:
                yield file.read()


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
    # A step of the loop may be several of the timer.
    timer, progress = StepTimer(device, has_progress=False), Progress()
    # Ranks enter together and with empty streams, since the first step would otherwise include earlier work.
    synchronize(device)
    dist.barrier()
    if on_accelerator(device):
        torch.accelerator.reset_peak_memory_stats(device)
    reset_peak_memory()
    began_s = time.perf_counter()
    for number in range(num_steps):
        progress.enter(number + 1)
        run_step(number, timer)
    synchronize(device)
    return timer, time.perf_counter() - began_s
