"""Reads the steps of a CPU rank. Pure.

Compute is the work of operators on the training thread, and communication is the work of gloo's own threads for a
collective.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from pytest_aorta.result.trace.families import GLOO, MAX_NAME
from pytest_aorta.result.trace.intervals import Intervals, difference, union
from pytest_aorta.result.trace.kineto.capture import capture_of
from pytest_aorta.result.trace.kineto.collectives import collective_of
from pytest_aorta.result.trace.kineto.events import (
    Event,
    Span,
    begin_of,
    duration_of,
    end_of,
    events_and_boundaries,
    is_annotation,
    is_within,
    span_of,
)
from pytest_aorta.result.trace.overlap import Lane
from pytest_aorta.result.trace.profiled_steps import Call, Collective, Profile

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
    return capture_of(edges, _operator_lanes(operators) | _gloo_lanes(works), durations, served)


def _operators(events: Iterable[Event], thread: object) -> list[Event]:
    """Return a thread's operators, each before those that it calls."""
    own = [event for event in events if event["tid"] == thread and event.get("cat") == "cpu_op"]
    return sorted(
        (event for event in own if "::" in event["name"]), key=lambda event: (begin_of(event), -end_of(event))
    )


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
    works = sorted(
        (event for event in events if event["name"].startswith("gloo:") and is_annotation(event)), key=begin_of
    )
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
