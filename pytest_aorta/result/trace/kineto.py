"""Reads a Kineto trace (torch.profiler's Chrome trace) of one rank: which kernels, or CPU work, ran when. Pure.

On a device, activity is what Kineto has as kernels, copies and memsets, on any stream. A trace of the device alone says
neither where a step begins nor, of every kernel, what was asked for: one step with the host's side tells
(:func:`learn_step`). On CPU ranks, compute is the work of operators on the training thread, and communication what
gloo's own threads do for a collective.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

from pytest_aorta.result.trace.intervals import Intervals, difference, union
from pytest_aorta.result.trace.overlap import COMPUTE, COPY, OverlapCapture, overlap_of

Event: TypeAlias = Mapping[str, Any]
Span: TypeAlias = tuple[int, int]

# The annotation around what separates profiled steps: n + 1 of them for n steps.
BOUNDARY = "aorta::boundary"
_DEVICE_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}
# NCCL's and RCCL's, as Holistic Trace Analysis tells them; and torch's kernels on symmetric memory.
_COMMUNICATION = re.compile(r"^nccl.*Kernel|\b(multimem|one_shot|two_shot)_\w*(reduce|gather)\w*")
# Of a collective's or a kernel's name in lower case, without anything but letters.
_KINDS = {
    "reducescatter": "reduce_scatter",
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "send": "send_recv",
    "recv": "send_recv",
}
_COMMUNICATING_NAMESPACES = ("c10d::", "_c10d_functional::", "c10d_functional::", "_c10d_functional_autograd::")
# Operators that gloo serves with another collective than the one asked for, and which.
_SERVED_AS = {
    "c10d::_reduce_scatter_base_": "gloo:all_reduce",
    "c10d::reduce_scatter_tensor_coalesced_": "gloo:all_reduce",
    "c10d::allreduce_": "gloo:all_reduce",
}


def read_trace(path: Path) -> dict[str, Any]:
    """The document of a trace file, gzipped or not.

    Raises:
        ValueError: it is none.
    """
    data = path.read_bytes()
    document = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise ValueError(f"{path}: no Chrome trace: it has to be an object with traceEvents")
    return document


@dataclass(frozen=True)
class LearnedStep:
    """What a step's trace with the host's side says of its device activity."""

    # The boundary's kernel: no other has its name.
    boundary: str
    # By stream, in order: each communication kernel's name, and the kind of collective that it served.
    communication: Mapping[object, list[tuple[str, str]]]


def learn_step(trace: Mapping[str, Any]) -> LearnedStep:
    """What to know of a step to read traces of the device alone.

    Raises:
        ValueError: as :func:`overlap_of_trace`; or other kernels are named as the boundary's.
    """
    events, marks = _events(trace)
    kernels = _boundary_kernels(events, marks)
    name = str(kernels[0]["name"])
    if sum(event["name"] == name for event in events if _is_on_device(event)) != len(marks):
        raise ValueError(
            f"the workload itself runs the kernel that separates profiled steps, {name}; without profiled steps "
            "(profile_steps: 0) there is no need for it"
        )
    inside = _communication_by_stream(events, _begin(kernels[0]), _begin(kernels[-1]))
    return LearnedStep(
        name, {stream: [(kernel["name"], _kind(kernel)) for kernel in rows] for stream, rows in inside.items()}
    )


def overlap_of_trace(trace: Mapping[str, Any], *, on_device: bool) -> OverlapCapture:
    """Where the time of the steps between the trace's boundaries went.

    ``on_device``: by what the accelerator did; else by what the rank's threads did.

    Raises:
        ValueError: the trace has fewer than two boundaries, or no device activity for them.
    """
    events, marks = _events(trace)
    if not on_device:
        return _overlap([_begin(mark) for mark in marks], _cpu_lanes(events, marks[0]["tid"]))
    kernels = _boundary_kernels(events, marks)
    return _overlap([_begin(kernel) for kernel in kernels], _device_lanes(events, {}))


def overlap_of_device(trace: Mapping[str, Any], step: LearnedStep, num_steps: int) -> OverlapCapture:
    """The same from a trace without the host's side, of ``num_steps`` steps such as ``step``.

    A stream whose communication is not that of ``step`` over and over is read by its kernels' names.

    Raises:
        ValueError: the trace has other than ``num_steps`` + 1 boundaries.
    """
    events = _with_duration(trace)
    edges = sorted(_begin(event) for event in events if _is_on_device(event) and event["name"] == step.boundary)
    if len(edges) != num_steps + 1:
        raise ValueError(
            f"the trace has {len(edges)} kernels {step.boundary} between {num_steps} steps: the profiler lost activity"
        )
    kinds: dict[int, str] = {}
    for stream, kernels in _communication_by_stream(events, edges[0], edges[-1]).items():
        expected = step.communication.get(stream, []) * num_steps
        if [kernel["name"] for kernel in kernels] == [name for name, _ in expected]:
            kinds |= {id(kernel): kind for kernel, (_, kind) in zip(kernels, expected, strict=True)}
    return _overlap(edges, _device_lanes(events, kinds))


def _overlap(edges: list[int], lanes: Mapping[str, Intervals]) -> OverlapCapture:
    origin = edges[0]
    return overlap_of(
        {name: lane - origin for name, lane in lanes.items()}, [(a - origin, b - origin) for a, b in pairwise(edges)]
    )


def steps_alone(trace: Mapping[str, Any], *, on_device: bool) -> dict[str, Any]:
    """The trace without what began before the first boundary or after the last: ranks' meeting, the profiler itself."""
    events, marks = _events(trace)
    host = _begin(marks[0]), _end(marks[-1])
    edges = [_begin(kernel) for kernel in _boundary_kernels(events, marks)] if on_device else host

    def is_of_steps(event: Event) -> bool:
        if "ts" not in event or event.get("ph") == "M":
            return True
        first, last = (edges[0], edges[-1]) if _is_on_device(event) else host
        return first <= _begin(event) <= (last if event.get("ph") == "X" else max(last, edges[-1]))

    return {**trace, "traceEvents": [event for event in trace["traceEvents"] if is_of_steps(event)]}


def collective_of(*names: str) -> str:
    """The kind of communication that the first telling one of several names means, such as a kernel's."""
    for name in names:
        letters = re.sub("[^a-z]", "", name.lower())
        if kind := next((kind for part, kind in _KINDS.items() if part in letters), None):
            return kind
    return "other"


def _events(trace: Mapping[str, Any]) -> tuple[list[Event], list[Event]]:
    """Everything with a duration, and the boundaries in order."""
    events = _with_duration(trace)
    marks = sorted((event for event in events if event["name"] == BOUNDARY and _is_host(event)), key=_begin)
    if len(marks) < 2:
        raise ValueError(f"the trace has {len(marks)} annotations {BOUNDARY!r}; a step lies between two")
    return events, marks


def _with_duration(trace: Mapping[str, Any]) -> list[Event]:
    return [event for event in trace["traceEvents"] if event.get("ph") == "X"]


def _boundary_kernels(events: Iterable[Event], marks: list[Event]) -> list[Event]:
    """Each boundary's own kernel on the device: it waits its turn on the training stream."""
    launches = [event for event in events if str(event.get("cat", "")).endswith(("_runtime", "_driver"))]
    activity = {event["args"].get("correlation"): event for event in events if _is_on_device(event)}
    found = []
    for mark in marks:
        begin, end = _span(mark)
        ids = [
            launch["args"].get("correlation")
            for launch in launches
            if launch["tid"] == mark["tid"] and begin <= _begin(launch) < end
        ]
        kernels = [activity[number] for number in ids if number in activity]
        if not kernels:
            raise ValueError(
                "the trace has no device activity for a boundary between steps: the profiler did not record the "
                "device (CUPTI or roctracer missing, in use by another profiler, or not permitted); without profiled "
                "steps (profile_steps: 0) there is no need for it"
            )
        found.append(min(kernels, key=_begin))
    return found


def _communication_by_stream(events: Iterable[Event], begin: int, end: int) -> dict[object, list[Event]]:
    """Kernels of communication that began in the given time, in order."""
    rows: dict[object, list[Event]] = defaultdict(list)
    for event in sorted(filter(_is_communication, events), key=_begin):
        if begin <= _begin(event) < end:
            rows[event["args"].get("stream")].append(event)
    return rows


def _device_lanes(events: Iterable[Event], kinds: Mapping[int, str]) -> dict[str, Intervals]:
    """``kinds``: what is known of communication kernels, by their ``id``."""
    spans: dict[str, list[Span]] = defaultdict(list)
    for event in filter(_is_on_device, events):
        if _is_communication(event):
            lane = kinds.get(id(event)) or _kind(event)
        else:
            lane = COMPUTE if event["cat"] == "kernel" else COPY
        spans[lane].append(_span(event))
    return {name: union(rows) for name, rows in spans.items()}


def _is_communication(event: Event) -> bool:
    return event.get("cat") == "kernel" and bool(_COMMUNICATION.search(event["name"]))


def _kind(event: Event) -> str:
    # RCCL's kernels are generic, and all-to-all is made of sends: torch says what was asked for.
    return collective_of(str(event["args"].get("Collective name", "")), event["name"])


def _cpu_lanes(events: list[Event], thread: object) -> dict[str, Intervals]:
    own = sorted((event for event in events if event["tid"] == thread), key=lambda event: (_begin(event), -_end(event)))
    operators = [event for event in own if event.get("cat") == "cpu_op" and "::" in event["name"]]
    calls = [event for event in operators if event["name"].startswith(_COMMUNICATING_NAMESPACES)]
    computing: dict[str, list[Span]] = {COMPUTE: [], COPY: []}
    reached = 0
    for event in operators:
        # What one operator runs is its own; autograd's wrappers hold hooks that wait.
        if _begin(event) < reached or event["name"].startswith("autograd::"):
            continue
        reached = _end(event)
        computing[COPY if event["name"] == "aten::copy_" else COMPUTE].append(_span(event))
    waiting = union(map(_span, calls))
    lanes = {name: difference(union(rows), waiting) for name, rows in computing.items()}
    return lanes | _gloo_lanes(events, calls)


def _gloo_lanes(events: Iterable[Event], calls: list[Event]) -> dict[str, Intervals]:
    """What gloo's threads did, by what was asked for: gloo serves reduce-scatters with all-reduces."""
    works = sorted((event for event in events if event["name"].startswith("gloo:") and _is_host(event)), key=_begin)
    asked: dict[str, list[str]] = defaultdict(list)
    for call in calls:
        if call["name"] in _SERVED_AS:
            asked[_SERVED_AS[call["name"]]].append(call["name"])
    spans: dict[str, list[Span]] = defaultdict(list)
    for name in {work["name"] for work in works}:
        of_name = [work for work in works if work["name"] == name]
        # Its queue is first in, first out, so that the n-th call's work is the n-th; unless other calls end there too.
        names = asked[name] if len(asked[name]) == len(of_name) else [name] * len(of_name)
        for work, asked_name in zip(of_name, names, strict=True):
            spans[collective_of(asked_name)].append(_span(work))
    return {kind: union(rows) for kind, rows in spans.items()}


def _is_host(event: Event) -> bool:
    return event.get("cat") == "user_annotation"


def _is_on_device(event: Event) -> bool:
    return event.get("cat") in _DEVICE_CATEGORIES


def _begin(event: Event) -> int:
    """Microseconds with three decimals, as nanoseconds."""
    return round(float(event["ts"]) * 1000)


def _end(event: Event) -> int:
    return _begin(event) + round(float(event["dur"]) * 1000)


def _span(event: Event) -> Span:
    return _begin(event), _end(event)
