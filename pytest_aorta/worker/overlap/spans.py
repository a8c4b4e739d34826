"""Overlap without a profiler, for workloads that own their streams: events around what each stream is given.

An event fires when its stream gets there, so that a span is what its work took on the device, without any wait for
other streams before it. What it can't know: gaps within a span, kernels that nobody put a span around, and on CPU when
a collective ended, of which only the end of the wait for it is seen: communication is then too long, not too short. The
profiler tells these (``capture_overlap``).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist

from pytest_aorta.result.trace.intervals import Intervals, difference, union
from pytest_aorta.result.trace.overlap import COMPUTE, OverlapCapture, overlap_of

_NS_PER_MS = 1e6
# No lane of a capture: it is taken from compute.
_WAITING = "waiting"
# What most spans are: one for all.
_NOTHING = nullcontext()


class Handle(Protocol):
    """What is waited for, such as ``torch.distributed.Work``."""

    def wait(self) -> object:
        """Until it is done, or keep the current stream behind it."""


# Given True, it returns the handle of an asynchronous collective.
Transfer: TypeAlias = Callable[[bool], "Handle | None"]
_Moment: TypeAlias = "torch.cuda.Event | int"


class StreamSpans:
    """Spans of every so many-th step, by name: ``compute``, ``copy`` or a collective.

    The loop never waits for the device; a step without spans costs one comparison a span. Use a name's spans on one
    stream, or on several.
    """

    def __init__(self, device: torch.device, every: int) -> None:
        """``every`` 0 records nothing."""
        self._on_device, self._every = device.type == "cuda", every
        self._is_recording = False
        self._steps: dict[int, tuple[_Moment, _Moment]] = {}
        self._spans: dict[int, list[tuple[str, _Moment, _Moment]]] = defaultdict(list)
        self._number = 0
        self._resume: Callable[[], None] = _do_nothing

    @property
    def is_recording(self) -> bool:
        """Whether this step's spans are recorded: for what would do more than one comparison to find out."""
        return self._is_recording

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """The body is step ``number``; its spans are recorded if its turn has come."""
        if not self._every or number % self._every:
            yield
            return
        self._number, self._is_recording = number, True
        begin = self._now()
        try:
            yield
        finally:
            self.resume()
            self._is_recording = False
        self._steps[number] = begin, self._now()

    def span(self, name: str) -> AbstractContextManager[None]:
        """What the body gives to the current stream, or does on CPU."""
        return self._recorded(name) if self._is_recording else _NOTHING

    @contextmanager
    def _recorded(self, name: str) -> Iterator[None]:
        end = self.begin(name)
        yield
        end()

    def begin(self, name: str) -> Callable[[], None]:
        """Begin a span; what is returned ends it, on the stream or in the thread that it is called on."""
        if not self._is_recording:
            return _do_nothing
        begin, spans = self._now(), self._spans[self._number]
        return lambda: spans.append((name, begin, self._now()))

    def around(self, name: str, transfer: Transfer) -> Transfer:
        """``transfer`` with a span around it; on CPU an asynchronous one's ends where it was waited for."""

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
        """From here to :meth:`resume` the current stream may wait for others: within a span of compute, but none."""
        if self._is_recording and self._resume is _do_nothing:
            self._resume = self.begin(_WAITING)

    def resume(self) -> None:
        """The current stream has compute again; without :meth:`hold` before it, nothing happens."""
        self._resume()
        self._resume = _do_nothing

    def captures(self) -> dict[int, OverlapCapture]:
        """Each recorded step's overlap and timeline by number. Waits for the device."""
        if self._on_device:
            torch.cuda.synchronize()
        return {number: self._capture(number) for number in self._steps}

    def _capture(self, number: int) -> OverlapCapture:
        origin, end = self._steps[number]
        rows: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for name, *moments in self._spans[number]:
            begin_ns, end_ns = (_since_ns(origin, moment) for moment in moments)
            rows[name].append((begin_ns, end_ns))
        lanes: dict[str, Intervals] = {name: union(spans) for name, spans in rows.items()}
        waiting = lanes.pop(_WAITING, union())
        if COMPUTE in lanes:
            lanes[COMPUTE] = difference(lanes[COMPUTE], waiting)
        return overlap_of(lanes, [(0, max(1, _since_ns(origin, end)))])

    def _now(self) -> _Moment:
        if not self._on_device:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class _Waited(dist.Work):
    """In the place of ``handle``; FSDP2 waits for nothing that is no ``Work``."""

    def __init__(self, handle: Handle, on_end: Callable[[], None]) -> None:
        super().__init__()
        self._handle, self._on_end = handle, on_end

    def wait(self, *_timeout: object) -> bool:
        """Wait; the first time ends the span."""
        self._handle.wait()
        on_end, self._on_end = self._on_end, _do_nothing
        on_end()
        return True


def _do_nothing() -> None:
    pass


def _since_ns(origin: _Moment, moment: _Moment) -> int:
    if isinstance(origin, int) and isinstance(moment, int):
        return moment - origin
    return round(float(origin.elapsed_time(moment)) * _NS_PER_MS)  # type: ignore[union-attr, arg-type]
