"""Reads the steps of a device: every kernel, copy and memset of the trace counts, on any stream. Pure.

A trace of device activity alone shows neither where a step begins nor which collective a kernel served, so one step is
traced with host events as well (:func:`learn_step`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pytest_aorta.result.trace.families import COMMUNICATION, family_of, is_communication, serving
from pytest_aorta.result.trace.intervals import Intervals, union
from pytest_aorta.result.trace.kineto.capture import capture_of
from pytest_aorta.result.trace.kineto.collectives import call_of, collective_of, kind_of
from pytest_aorta.result.trace.kineto.events import (
    Event,
    Span,
    begin_of,
    boundary_kernels,
    duration_of,
    events_and_boundaries,
    is_on_device,
    is_within,
    span_of,
    with_duration,
)
from pytest_aorta.result.trace.overlap import Lane
from pytest_aorta.result.trace.profiled_steps import Call, Collective, Profile


@dataclass(frozen=True)
class LearnedStep:
    """The device activity of a step, learned from a trace that has host events too.

    Attributes:
        boundary: the name of the boundary's kernel; no other kernel has this name.
        communication: stream -> the name of each communication kernel, in order, and the call that the kernel served.
        names: names of kernels that served collectives and did nothing else.
    """

    boundary: str
    communication: Mapping[object, list[tuple[str, Call]]]
    names: frozenset[str]


def learn_step(trace: Mapping[str, Any]) -> LearnedStep:
    """Return the facts of a step that are needed to read traces of device activity alone.

    Raises:
        ValueError: As in :func:`overlap_with_host`, or the workload's own kernels have the name of the boundary's.
    """
    events, marks = events_and_boundaries(trace)
    kernels = boundary_kernels(events, marks)
    name = str(kernels[0]["name"])
    if sum(event["name"] == name for event in events if is_on_device(event)) != len(marks):
        raise ValueError(
            f"kernel {name} separates profiled steps, but the workload runs it too; set profile_steps: 0 to measure "
            "without profiled steps"
        )
    names = _serving_names(events)
    inside = _communication_by_stream(events, names, begin_of(kernels[0]), begin_of(kernels[-1]))
    calls = {stream: [(kernel["name"], call_of(kernel)) for kernel in rows] for stream, rows in inside.items()}
    return LearnedStep(name, calls, names)


def overlap_with_host(trace: Mapping[str, Any]) -> Profile:
    """Return the breakdown of the steps between the boundaries of a trace that has host events too.

    Raises:
        ValueError: The trace has fewer than two boundaries, or no device activity for them.
    """
    events, marks = events_and_boundaries(trace)
    kernels = boundary_kernels(events, marks)
    edges = [begin_of(kernel) for kernel in kernels]
    names = _serving_names(events)
    inside = _communication_by_stream(events, names, edges[0], edges[-1])
    calls = {id(kernel): call_of(kernel) for rows in inside.values() for kernel in rows}
    return _capture(events, edges, LearnedStep(str(kernels[0]["name"]), {}, names), calls)


def overlap_of_device(
    trace: Mapping[str, Any],
    step: LearnedStep,
    num_steps: int,
    waits_ms: Mapping[Call, Sequence[float]] = MappingProxyType({}),
) -> Profile:
    """Return the breakdown of ``num_steps`` steps like ``step`` from a trace of device activity alone.

    A stream whose communication does not repeat that of ``step`` is classified by its kernels' names. ``waits_ms``
    contains waits for late ranks at the beginning of calls by :attr:`Call.key`, in order, which are no communication
    (:func:`~pytest_aorta.result.trace.transfers.waits_ms`).

    Raises:
        ValueError: The trace does not have ``num_steps`` + 1 boundaries.
    """
    events = with_duration(trace)
    edges = sorted(begin_of(event) for event in events if is_on_device(event) and event["name"] == step.boundary)
    if len(edges) != num_steps + 1:
        raise ValueError(
            f"the trace has {len(edges)} kernels {step.boundary} between {num_steps} steps: the profiler lost activity"
        )
    calls: dict[int, Call] = {}
    for stream, kernels in _communication_by_stream(events, step.names, edges[0], edges[-1]).items():
        expected = step.communication.get(stream, []) * num_steps
        is_repeated = [kernel["name"] for kernel in kernels] == [name for name, _ in expected]
        served = [call for _, call in expected] if is_repeated else [call_of(kernel) for kernel in kernels]
        calls |= {id(kernel): call for kernel, call in zip(kernels, served, strict=True)}
    return _capture(events, edges, step, calls, waits_ms)


def _capture(
    events: Iterable[Event],
    edges: list[int],
    step: LearnedStep,
    calls: Mapping[int, Call],
    waits_ms: Mapping[Call, Sequence[float]] = MappingProxyType({}),
) -> Profile:
    """Return the capture of a device's steps; ``calls`` maps the ``id`` of each communication kernel to its call."""
    inside = [event for event in sorted(filter(is_on_device, events), key=begin_of) if is_within(event, edges)]
    durations = [(_family(event, calls), duration_of(event)) for event in inside if event["name"] != step.boundary]
    waits_ns = _waits_ns([event for event in inside if id(event) in calls], calls, waits_ms)
    kinds = {number: call.kind for number, call in calls.items()}
    served = ((calls[id(event)], duration_of(event)) for event in inside if id(event) in calls)
    return capture_of(edges, _lanes(events, step.names, kinds, waits_ns), durations, served)


def _waits_ns(
    kernels: Iterable[Event], calls: Mapping[int, Call], waits_ms: Mapping[Call, Sequence[float]]
) -> dict[int, int]:
    """Return the known waits at the beginning of communication kernels, by the ``id`` of the kernel."""
    left = {key: iter(waits) for key, waits in waits_ms.items()}
    return {
        id(kernel): round(wait_ms * 1e6)
        for kernel in kernels
        if (wait_ms := next(left.get(calls[id(kernel)].key, iter(())), None)) is not None
    }


def _family(event: Event, calls: Mapping[int, Call]) -> str:
    family = family_of(event["name"])
    if id(event) not in calls:
        return family
    # The names of RCCL's kernels do not show the collective, and other names do not show that kernels communicate.
    is_clear = is_communication(family) and collective_of(family) is not Collective.OTHER
    return family if is_clear else serving(family, calls[id(event)].kind)


def _serving_names(events: Iterable[Event]) -> frozenset[str]:
    """Return the names of kernels that only ever served collectives, which torch's host events show."""
    names: dict[bool, set[str]] = {True: set(), False: set()}
    for event in events:
        if event.get("cat") == "kernel":
            names["Collective name" in event["args"]].add(event["name"])
    return frozenset(names[True] - names[False])


def _communication_by_stream(
    events: Iterable[Event], names: frozenset[str], begin: int, end: int
) -> dict[object, list[Event]]:
    """Return the communication kernels of each stream that began in ``[begin, end)``, in order."""
    rows: dict[object, list[Event]] = defaultdict(list)
    for event in sorted((event for event in events if _is_communication(event, names)), key=begin_of):
        if begin <= begin_of(event) < end:
            rows[event["args"].get("stream")].append(event)
    return rows


def _lanes(
    events: Iterable[Event], names: frozenset[str], kinds: Mapping[int, Collective], waits_ns: Mapping[int, int]
) -> dict[str, Intervals]:
    """Return the lanes of device activity; ``kinds`` and ``waits_ns`` map the ``id`` of events to what is known."""
    spans: dict[str, list[Span]] = defaultdict(list)
    for event in filter(is_on_device, events):
        begin, end = span_of(event)
        if _is_communication(event, names):
            lane: str = kinds.get(id(event)) or kind_of(event)
            arrived = begin + waits_ns.get(id(event), 0)
            spans[Lane.WAIT].append((begin, arrived))
            spans[lane].append((arrived, end))
        else:
            spans[Lane.COMPUTE if event["cat"] == "kernel" else Lane.COPY].append((begin, end))
    return {name: union(rows) for name, rows in spans.items()}


def _is_communication(event: Event, names: frozenset[str]) -> bool:
    """Return True for a kernel of a collective: one of ``names``, or one that its name reveals."""
    return event.get("cat") == "kernel" and bool(event["name"] in names or COMMUNICATION.search(event["name"]))
