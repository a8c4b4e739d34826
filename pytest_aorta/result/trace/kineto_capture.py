"""Computes what was captured in profiled steps of ranks on devices and on CPUs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from pytest_aorta.result.trace.families import (
    COMMUNICATION,
    GLOO,
    MAX_NAME,
    family_of,
    family_times,
    is_communication,
    serving,
)
from pytest_aorta.result.trace.kineto_events import (
    Event,
    Span,
    begin_of,
    boundary_kernels,
    call_of,
    collective_of,
    duration_of,
    end_of,
    events_and_boundaries,
    is_annotation,
    is_on_device,
    is_within,
    kind_of,
    span_of,
    with_duration,
)
from pytest_aorta.result.trace.overlap import Intervals, Lane, difference, overlap_of, union
from pytest_aorta.result.trace.profiled_steps import Call, Collective, Profile, joined_calls


def _capture_of(
    edges: Sequence[int],
    lanes: Mapping[str, Intervals],
    durations: Iterable[tuple[str, int]],
    calls: Iterable[tuple[Call, int]],
) -> Profile:
    """Return the capture of the steps between ``edges``; all times are in nanoseconds.

    Args:
        edges: the boundaries, in order; n + 1 for n steps.
        lanes: the lanes of :func:`~pytest_aorta.result.trace.overlap.overlap_of`.
        durations: the family of each kernel of the steps, and its duration.
        calls: each call of a collective in the steps, and its duration, in order.
    """
    origin = edges[0]
    windows = [(begin - origin, end - origin) for begin, end in pairwise(edges)]
    return overlap_of({name: lane - origin for name, lane in lanes.items()}, windows).replace(
        kernels=family_times(durations, len(windows)),
        collectives=joined_calls([[call.lasting(duration_ns / 1e6)] for call, duration_ns in calls]),
    )


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
        ValueError: The trace has fewer than two boundaries, or no device activity for them, or a kernel of the workload
            has the name of the boundary's.
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


def overlap_of_device(
    trace: Mapping[str, Any],
    step: LearnedStep,
    num_steps: int,
    waits_ms: Mapping[Call, Sequence[float]] = MappingProxyType({}),
) -> Profile:
    """Return the breakdown of ``num_steps`` steps like ``step`` from a trace of device activity alone.

    A stream whose communication does not repeat that of ``step`` is classified by its kernels' names. ``waits_ms``
    contains waits for late ranks at the beginning of calls by :attr:`Call.key`, in order, which are no communication
    (:func:`~pytest_aorta.result.trace.profiled_steps.waits_ms`).

    Raises:
        ValueError: The trace does not have ``num_steps`` + 1 boundaries.
    """
    events = with_duration(trace)
    edges = sorted(begin_of(event) for event in events if is_on_device(event) and event["name"] == step.boundary)
    if len(edges) != num_steps + 1:
        raise ValueError(f"the profiler lost activity: {len(edges)} kernels {step.boundary} between {num_steps} steps")
    calls: dict[int, Call] = {}
    for stream, kernels in _communication_by_stream(events, step.names, edges[0], edges[-1]).items():
        expected = step.communication.get(stream, []) * num_steps
        is_repeated = [kernel["name"] for kernel in kernels] == [name for name, _ in expected]
        of_stream = [call for _, call in expected] if is_repeated else [call_of(kernel) for kernel in kernels]
        calls |= {id(kernel): call for kernel, call in zip(kernels, of_stream, strict=True)}
    inside = [event for event in sorted(filter(is_on_device, events), key=begin_of) if is_within(event, edges)]
    durations = [(_family(event, calls), duration_of(event)) for event in inside if event["name"] != step.boundary]
    served = [event for event in inside if id(event) in calls]
    kinds = {number: call.kind for number, call in calls.items()}
    lanes = _lanes(events, step.names, kinds, _waits_ns(served, calls, waits_ms))
    return _capture_of(edges, lanes, durations, ((calls[id(event)], duration_of(event)) for event in served))


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


_COMMUNICATING_NAMESPACES = ("c10d::", "_c10d_functional::", "c10d_functional::", "_c10d_functional_autograd::")
# Operators that gloo serves with another collective than the requested one -> the collective that serves them.
_SERVED_AS = {
    "c10d::_reduce_scatter_base_": "gloo:all_reduce",
    "c10d::reduce_scatter_tensor_coalesced_": "gloo:all_reduce",
    "c10d::allreduce_": "gloo:all_reduce",
}


def overlap_of_cpu(trace: Mapping[str, Any]) -> Profile:
    """Return the breakdown of a CPU rank's steps between the trace's boundaries.

    Raises:
        ValueError: The trace has fewer than two boundaries.
    """
    events, marks = events_and_boundaries(trace)
    edges = [begin_of(mark) for mark in marks]
    operators = _operators(events, marks[0]["tid"])
    works = _gloo_works(events, operators)
    gloo = [(kind, work) for kind, work in works if is_within(work, edges)]
    durations = [(name[:MAX_NAME], own_ns) for name, own_ns in _own_times(operators, edges)]
    durations += [(f"{GLOO}{kind}", duration_of(work)) for kind, work in gloo]
    served = ((Call(kind), duration_of(work)) for kind, work in gloo)
    return _capture_of(edges, _operator_lanes(operators) | _gloo_lanes(works), durations, served)


def _operators(events: Iterable[Event], thread: object) -> list[Event]:
    """Return a thread's operators, each before those that it calls."""
    own = [event for event in events if event["tid"] == thread and event.get("cat") == "cpu_op"]
    return sorted((one for one in own if "::" in one["name"]), key=lambda event: (begin_of(event), -end_of(event)))


def _own_times(operators: Iterable[Event], edges: list[int]) -> list[tuple[str, int]]:
    """Return name and time in ns of each operator that began between ``edges``, without the operators that it calls.

    Autograd's wrappers and communication are left out.
    """
    own_ns: list[int] = []
    found: list[Event] = []
    callers: list[int] = []
    for event in operators:
        if event["name"].startswith("autograd::"):
            continue
        while callers and end_of(found[callers[-1]]) <= begin_of(event):
            callers.pop()
        if callers:
            own_ns[callers[-1]] -= duration_of(event)
        callers.append(len(found))
        found.append(event)
        own_ns.append(duration_of(event))
    return [
        (event["name"], max(0, time_ns))
        for event, time_ns in zip(found, own_ns, strict=True)
        if is_within(event, edges) and not event["name"].startswith(_COMMUNICATING_NAMESPACES)
    ]


def _operator_lanes(operators: Iterable[Event]) -> dict[str, Intervals]:
    calls = [event for event in operators if event["name"].startswith(_COMMUNICATING_NAMESPACES)]
    computing: dict[Lane, list[Span]] = {Lane.COMPUTE: [], Lane.COPY: []}
    reached = 0
    for event in operators:
        # An operator includes the operators that it calls. Autograd's wrappers include hooks that wait, so they are
        # left out and their operators count.
        if begin_of(event) < reached or event["name"].startswith("autograd::"):
            continue
        reached = end_of(event)
        computing[Lane.COPY if event["name"] == "aten::copy_" else Lane.COMPUTE].append(span_of(event))
    waiting = union(map(span_of, calls))
    return {name: difference(union(rows), waiting) for name, rows in computing.items()}


def _gloo_lanes(works: Iterable[tuple[Collective, Event]]) -> dict[str, Intervals]:
    spans: dict[str, list[Span]] = defaultdict(list)
    for kind, work in works:
        spans[kind].append(span_of(work))
    return {kind: union(rows) for kind, rows in spans.items()}


def _gloo_works(events: Iterable[Event], operators: Iterable[Event]) -> list[tuple[Collective, Event]]:
    """Return the work of gloo's threads with the requested collective: gloo serves reduce-scatters with all-reduces."""
    works = sorted((one for one in events if one["name"].startswith("gloo:") and is_annotation(one)), key=begin_of)
    requested: dict[str, list[str]] = defaultdict(list)
    for call in operators:
        if call["name"] in _SERVED_AS:
            requested[_SERVED_AS[call["name"]]].append(call["name"])
    found = []
    for name in {work["name"] for work in works}:
        of_name = [work for work in works if work["name"] == name]
        # Gloo's queue is first in, first out: the n-th call's work is the n-th, unless other calls queue there too.
        names = requested[name] if len(requested[name]) == len(of_name) else [name] * len(of_name)
        for work, requested_name in zip(of_name, names, strict=True):
            found.append((collective_of(requested_name), work))
    return sorted(found, key=lambda entry: begin_of(entry[1]))
