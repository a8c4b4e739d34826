"""Reads a Kineto trace (torch.profiler's Chrome trace) of one rank: which kernels, or CPU work, ran when. Pure.

On a device, activity is what Kineto has as kernels, copies and memsets, on any stream. On CPU ranks, compute is the
work of operators on the training thread, and communication what gloo's own threads do for a collective.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

from pytest_aorta.intervals import Intervals, difference, union
from pytest_aorta.overlap import COMPUTE, COPY, OverlapCapture, overlap_of

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


def overlap_of_trace(trace: Mapping[str, Any], *, on_device: bool) -> OverlapCapture:
    """Where the time of the steps between the trace's boundaries went.

    ``on_device``: by what the accelerator did; else by what the rank's threads did.

    Raises:
        ValueError: the trace has fewer than two boundaries, or no device activity for them.
    """
    events, marks = _events(trace)
    if on_device:
        edges, lanes = _device_edges(events, marks), _device_lanes(events)
    else:
        edges, lanes = [_begin(mark) for mark in marks], _cpu_lanes(events, marks[0]["tid"])
    windows = list(pairwise(edges))
    origin = edges[0]
    return overlap_of(
        {name: lane - origin for name, lane in lanes.items()}, [(a - origin, b - origin) for a, b in windows]
    )


def steps_alone(trace: Mapping[str, Any], *, on_device: bool) -> dict[str, Any]:
    """The trace without what began before the first boundary or after the last: ranks' meeting, the profiler itself."""
    events, marks = _events(trace)
    host = _begin(marks[0]), _end(marks[-1])
    edges = _device_edges(events, marks) if on_device else host

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
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    marks = sorted((event for event in events if event["name"] == BOUNDARY and _is_host(event)), key=_begin)
    if len(marks) < 2:
        raise ValueError(f"the trace has {len(marks)} annotations {BOUNDARY!r}; a step lies between two")
    return events, marks


def _device_edges(events: Iterable[Event], marks: list[Event]) -> list[int]:
    """When each boundary's own kernel began on the device: it waits its turn on the training stream."""
    launches = [event for event in events if str(event.get("cat", "")).endswith(("_runtime", "_driver"))]
    activity = {event["args"].get("correlation"): event for event in events if _is_on_device(event)}
    edges = []
    for mark in marks:
        begin, end = _span(mark)
        ids = [
            launch["args"].get("correlation")
            for launch in launches
            if launch["tid"] == mark["tid"] and begin <= _begin(launch) < end
        ]
        kernels = [_begin(activity[number]) for number in ids if number in activity]
        if not kernels:
            raise ValueError(
                "the trace has no device activity for a boundary between steps: the profiler did not record the "
                "device (CUPTI or roctracer missing, in use by another profiler, or not permitted); without profiled "
                "steps (profile_steps: 0) there is no need for it"
            )
        edges.append(min(kernels))
    return edges


def _device_lanes(events: Iterable[Event]) -> dict[str, Intervals]:
    spans: dict[str, list[Span]] = defaultdict(list)
    for event in events:
        if _is_on_device(event):
            spans[_device_lane(event)].append(_span(event))
    return {name: union(rows) for name, rows in spans.items()}


def _device_lane(event: Event) -> str:
    if event["cat"] != "kernel":
        return COPY
    if not _COMMUNICATION.search(event["name"]):
        return COMPUTE
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
