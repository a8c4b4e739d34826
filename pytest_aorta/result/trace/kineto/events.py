"""The events of a trace, when they ran, and the boundaries that separate its steps. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

Event: TypeAlias = Mapping[str, Any]
Span: TypeAlias = tuple[int, int]
# The annotation around the work that separates profiled steps: n + 1 boundaries for n steps.
BOUNDARY = "aorta::boundary"
_DEVICE_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}


def events_and_boundaries(trace: Mapping[str, Any]) -> tuple[list[Event], list[Event]]:
    """Return all events with a duration, and the boundaries in order.

    Raises:
        ValueError: The trace has fewer than two boundaries.
    """
    events = with_duration(trace)
    marks = sorted((event for event in events if event["name"] == BOUNDARY and is_annotation(event)), key=begin_of)
    if len(marks) < 2:
        raise ValueError(f"the trace has {len(marks)} annotations {BOUNDARY!r}; at least two are needed for a step")
    return events, marks


def with_duration(trace: Mapping[str, Any]) -> list[Event]:
    """Return the events that have a duration, with arguments; an event without arguments gets empty ones."""
    events = (event for event in trace["traceEvents"] if event.get("ph") == "X")
    return [event if "args" in event else {**event, "args": {}} for event in events]


def boundary_kernels(events: Iterable[Event], marks: list[Event]) -> list[Event]:
    """Return each boundary's own kernel on the device, which runs in order on the training stream.

    Raises:
        ValueError: The trace has no device activity for a boundary.
    """
    launches = [event for event in events if is_runtime_call(event)]
    activity = {event["args"].get("correlation"): event for event in events if is_on_device(event)}
    # A call without a correlation does not belong to activity without one, such as kernels of a graph.
    activity.pop(None, None)
    found = []
    for mark in marks:
        begin, end = span_of(mark)
        ids = [
            launch["args"].get("correlation")
            for launch in launches
            if launch["tid"] == mark["tid"] and begin <= begin_of(launch) < end
        ]
        kernels = [activity[number] for number in ids if number in activity]
        if not kernels:
            raise ValueError(
                "the trace has no device activity for a boundary between steps: the profiler did not record the "
                "device (CUPTI or roctracer missing, in use by another profiler, or not permitted); set "
                "profile_steps: 0 to measure without profiled steps"
            )
        found.append(min(kernels, key=begin_of))
    return found


def steps_alone(trace: Mapping[str, Any], *, on_device: bool) -> dict[str, Any]:
    """Return the trace without events outside the boundaries, such as the ranks' barrier and the profiler itself."""
    events, marks = events_and_boundaries(trace)
    host = begin_of(marks[0]), end_of(marks[-1])
    edges = [begin_of(kernel) for kernel in boundary_kernels(events, marks)] if on_device else host

    def is_of_steps(event: Event) -> bool:
        if "ts" not in event or event.get("ph") == "M":
            return True
        first, last = (edges[0], edges[-1]) if is_on_device(event) else host
        return first <= begin_of(event) <= (last if event.get("ph") == "X" else max(last, edges[-1]))

    return {**trace, "traceEvents": [event for event in trace["traceEvents"] if is_of_steps(event)]}


def is_annotation(event: Event) -> bool:
    """Return True for a span that a program on the host named."""
    return event.get("cat") == "user_annotation"


def is_runtime_call(event: Event) -> bool:
    """Return True for a call of the device's runtime or driver."""
    return str(event.get("cat", "")).endswith(("_runtime", "_driver"))


def is_on_device(event: Event) -> bool:
    """Return True for a kernel, copy or memset."""
    return event.get("cat") in _DEVICE_CATEGORIES


def is_within(event: Event, edges: Sequence[int]) -> bool:
    """Return True if the event began between the first and the last of ``edges``."""
    return edges[0] <= begin_of(event) < edges[-1]


def holds(outer: Event, inner: Event) -> bool:
    """Return True if ``inner`` ran while ``outer`` did."""
    return begin_of(outer) <= begin_of(inner) and end_of(inner) <= end_of(outer)


def begin_of(event: Event) -> int:
    """Return the beginning in nanoseconds; traces have microseconds with three decimals."""
    return round(float(event["ts"]) * 1000)


def end_of(event: Event) -> int:
    """Return the end in nanoseconds; a clock that was set back can make a duration negative, which counts as 0."""
    return begin_of(event) + max(0, round(float(event["dur"]) * 1000))


def duration_of(event: Event) -> int:
    """Return the duration in nanoseconds."""
    return end_of(event) - begin_of(event)


def span_of(event: Event) -> Span:
    """Return beginning and end in nanoseconds."""
    return begin_of(event), end_of(event)
