"""Reads a step's graph of streams from a Kineto trace with shapes and the marks of ``worker/streams.py``. Pure.

The graph is that of a device, on CPU ranks too. There, a collective that the host does not wait for runs on a stream of
its process group's communicator, after what its stream had to do when it was requested, and other collectives run on
the current stream. A communicator runs its collectives in their order (https://github.com/pytorch/pytorch/issues/177011).
Code in C++ waits without a mark: DDP's reducer for its all-reduces at the end of the backward pass, and for broadcasts
of buffers at once. A value that the host reads makes all that follows wait, but for those that an optimizer reads: they
count its steps, on the host.

Of compute, operators with a formula are nodes, and outside these the outermost operators that read or write memory:
their bytes are those of their tensors and of one result as large as the largest. An operator that waits for a
collective before it computes, as one of an ``AsyncCollectiveTensor``, is the operator that it then calls.
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
    by_thread,
    element_bytes,
    end_of,
    holds,
    is_annotation,
    span_of,
    tensors_of,
)
from pytest_aorta.result.trace.kineto_places import Places
from pytest_aorta.result.trace.overlap import Intervals, union
from pytest_aorta.result.trace.profiled_steps import Collective, CollectiveCost
from pytest_aorta.result.trace.step_graph import MAX_NODES, Node, StepGraph, Work

# The first word of a mark's name.
MARK = "aorta::stream"
_BACKWARD = "autograd::engine::evaluate_function: "
_READ = "aten::_local_scalar_dense"
# Operators whose result, or its size, the host reads from the device.
_READING = ("aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::bincount", "aten::equal")
# The scope of an optimizer's step.
_STEP = "Optimizer.step#"
# The begin of an event's name -> what the trace lacks where it has such an event.
_UNSEEN = {
    "## Call CompiledFxGraph": "kernels that inductor fused",
    "cudaGraphLaunch": "operators of CUDA graphs",
    "hipGraphLaunch": "operators of CUDA graphs",
    "symm_mem::": "transfers of symmetric memory",
}
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
        cost: What it costs.
        group: Its process group, by a name that does not differ between worlds.
        event: The operator.
        is_functional: Whether a functional collective requested it.
    """

    cost: CollectiveCost
    group: str
    event: Event
    is_functional: bool

    @property
    def is_async(self) -> bool:
        """Return whether the current stream does not wait for the collective when it is requested."""
        args = self.event["args"]
        given = zip(args.get("Input type", ()), args.get("Concrete Inputs", ()), strict=False)
        flags = [value for kind, value in given if kind == "Scalar" and value in ("True", "False")]
        return self.is_functional or self.cost.kind == Collective.SEND_RECV or flags[-1:] == ["True"]


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
    waits = [event for event in said if _words(event)[0] == Said.WAITS_WORK]
    compute = _compute(operators, waits, requests, flops, is_view)
    if len(compute) + len(requests) > MAX_NODES:
        return StepGraph(problem=f"the step has {len(compute) + len(requests)} operators, more than {MAX_NODES}")
    backward, steps = (
        union([span_of(event) for event in inside if event["name"].startswith(begin)]) for begin in (_BACKWARD, _STEP)
    )
    reader = _Reader(said, {_words(event)[1] for event in waits}, backward, places)
    todo: list[tuple[Event, Callable[[], None]]] = [
        *((event, partial(reader.hear, event)) for event in said),
        *((event, partial(reader.compute, event, flops, size)) for event, flops, size in compute),
        *((one.event, partial(reader.request, one)) for one in requests),
        *(
            (event, partial(reader.host_waits, event))
            for event in operators
            if event["name"] in _READING or (event["name"] == _READ and not _is_in(steps, event))
        ),
    ]
    for event, read in sorted(todo, key=lambda one: begin_of(one[0])):
        reader.leave_backward(event)
        read()
    names = {event["name"] for event in inside}
    unseen = (what for begin, what in _UNSEEN.items() if any(name.startswith(begin) for name in names))
    return reader.finished([*dict.fromkeys(unseen)])


def _compute(
    operators: Sequence[Event],
    waits: Sequence[Event],
    requests: Sequence[Request],
    flops: Mapping[int, int],
    is_view: Callable[[str], bool],
) -> list[tuple[Event, int, int]]:
    """Return operators that compute, with their operations and, of those without a formula, bytes.

    Operators that hold a request or a wait are not at one moment, and those within one compute nothing on a device.
    """
    between = [*waits, *(one.event for one in requests)]
    moments, formulas = _begins(between), _begins(event for event in operators if id(event) in flops)
    requested = {(event["tid"], begin_of(event)) for event in between}
    found = []
    within: tuple[object, int] = "", 0
    for event in by_thread([*operators, *waits]):
        tid, end = event["tid"], end_of(event)
        if tid == within[0] and end <= within[1]:
            continue
        if (tid, begin_of(event)) in requested:
            within = tid, end
        elif _has_parts(moments[tid], event):
            continue
        elif id(event) in flops:
            found.append((event, flops[id(event)], 0))
            within = tid, end
        elif not _has_parts(formulas[tid], event) and not is_view(event["name"]):
            if size := _bytes(event):
                found.append((event, 0, size))
            within = tid, end
    return found


def _begins(events: Iterable[Event]) -> dict[object, list[int]]:
    found: dict[object, list[int]] = defaultdict(list)
    for event in sorted(events, key=begin_of):
        found[event["tid"]].append(begin_of(event))
    return found


def _has_parts(begins: Sequence[int], event: Event) -> bool:
    position = bisect_left(begins, begin_of(event))
    return position < len(begins) and begins[position] < end_of(event)


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


class _Reader:
    """The state of the streams at a moment of the step."""

    def __init__(self, said: Sequence[Event], waited: set[str], backward: Intervals, places: Places) -> None:
        self._waited, self._backward, self._places = waited, backward, places
        self._nodes: list[Node] = []
        # A stream is named by its mark's number, that of a communicator by its group. The first one marked computes.
        self._streams: dict[str, int] = {}
        self._on: dict[object, str] = {}
        self._first = _words(said[0])[1]
        self._stream(self._first)
        # What the next work of a stream waits for, and what the next work of any stream does as the host has waited.
        self._fronts: dict[int, set[int]] = {}
        self._host: set[int] = set()
        # The last collective of each group.
        self._by_group: dict[str, int] = {}
        self._events: dict[str, set[int]] = {}
        # Open requests: number, of messages between two ranks the other one, and mark.
        self._requested: list[tuple[str, int | None, Event]] = []
        self._works: dict[str, set[int]] = defaultdict(set)
        # What code in C++ waits for at the end of the backward pass.
        self._reduced: set[int] = set()
        self._not_waited: set[int] = set()

    def hear(self, event: Event) -> None:
        """Take a mark in."""
        said, *about = _words(event)
        if said == Said.ON:
            self._on[event["tid"]] = about[0]
        elif said == Said.RECORDS:
            self._events[about[0]] = self._front(self._stream(about[1]))
        elif said == Said.WAITS_STREAM:
            self._wait(self._stream(about[0]), self._front(self._stream(about[1])))
        elif said == Said.WAITS_EVENT:
            self._wait(self._stream(about[0]), self._events.get(about[1], ()))
        elif said == Said.REQUESTS:
            self._requested.append((about[0], int(about[1]) if about[1:] else None, event))
        elif said == Said.WAITS_WORK:
            self._wait(self._current(event), self._works[about[0]])
            self._not_waited -= self._works[about[0]]
        elif said == Said.HOST and not about:
            self._block(set().union(*self._fronts.values()))
        elif said == Said.HOST:
            # An event of an earlier step has nothing of this one before it.
            is_stream = about[0] in self._streams
            self._block(self._front(self._streams[about[0]]) if is_stream else self._events.get(about[0], ()))

    def compute(self, event: Event, flops: int, num_bytes: int) -> None:
        """Add an operator that computes."""
        self._add(event, self._current(event), Work.COMPUTE, event["name"], flops=flops, num_bytes=num_bytes)

    def request(self, one: Request) -> None:
        """Add a collective."""
        current = self._current(one.event)
        # Events come in order, so a request that has ended holds none of those that follow.
        self._requested = [asked for asked in self._requested if end_of(asked[-1]) >= begin_of(one.event)]
        around = [asked for asked in self._requested if holds(asked[-1], one.event)]
        works, peer = [number for number, *_ in around], around[-1][1] if around else None
        stream = self._stream(f"communicator of {one.group}") if one.is_async else current
        self._wait(stream, self._front(current))
        self._wait(stream, {self._by_group[one.group]} if one.group in self._by_group else ())
        kind, ranks, num_bytes = one.cost.kind, one.cost.group_size or 1, one.cost.bytes or 0
        size = {"num_bytes": num_bytes, "group": one.group, "group_size": ranks}
        size |= {} if peer is None else {"sends_to" if "send" in one.event["name"] else "receives_from": peer}
        node = self._by_group[one.group] = self._add(one.event, stream, Work.COLLECTIVE, kind, **size)
        for number in works:
            self._works[number].add(node)
        if not one.is_async:
            return
        if not one.is_functional:
            if not self._waited.intersection(works) and _is_in(self._backward, one.event):
                self._reduced.add(node)
                return
            if not works or kind == "broadcast":  # DDP's of buffers, which it waits for at once
                self._wait(current, {node})
                return
        self._not_waited.add(node)

    def host_waits(self, event: Event) -> None:
        """Let all that follows wait for the current stream."""
        self._block(self._front(self._current(event)))

    def leave_backward(self, event: Event) -> None:
        """Let the current stream wait for what was reduced, if an event is the first one after a backward pass."""
        if self._reduced and not _is_in(self._backward, event):
            self._wait(self._current(event), self._reduced)
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
        of = (place.module if place.module != "backward" else "")[:200]
        after = sorted(self._front(stream))
        self._nodes.append(Node(work, name[:200], stream, after, of=of, place=place.source[:200], **sizes))
        self._fronts[stream] = {len(self._nodes) - 1}
        return len(self._nodes) - 1

    def _front(self, stream: int) -> set[int]:
        return self._fronts.setdefault(stream, self._host)

    def _wait(self, stream: int, nodes: Iterable[int]) -> None:
        self._fronts[stream] = self._latest(self._front(stream).union(nodes))

    def _block(self, nodes: Iterable[int]) -> None:
        self._host = self._latest(self._host.union(nodes))
        for stream in self._fronts:
            self._wait(stream, self._host)

    def _latest(self, nodes: Iterable[int]) -> set[int]:
        """Return the last node of each stream."""
        return set({self._nodes[node].stream: node for node in sorted(nodes)}.values())

    def _stream(self, name: str) -> int:
        return self._streams.setdefault(name, len(self._streams))

    def _current(self, event: Event) -> int:
        return self._stream(self._on.get(event["tid"], self._first))


def _is_in(spans: Intervals, event: Event) -> bool:
    """Return whether an event begins within one of the spans, which are in order."""
    number = bisect_right(spans[:, 0], begin_of(event))
    return number > 0 and begin_of(event) < spans[number - 1, 1]


def _words(event: Event) -> list[str]:
    return str(event["name"]).split()[1:]
