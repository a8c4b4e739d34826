"""Watches a launch: when its ranks are ready, how far they are, and readings of the devices."""

from __future__ import annotations

import math
import select
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_aorta.plan.accelerators import SensorsUnavailable, open_sensors, source_of
from pytest_aorta.plan.launch_plan import LaunchPlan
from pytest_aorta.result.folder import PID_FILE, RESULT_FILE, rank_folders, steps_entered
from pytest_aorta.result.sensors import PlatformFacts, Sample, summarize

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

# Reading a GPU's sensors takes about a millisecond; two readings per second don't slow the ranks down.
TICK_S = 0.5
SAY_S = 10.0
# A driver that hangs must not block the test.
JOIN_S = 10.0


@dataclass(frozen=True)
class LaunchState:
    """Progress of a launch.

    Attributes:
        text: The launch's name, its ranks and steps, and elapsed seconds.
        in_steps: Whether every rank is in its measured steps.
        elapsed_s: Seconds since the launch began.
    """

    text: str
    in_steps: bool
    elapsed_s: float


def _speak(text: str) -> None:
    print(f"aorta: {text}", file=sys.stderr, flush=True)


class SpokenState:
    """Lines that say every few seconds what a launch waits for, by default on standard error."""

    def __init__(self, say: Callable[[str], None] = _speak, every_s: float = SAY_S) -> None:
        self._say, self._every_s = say, every_s
        self._next_s = every_s

    def show(self, state: LaunchState) -> None:
        """Print a line if it is time."""
        if state.elapsed_s >= self._next_s:
            self._next_s = state.elapsed_s + self._every_s
            self._say(state.text)

    def clear(self) -> None:
        """Begin the next launch."""
        self._next_s = self._every_s


class LaunchWatch:
    """A thread that watches the launch of a plan while the ``with`` block runs.

    If there are neither devices to read nor a line to show, no thread is started.
    """

    def __init__(self, plan: LaunchPlan, line: SpokenState | None) -> None:
        self._plan = plan
        self._line = line
        self._devices = plan.world.devices
        self._over = threading.Event()
        self._began_s = time.monotonic()
        self._facts: PlatformFacts | None = None
        self._thread = threading.Thread(target=self._run, name="aorta-watch", daemon=True)

    def __enter__(self) -> LaunchWatch:
        """Start the thread."""
        if self._devices or self._line is not None:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the thread after one last reading."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(JOIN_S)

    @property
    def platform_facts(self) -> PlatformFacts | None:
        """Summary of the devices' sensors after the launch; None on CPU ranks."""
        if not self._devices:
            return None
        return self._facts or PlatformFacts(source_of(self._devices), f"no answer within {JOIN_S:g} s")

    def _run(self) -> None:
        try:
            if self._devices:
                self._facts = self._read_devices()
            while not self._over.wait(TICK_S):
                self._show()
        finally:
            if self._line is not None:
                self._line.clear()

    def _read_devices(self) -> PlatformFacts:
        """Sample until the launch is over, or the driver fails."""
        source, samples = source_of(self._devices), list[Sample]()
        try:
            sensors = open_sensors(self._devices)
        except SensorsUnavailable as error:
            return PlatformFacts(source, str(error))
        problem, is_last = None, False
        try:
            while not is_last:
                # Take one more sample after the end.
                is_last = self._over.wait(TICK_S if samples else 0)
                samples.append(Sample(sensors.read(), self._show().in_steps))
        except SensorsUnavailable as error:
            problem = str(error)
        finally:
            with suppress(SensorsUnavailable):
                sensors.close()
        names = [device.token for device in self._devices]
        return PlatformFacts(source, problem, summarize(names, sensors.max_sm_clocks_mhz, samples), sensors.about)

    def _show(self) -> LaunchState:
        state = _launch_state(self._plan, time.monotonic() - self._began_s)
        if self._line is not None:
            self._line.show(state)
        return state


def _launch_state(plan: LaunchPlan, elapsed_s: float) -> LaunchState:
    """Return the progress that the ranks' files show."""
    folders = rank_folders(plan.run_dir, plan.world.ranks)
    started, done = (sum((folder / name).exists() for folder in folders) for name in (PID_FILE, RESULT_FILE))
    steps, total = min(map(steps_entered, folders)), _total_steps(plan)
    if started < len(folders):
        what = f"{started} of {len(folders)} ranks started"
    elif done:
        what = f"{len(folders)} ranks, {done} done"
    elif steps:
        what = f"{len(folders)} ranks, step {steps}" + (f" of {total}" if total else "")
    else:
        what = f"{len(folders)} ranks, before the first measured step"
    return LaunchState(f"{plan.title}: {what}, {elapsed_s:.0f} s", steps > 0 and not done, elapsed_s)


def _total_steps(plan: LaunchPlan) -> int | None:
    default = plan.spec.properties.get("steps", {}).get("default") if plan.spec else None
    steps = plan.config.get("steps", default)
    return steps if isinstance(steps, int) else None


def is_readable(source: FileDescriptorLike, limit_s: float | None) -> bool:
    """Wait until a source can be read without blocking; return whether it can be read after ``limit_s`` seconds.

    Args:
        source: Open file or file descriptor.
        limit_s: Limit of the wait in seconds; None waits without a limit.
    """
    events = select.poll()
    events.register(source, select.POLLIN)
    return bool(events.poll(None if limit_s is None else math.ceil(max(limit_s, 0.0) * 1000)))
