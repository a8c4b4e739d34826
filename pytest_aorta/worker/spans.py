"""Overlap without a profiler, for workloads that own their streams: events around the work of each stream.

An event fires when its stream reaches the event, so a span is the time that its work takes on the device, without
waits for other streams before the span. Spans do not show gaps within a span, or kernels without a span. On CPU a span
ends when the wait for its collective ends, so communication appears too long, never too short. The profiler
(``capture_overlap``) has none of these limits.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist

from pytest_aorta.result.trace.overlap import Intervals, Lane, difference, overlap_of, union
from pytest_aorta.result.trace.profiled_steps import Profile
from pytest_aorta.worker.accelerator import Moment, elapsed_ms, now, on_accelerator, synchronize

_NS_PER_MS = 1e6
# Not a lane of a capture: this time is subtracted from compute.
_WAITING = "waiting"
# The context of every span that is not recorded.
_NOTHING = nullcontext()


class Handle(Protocol):
    """An asynchronous operation, such as ``torch.distributed.Work``."""

    def wait(self) -> object:
        """Wait until the operation is done, or order the current stream behind it."""


# Runs a transfer; with True as its argument, returns the handle of an asynchronous collective.
Transfer: TypeAlias = Callable[[bool], "Handle | None"]


class StreamSpans:
    """Named spans of every ``every``-th step: ``compute``, ``copy`` or a collective.

    Recording never makes the loop wait for the device, and a span in any other step costs one comparison. Spans of one
    name may run on several streams.
    """

    def __init__(self, device: torch.device, every: int) -> None:
        """Record every ``every``-th step; 0 records none."""
        self._device, self._on_device, self._every = device, on_accelerator(device), every
        self._is_recording = False
        self._steps: dict[int, tuple[Moment, Moment]] = {}
        self._spans: dict[int, list[tuple[str, Moment, Moment]]] = defaultdict(list)
        self._number = 0
        self._resume: Callable[[], None] = _do_nothing

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Run the body as step ``number``, and record its spans if ``every`` divides ``number``."""
        if not self._every or number % self._every:
            yield
            return
        self._number, self._is_recording = number, True
        begin = now(self._device)
        try:
            yield
        finally:
            self.resume()
            self._is_recording = False
        self._steps[number] = begin, now(self._device)

    def span(self, name: str) -> AbstractContextManager[None]:
        """Return a context whose span covers the body's work on the current stream, or on CPU the body itself."""
        return self._recorded(name) if self._is_recording else _NOTHING

    @contextmanager
    def _recorded(self, name: str) -> Iterator[None]:
        end = self.begin(name)
        yield
        end()

    def begin(self, name: str) -> Callable[[], None]:
        """Begin a span and return a callable that ends the span, on the caller's stream or thread."""
        if not self._is_recording:
            return _do_nothing
        begin, spans = now(self._device), self._spans[self._number]
        return lambda: spans.append((name, begin, now(self._device)))

    def around(self, name: str, transfer: Transfer) -> Transfer:
        """Return ``transfer`` with a span around it; on CPU the span of an asynchronous transfer ends with the wait."""

        def run(asynchronous: bool) -> Handle | None:
            if not self._is_recording:
                return transfer(asynchronous)
            end = self.begin(name)
            handle = transfer(asynchronous)
            if handle is not None and not self._on_device:
                return _Waited(handle, end)
            end()
            return handle

        return run

    def hold(self) -> None:
        """Exclude the time from here to :meth:`resume`, in which the current stream may wait, from spans of compute."""
        if self._is_recording and self._resume is _do_nothing:
            self._resume = self.begin(_WAITING)

    def resume(self) -> None:
        """End the exclusion of :meth:`hold`; without a preceding :meth:`hold`, nothing happens."""
        self._resume()
        self._resume = _do_nothing

    def captures(self) -> dict[int, Profile]:
        """Return step number -> the step's overlap and timeline, in milliseconds, and wait for the device."""
        synchronize(self._device)
        return {number: self._capture(number) for number in self._steps}

    def _capture(self, number: int) -> Profile:
        origin, end = self._steps[number]
        rows: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for name, *moments in self._spans[number]:
            begin_ns, end_ns = (round(elapsed_ms(origin, moment) * _NS_PER_MS) for moment in moments)
            rows[name].append((begin_ns, end_ns))
        lanes: dict[str, Intervals] = {name: union(spans) for name, spans in rows.items()}
        waiting = lanes.pop(_WAITING, union())
        if Lane.COMPUTE in lanes:
            lanes[Lane.COMPUTE] = difference(lanes[Lane.COMPUTE], waiting)
        return overlap_of(lanes, [(0, max(1, round(elapsed_ms(origin, end) * _NS_PER_MS)))])


class _Waited(dist.Work):
    """A ``Work`` in place of ``handle``, since FSDP2 waits only for objects of this class."""

    def __init__(self, handle: Handle, on_end: Callable[[], None]) -> None:
        super().__init__()
        self._handle, self._on_end = handle, on_end

    def wait(self, *_timeout: object) -> bool:
        """Wait; the first call ends the span."""
        self._handle.wait()
        on_end, self._on_end = self._on_end, _do_nothing
        on_end()
        return True


def _do_nothing() -> None:
    pass
