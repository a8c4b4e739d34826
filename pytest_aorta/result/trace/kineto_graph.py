"""Reads a step's graph of streams from a Kineto trace with shapes and the marks of ``worker/streams.py``. Pure.

The graph is that of a device, on CPU ranks too. There, a collective that the host does not wait for runs on a stream of
its process group's communicator, after what its stream had to do when it was requested, and other collectives run on
the current stream. A communicator runs its collectives in their order (https://github.com/pytorch/pytorch/issues/177011).
Code in C++ waits without a mark: DDP's reducer for its all-reduces at the end of the backward pass, and for broadcasts
of buffers at once. The wait of a functional collective is an operator without the identity of its tensor, so it waits
for the earliest collective that has such a result and was not waited for. A value that the host reads makes all that
follows wait.

Of compute, operators with a formula are nodes, and outside these the outermost operators that read or write memory:
their bytes are those of their tensors and of one result as large as the largest.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from pytest_aorta.result.trace.kineto import (
    Event,
    begin_of,
    element_bytes,
    end_of,
    holds,
    is_annotation,
    span_of,
    tensors_of,
)
from pytest_aorta.result.trace.kineto_places import Places
from pytest_aorta.result.trace.overlap import Intervals, union
from pytest_aorta.result.trace.step_graph import MAX_NODES, Node, StepGraph, Work

# The first word of a mark's name.
MARK = "aorta::stream"
_BACKWARD = "autograd::engine::evaluate_function: "
_WAIT = "_c10d_functional::wait_tensor"
_READ = "aten::_local_scalar_dense"
# What inductor compiles for CPU leaves no operator in a trace.
_FUSED = "## Call CompiledFxGraph"
_LIST_BYTES = 4


class Said(StrEnum):
    """The second word of a mark; numbers of streams, events and requests follow."""

    ON = "on"
    RECORDS = "records"
    WAITS_STREAM = "waits-stream"
    WAITS_EVENT = "waits-event"
    REQUESTS = "requests"
    WAITS_WORK = "waits-work"
    HOST = "host-waits"


@dataclass(frozen=True)
class Request:
    """A collective that the step requested.

    Attributes:
        kind: Kind of collective.
        group: Name of the process group.
        group_size: Number of ranks in the group.
        num_bytes: Bytes of the larger of input and output.
        event: The operator.
        results: Numbers of elements of the results of a functional collective; empty for one of a process group.
    """

    kind: str
    group: str
    group_size: int
    num_bytes: int
    event: Event
    results: list[int]

    @property
    def is_async(self) -> bool:
        """Return whether the current stream does not wait for the collective when it is requested."""
        args = self.event["args"]
        given = zip(args.get("Input type", ()), args.get("Concrete Inputs", ()), strict=False)
        flags = [value for kind, value in given if kind == "Scalar" and value in ("True", "False")]
        return bool(self.results) or flags[-1:] == ["True"]


def graph_of_step(
    inside: Sequence[Event],
    operators: Sequence[Event],
    requests: Sequence[Request],
    flops: Mapping[int, int],
    is_view: Callable[[str], bool],
    places: Places,
) -> StepGraph:
    """Return the graph of the step whose host events are ``inside``, from its operators and requests.

    ``flops`` are the operations of operators with a formula, by the id of the event; ``is_view`` is whether an operator
    of this name returns its argument without reading it.
    """
    marks = [event for event in inside if is_annotation(event)]
    # A trace has the events of one thread after those of another.
    said = sorted((event for event in marks if event["name"].startswith(MARK)), key=begin_of)
    if not said:
        return StepGraph(problem="the streams of the step were not marked")
    compute = _compute(operators, requests, flops, is_view)
    if len(compute) + len(requests) > MAX_NODES:
        return StepGraph(problem=f"the step has {len(compute) + len(requests)} operators, more than {MAX_NODES}")
    backward = union([span_of(event) for event in inside if event["name"].startswith(_BACKWARD)])
    reader = _Reader(said, backward, places)
    todo: list[tuple[Event, Callable[[], None]]] = [
        *((event, partial(reader.hear, event)) for event in said),
        *((event, partial(reader.compute, event, flops, size)) for event, flops, size in compute),
        *((one.event, partial(reader.request, one)) for one in requests),
        *((event, partial(reader.functional_wait, event)) for event in operators if event["name"] == _WAIT),
        *((event, partial(reader.host_waits, event)) for event in operators if event["name"] == _READ),
    ]
    for event, read in sorted(todo, key=lambda one: begin_of(one[0])):
        reader.leave_backward(event)
        read()
    unseen = ["kernels that inductor fused"] if any(one["name"].startswith(_FUSED) for one in marks) else []
    return reader.finished(unseen)


def _compute(
    operators: Sequence[Event], requests: Sequence[Request], flops: Mapping[int, int], is_view: Callable[[str], bool]
) -> list[tuple[Event, int, int]]:
    """Return operators that compute, with their operations and, of those without a formula, bytes."""
    parted: dict[object, list[int]] = defaultdict(list)
    for event in operators:
        if id(event) in flops:
            parted[event["tid"]].append(begin_of(event))
    for one in requests:
        parted[one.event["tid"]].append(begin_of(one.event))
    for begins in parted.values():
        begins.sort()
    requested = {(one.event["tid"], begin_of(one.event)) for one in requests}
    found = []
    within: tuple[object, int] = "", 0
    for event in operators:
        tid, begin, end = event["tid"], begin_of(event), end_of(event)
        if tid == within[0] and end <= within[1]:
            continue
        if (tid, begin) in requested or event["name"] == _WAIT:
            within = tid, end
        elif id(event) in flops:
            found.append((event, flops[id(event)], 0))
            within = tid, end
        else:
            position = bisect_left(parted[tid], begin)
            has_parts = position < len(parted[tid]) and parted[tid][position] < end
            if not has_parts and not is_view(event["name"]):
                if size := _bytes(event):
                    found.append((event, 0, size))
                within = tid, end
    return found


def _bytes(event: Event) -> int:
    """Return the bytes that an operator reads and writes: those of its tensors, and of a result like the largest."""
    # A tensor without dimensions is a number.
    sizes = [
        (element_bytes(kind) or _LIST_BYTES) * sum(map(math.prod, shapes))
        for kind, shapes in tensors_of(event["args"])
        if shapes != [[]] or not kind
    ]
    is_in_place = event["name"].endswith("_")
    return sum(sizes) + (0 if is_in_place else max(sizes, default=0))


@dataclass
class _Functional:
    """A functional collective: its node, and the numbers of elements of results that were not waited for."""

    node: int
    results: list[int]


class _Reader:
    """The state of the streams at a moment of the step."""

    def __init__(self, said: Sequence[Event], backward: Intervals, places: Places) -> None:
        self._waited = {_words(event)[1] for event in said if _words(event)[0] == Said.WAITS_WORK}
        self._backward = [(int(begin), int(end)) for begin, end in backward]
        self._places = places
        self._nodes: list[Node] = []
        # A stream is named by its mark's number, that of a communicator by its group. The first one marked computes.
        self._streams: dict[str, int] = {}
        self._on: dict[object, str] = {}
        self._first = _words(said[0])[1]
        self._stream(self._first)
        self._last: dict[int, int] = {}
        self._pending: dict[int, set[int]] = defaultdict(set)
        self._by_group: dict[str, int] = {}
        self._events: dict[str, int] = {}
        self._requested: list[tuple[str, Event]] = []
        self._works: dict[str, list[int]] = defaultdict(list)
        self._functional: list[_Functional] = []
        # What the host has waited for last of each stream, and what C++ waits for at the end of the backward pass.
        self._host: dict[int, int] = {}
        self._reduced: set[int] = set()
        self._not_waited: set[int] = set()

    def hear(self, event: Event) -> None:
        """Take a mark in."""
        said, *about = _words(event)
        if said == Said.ON:
            self._on[event["tid"]] = about[0]
        elif said == Said.RECORDS:
            self._events[about[0]] = self._last.get(self._stream(about[1]), -1)
        elif said == Said.WAITS_STREAM:
            self._wait(self._stream(about[0]), self._last.get(self._stream(about[1]), -1))
        elif said == Said.WAITS_EVENT:
            self._wait(self._stream(about[0]), self._events.get(about[1], -1))
        elif said == Said.REQUESTS:
            self._requested.append((about[0], event))
        elif said == Said.WAITS_WORK:
            for node in self._works[about[0]]:
                self._wait(self._current(event), node)
                self._not_waited.discard(node)
        elif said == Said.HOST:
            known = [*self._events, *self._streams]
            awaited = [self._events.get(one, self._last.get(self._streams.get(one, -1), -1)) for one in about]
            self._host_waits_for(awaited if set(about) & {*known} else self._last.values())

    def compute(self, event: Event, flops: int, num_bytes: int) -> None:
        """Add an operator that computes."""
        self._add(event, self._current(event), Work.COMPUTE, event["name"], flops=flops, num_bytes=num_bytes)

    def request(self, one: Request) -> None:
        """Add a collective."""
        current = self._current(one.event)
        # Events come in order, so a request that has ended holds none of those that follow.
        self._requested = [pair for pair in self._requested if end_of(pair[1]) >= begin_of(one.event)]
        works = [number for number, span in self._requested if holds(span, one.event)]
        stream = self._stream(f"communicator of {one.group}") if one.is_async else current
        if one.is_async:
            self._wait(stream, self._last.get(current, -1))
        self._wait(stream, self._by_group.get(one.group, -1))
        size = {"num_bytes": one.num_bytes, "group": one.group, "group_size": one.group_size}
        node = self._by_group[one.group] = self._add(one.event, stream, Work.COLLECTIVE, one.kind, **size)
        for number in works:
            self._works[number].append(node)
        if not one.is_async:
            return
        if one.results:
            self._functional.append(_Functional(node, one.results))
        elif not self._waited.intersection(works) and self._is_backward(one.event):
            self._reduced.add(node)
            return
        elif not works or one.kind == "broadcast":  # DDP's of buffers, which it waits for at once
            self._wait(current, node)
            return
        self._not_waited.add(node)

    def functional_wait(self, event: Event) -> None:
        """Let the current stream wait for the functional collective of a tensor."""
        elements = next(map(math.prod, event["args"].get("Input Dims", ())), 0)
        for one in self._functional:
            if elements in one.results:
                one.results.remove(elements)
                self._wait(self._current(event), one.node)
                self._not_waited.discard(one.node)
                return

    def host_waits(self, event: Event) -> None:
        """Let all that follows wait for the current stream."""
        self._host_waits_for([self._last.get(self._current(event), -1)])

    def leave_backward(self, event: Event) -> None:
        """Let the current stream wait for what was reduced, if an event is the first one after a backward pass."""
        if self._reduced and not self._is_backward(event):
            self._pending[self._current(event)] |= self._reduced
            self._reduced = set()

    def finished(self, unseen: Sequence[str]) -> StepGraph:
        """Return the graph."""
        used = sorted({0, *(node.stream for node in self._nodes)})
        collectives = [node for node in self._nodes if node.work is Work.COLLECTIVE]
        kinds = {stream: {one.name for one in collectives if one.stream == stream} for stream in used}
        marked = dict(zip(self._streams.values(), self._streams, strict=True))
        names = [
            "compute"
            if stream == 0
            else next(iter(kinds[stream])).replace("_", "-")
            if len(kinds[stream]) == 1
            else marked[stream]
            if " " in marked[stream]
            else f"stream {number}"
            for number, stream in enumerate(used)
        ]
        late = Counter(self._nodes[number].name for number in sorted(self._not_waited))
        return StepGraph(
            streams=names,
            nodes=[node.replace(stream=used.index(node.stream)) for node in self._nodes],
            unseen=[*unseen, *(f"the wait for {calls} of {kind}" for kind, calls in late.items())],
        )

    def _add(self, event: Event, stream: int, work: Work, name: str, **sizes: Any) -> int:
        place = self._places.of(event)
        after = {self._last.get(stream, -1), *self._pending.pop(stream, ()), *self._host.values()} - {-1}
        of = (place.module if place.module != "backward" else "")[:200]
        self._nodes.append(Node(work, name[:200], stream, sorted(after), of=of, place=place.source[:200], **sizes))
        self._last[stream] = len(self._nodes) - 1
        return self._last[stream]

    def _host_waits_for(self, nodes: Iterable[int]) -> None:
        # Of a stream, the last node waits for those before it.
        for node in nodes:
            if node >= 0:
                self._host[self._nodes[node].stream] = max(node, self._host.get(self._nodes[node].stream, node))

    def _wait(self, stream: int, node: int) -> None:
        if node >= 0:
            self._pending[stream].add(node)

    def _stream(self, name: str) -> int:
        return self._streams.setdefault(name, len(self._streams))

    def _current(self, event: Event) -> int:
        return self._stream(self._on.get(event["tid"], self._first))

    def _is_backward(self, event: Event) -> bool:
        number = bisect_right(self._backward, (begin_of(event), math.inf))
        return number > 0 and begin_of(event) < self._backward[number - 1][1]


def _words(event: Event) -> list[str]:
    return str(event["name"]).split()[1:]
