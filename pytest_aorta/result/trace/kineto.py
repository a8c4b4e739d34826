"""Reads when kernels or CPU work ran from a Kineto trace (torch.profiler's Chrome trace) of one rank. Pure.

On a device, activity is every kernel, copy and memset of the trace, on any stream. A trace of device activity alone
shows neither where a step begins nor which collective a kernel served, so one step is traced with host events as well
(:func:`learn_step`). On CPU ranks, compute is the work of operators on the training thread, and communication is the
work of gloo's own threads for a collective.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from pytest_aorta.common.errors import AortaError
from pytest_aorta.common.files import UnreadableFile, read_bytes
from pytest_aorta.common.text import brief
from pytest_aorta.result.measurements import Call, Collective, CollectiveCalls
from pytest_aorta.result.trace.families import (
    COMMUNICATION,
    GLOO,
    MAX_NAME,
    family_of,
    family_times,
    is_communication,
    serving,
)
from pytest_aorta.result.trace.intervals import Intervals, difference, union
from pytest_aorta.result.trace.overlap import Lane, OverlapCapture, overlap_of

Event: TypeAlias = Mapping[str, Any]
Span: TypeAlias = tuple[int, int]

# Limits of one rank's trace, packed and unpacked. A step of an 8B model on one rank has about 30 MB with host events.
MAX_TRACE_BYTES = 256 << 20
MAX_TRACE_VALUES = 16_000_000
# The remedy for a trace that is too large.
FEWER = "trace fewer steps, or steps with fewer micro-batches"
# Times are nanoseconds in 64 bits.
_MAX_NS = 1 << 63
_NUMBER = (int, float)
_EVENT_KEYS: dict[str, tuple[type, ...]] = {
    "ph": (str,), "name": (str,), "cat": (str,), "ts": _NUMBER, "dur": _NUMBER, "args": (dict,), "pid": (int, str),
    "tid": (int, str), "id": (int, str),
}  # fmt: skip
_KIND_NAMES: dict[type, str] = {str: "text", int: "an integer", dict: "an object"}

# The annotation around the work that separates profiled steps: n + 1 boundaries for n steps.
BOUNDARY = "aorta::boundary"
_DEVICE_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}
# Searched in the lower-case letters of a collective's or kernel's name, in this order.
_KINDS = {
    "reducescatter": Collective.REDUCE_SCATTER,
    "allgather": Collective.ALL_GATHER,
    "allreduce": Collective.ALL_REDUCE,
    "alltoall": Collective.ALL_TO_ALL,
    "broadcast": Collective.BROADCAST,
    "send": Collective.SEND_RECV,
    "recv": Collective.SEND_RECV,
}
# Runtime calls that return only after the device has done earlier work: CUDA's, HIP's of the same names, and the copy
# that torch's .item() makes on HIP.
_BLOCKING = re.compile(r"^(cuda|hip|cu)(\w*Synchronize|Free|Memcpy|MemcpyDtoH)(_v\d+)?$|^hipMemcpyWithStream$")
_COMMUNICATING_NAMESPACES = ("c10d::", "_c10d_functional::", "c10d_functional::", "_c10d_functional_autograd::")
# Operators that gloo serves with another collective than the requested one -> the collective that serves them.
_SERVED_AS = {
    "c10d::_reduce_scatter_base_": "gloo:all_reduce",
    "c10d::reduce_scatter_tensor_coalesced_": "gloo:all_reduce",
    "c10d::allreduce_": "gloo:all_reduce",
}
# Limits on the stored calls of a rank's collectives; the schema has the same limits.
_MAX_KEPT_COLLECTIVES = 64
_MAX_KEPT_CALLS = 4096
_MAX_GROUP_TEXT = 160
_MAX_GROUP_SIZE = 10_000_000
_MAX_ELEMENTS = 1 << 56
# Bytes of an element by the name of its dtype in torch's records of collectives.
_ELEMENT_BYTES = {
    "Byte": 1, "Char": 1, "Bool": 1, "Half": 2, "BFloat16": 2, "Short": 2, "Int": 4, "Float": 4, "Long": 8,
    "Double": 8, "ComplexFloat": 8, "ComplexDouble": 16,
}  # fmt: skip
# Collectives on lists of tensors, by torch's names. The tensors may have unequal sizes, and torch records only the size
# of the rank's own.
_ON_LISTS = {"all_gather", "reduce_scatter"}


class TraceError(AortaError, ValueError):
    """An error in a file that is not a readable trace; the message names the file and the event."""


class TraceTooLarge(TraceError):
    """An error in a trace beyond the limits; the message names the size and the limit.

    Attributes:
        num_bytes: the size of the file; 0 if it is within the limit.
        num_values: the number of JSON values in the trace; 0 if it is within the limit or was not counted.
    """

    def __init__(self, path: Path, *, num_bytes: int = 0, num_values: int = 0) -> None:
        super().__init__(f"{path}: {excess(num_bytes, num_values)}; {FEWER}")
        self.num_bytes, self.num_values = num_bytes, num_values


def excess(num_bytes: int, num_values: int, where: str = "") -> str:
    """Return text on the size of a trace that is too large, ``where`` it is, and the limit; 0 is within a limit."""
    number, limit, unit = (
        (num_bytes, MAX_TRACE_BYTES, "bytes") if num_bytes else (num_values, MAX_TRACE_VALUES, "values")
    )
    return f"{number:,} {unit}{where}, and at most {limit:,} are read"


def read_trace(path: Path) -> dict[str, Any]:
    """Return the document of a trace file, gzipped or not.

    Raises:
        TraceTooLarge: The file has too many bytes or values.
        TraceError: The file can't be read, is too large when unpacked, or is not a Chrome trace.
    """
    if (num_bytes := _num_bytes(path)) > MAX_TRACE_BYTES:
        raise TraceTooLarge(path, num_bytes=num_bytes)
    try:
        data = _unzipped(path, read_bytes(path, max_bytes=MAX_TRACE_BYTES))
    except UnreadableFile as error:
        raise TraceError(str(error)) from None
    # A value of two bytes, "[]," for example, takes thirty times as much memory.
    if (num_values := sum(map(data.count, (b",", b"[", b"{")))) > MAX_TRACE_VALUES:
        raise TraceTooLarge(path, num_values=num_values)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise TraceError(f"{path}: not a Chrome trace, which is an object with a list traceEvents")
    base_ns = document.get("baseTimeNanoseconds", 0)
    if not isinstance(base_ns, int) or abs(base_ns) >= _MAX_NS:
        raise TraceError(f"{path}: baseTimeNanoseconds: got {brief(repr(base_ns))}, allowed is an integer of 64 bits")
    for number, event in enumerate(document["traceEvents"]):
        if problem := _malformed(event):
            raise TraceError(f"{path}: traceEvents[{number}]{problem}")
    return document


def _num_bytes(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0  # Reading the file raises an error that names the cause.


def _unzipped(path: Path, data: bytes) -> bytes:
    if data[:2] != b"\x1f\x8b":
        return data
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            text = file.read(MAX_TRACE_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: not a whole gzip file: {error}") from None
    if len(text) > MAX_TRACE_BYTES:
        raise TraceError(
            f"{path}: {len(data):,} bytes are more than {MAX_TRACE_BYTES:,} bytes when unpacked, which is the limit; "
            f"{FEWER}"
        )
    return text


def _malformed(event: Any) -> str:
    """Return the first missing or wrong key of an event, with its value and the allowed types; empty if valid."""
    if not isinstance(event, dict):
        return f": got {brief(repr(event))}, allowed is an object"
    phase = event.get("ph")
    for key, kind in _EVENT_KEYS.items():
        required = key in ("ph", "name") or (key == "ts" and phase != "M") or (key == "dur" and phase == "X")
        if key not in event:
            if required:
                return f": key {key!r} is missing"
            continue
        value = event[key]
        is_right = isinstance(value, kind) and not isinstance(value, bool)
        if kind is _NUMBER:
            is_right = is_right and abs(value) < _MAX_NS
        if not is_right:
            names = "a number within 64 bits" if kind is _NUMBER else " or ".join(_KIND_NAMES[one] for one in kind)
            return f".{key}: got {brief(repr(value))}, allowed is {names}"
    if event["name"] == "thread_name" and not isinstance(event.get("args", {}).get("name"), str):
        return ".args.name: missing or not text, which a thread_name has"
    return ""


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
        ValueError: As in :func:`overlap_of_trace`, or the workload's own kernels have the name of the boundary's.
    """
    events, marks = _events(trace)
    kernels = _boundary_kernels(events, marks)
    name = str(kernels[0]["name"])
    if sum(event["name"] == name for event in events if _is_on_device(event)) != len(marks):
        raise ValueError(
            f"kernel {name} separates profiled steps, but the workload runs it too; set profile_steps: 0 to measure "
            "without profiled steps"
        )
    names = _serving_names(events)
    inside = _communication_by_stream(events, names, _begin(kernels[0]), _begin(kernels[-1]))
    calls = {stream: [(kernel["name"], _call(kernel)) for kernel in rows] for stream, rows in inside.items()}
    return LearnedStep(name, calls, names)


def overlap_of_trace(trace: Mapping[str, Any], *, on_device: bool) -> OverlapCapture:
    """Return the breakdown of the steps between the trace's boundaries.

    Args:
        trace: the document of a rank's trace.
        on_device: whether to read the accelerator's activity rather than that of the rank's threads.

    Raises:
        ValueError: The trace has fewer than two boundaries, or no device activity for them.
    """
    events, marks = _events(trace)
    if not on_device:
        return _cpu_capture(events, [_begin(mark) for mark in marks], marks[0]["tid"])
    kernels = _boundary_kernels(events, marks)
    edges = [_begin(kernel) for kernel in kernels]
    names = _serving_names(events)
    inside = _communication_by_stream(events, names, edges[0], edges[-1])
    calls = {id(kernel): _call(kernel) for rows in inside.values() for kernel in rows}
    return _device_capture(events, edges, LearnedStep(str(kernels[0]["name"]), {}, names), calls)


def overlap_of_device(
    trace: Mapping[str, Any],
    step: LearnedStep,
    num_steps: int,
    waits_ms: Mapping[Call, Sequence[float]] = MappingProxyType({}),
) -> OverlapCapture:
    """Return the breakdown of ``num_steps`` steps like ``step`` from a trace of device activity alone.

    A stream whose communication does not repeat that of ``step`` is classified by its kernels' names. ``waits_ms``
    contains waits for late ranks at the beginning of calls by :attr:`Call.key`, in order, which are no communication
    (:func:`~pytest_aorta.result.trace.transfers.waits_ms`).

    Raises:
        ValueError: The trace does not have ``num_steps`` + 1 boundaries.
    """
    events = _with_duration(trace)
    edges = sorted(_begin(event) for event in events if _is_on_device(event) and event["name"] == step.boundary)
    if len(edges) != num_steps + 1:
        raise ValueError(
            f"the trace has {len(edges)} kernels {step.boundary} between {num_steps} steps: the profiler lost activity"
        )
    calls: dict[int, Call] = {}
    for stream, kernels in _communication_by_stream(events, step.names, edges[0], edges[-1]).items():
        expected = step.communication.get(stream, []) * num_steps
        is_repeated = [kernel["name"] for kernel in kernels] == [name for name, _ in expected]
        served = [call for _, call in expected] if is_repeated else [_call(kernel) for kernel in kernels]
        calls |= {id(kernel): call for kernel, call in zip(kernels, served, strict=True)}
    return _device_capture(events, edges, step, calls, waits_ms)


def _device_capture(
    events: Iterable[Event],
    edges: list[int],
    step: LearnedStep,
    calls: Mapping[int, Call],
    waits_ms: Mapping[Call, Sequence[float]] = MappingProxyType({}),
) -> OverlapCapture:
    """Return the capture of a device's steps; ``calls`` maps the ``id`` of each communication kernel to its call."""
    inside = [event for event in sorted(filter(_is_on_device, events), key=_begin) if _is_within(event, edges)]
    durations = [(_family(event, calls), _duration(event)) for event in inside if event["name"] != step.boundary]
    waits_ns = _waits_ns([event for event in inside if id(event) in calls], calls, waits_ms)
    kinds = {number: call.kind for number, call in calls.items()}
    capture = _overlap(edges, _device_lanes(events, step.names, kinds, waits_ns))
    return replace(
        capture,
        kernels=family_times(durations, len(edges) - 1),
        collectives=_collectives((calls[id(event)], _duration(event)) for event in inside if id(event) in calls),
    )


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


def _is_within(event: Event, edges: list[int]) -> bool:
    return edges[0] <= _begin(event) < edges[-1]


def _duration(event: Event) -> int:
    return _end(event) - _begin(event)


def _family(event: Event, calls: Mapping[int, Call]) -> str:
    family = family_of(event["name"])
    if id(event) not in calls:
        return family
    # The names of RCCL's kernels do not show the collective, and other names do not show that kernels communicate.
    is_clear = is_communication(family) and collective_of(family) is not Collective.OTHER
    return family if is_clear else serving(family, calls[id(event)].kind)


def _collectives(calls: Iterable[tuple[Call, int]]) -> list[CollectiveCalls]:
    """Return the durations in ms of calls with equal keys, in groups; the group with the longest total comes first."""
    durations: dict[Call, list[float]] = defaultdict(list)
    sizes: dict[Call, list[int | None]] = defaultdict(list)
    for call, duration_ns in calls:
        if len(durations[call.key]) < _MAX_KEPT_CALLS:
            durations[call.key].append(duration_ns / 1e6)
            sizes[call.key].append(call.num_bytes)
    longest = sorted(durations.items(), key=lambda entry: -sum(entry[1]))[:_MAX_KEPT_COLLECTIVES]
    return [CollectiveCalls(key.kind, key.group, key.group_size, _mean_size(sizes[key]), ms) for key, ms in longest]


def _mean_size(sizes: Sequence[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) // len(known) if len(known) == len(sizes) else None


def _overlap(edges: list[int], lanes: Mapping[str, Intervals]) -> OverlapCapture:
    origin = edges[0]
    return overlap_of(
        {name: lane - origin for name, lane in lanes.items()}, [(a - origin, b - origin) for a, b in pairwise(edges)]
    )


def find_blocking_call(trace: Mapping[str, Any]) -> str | None:
    """Return the runtime call in which the host waits for the device within a step, with its operator, or None.

    The longest such call is named. Calls of threads that launch nothing, such as NCCL's watchdog, don't count.
    """
    events, marks = _events(trace)
    calls = [event for event in events if str(event.get("cat", "")).endswith(("_runtime", "_driver"))]
    threads = {event["tid"] for event in calls if "aunchKernel" in event["name"]}
    begin, end = _begin(marks[0]), _begin(marks[-1])
    waits = [
        event
        for event in calls
        if event["tid"] in threads and _BLOCKING.search(event["name"]) and begin <= _begin(event) < end
    ]
    if not waits:
        return None
    longest = max(waits, key=lambda event: event["dur"])
    around = [
        event
        for event in events
        if event.get("cat") == "cpu_op" and event["tid"] == longest["tid"] and _holds(event, longest)
    ]
    names = [event["name"] for event in sorted(around, key=_begin)]
    return " in ".join([longest["name"], *names[:1]])


def steps_alone(trace: Mapping[str, Any], *, on_device: bool) -> dict[str, Any]:
    """Return the trace without events outside the boundaries, such as the ranks' barrier and the profiler itself."""
    events, marks = _events(trace)
    host = _begin(marks[0]), _end(marks[-1])
    edges = [_begin(kernel) for kernel in _boundary_kernels(events, marks)] if on_device else host

    def is_of_steps(event: Event) -> bool:
        if "ts" not in event or event.get("ph") == "M":
            return True
        first, last = (edges[0], edges[-1]) if _is_on_device(event) else host
        return first <= _begin(event) <= (last if event.get("ph") == "X" else max(last, edges[-1]))

    return {**trace, "traceEvents": [event for event in trace["traceEvents"] if is_of_steps(event)]}


def collective_of(*names: str) -> Collective:
    """Return the kind of communication of the first name that reveals one, e.g. a kernel's name; else ``other``."""
    for name in names:
        letters = re.sub("[^a-z]", "", name.lower())
        if kind := next((kind for part, kind in _KINDS.items() if part in letters), None):
            return kind
    return Collective.OTHER


def _events(trace: Mapping[str, Any]) -> tuple[list[Event], list[Event]]:
    """Return all events with a duration, and the boundaries in order."""
    events = _with_duration(trace)
    marks = sorted((event for event in events if event["name"] == BOUNDARY and _is_host(event)), key=_begin)
    if len(marks) < 2:
        raise ValueError(f"the trace has {len(marks)} annotations {BOUNDARY!r}; at least two are needed for a step")
    return events, marks


def _with_duration(trace: Mapping[str, Any]) -> list[Event]:
    return [event for event in trace["traceEvents"] if event.get("ph") == "X"]


def _boundary_kernels(events: Iterable[Event], marks: list[Event]) -> list[Event]:
    """Return each boundary's own kernel on the device, which runs in order on the training stream."""
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
                "device (CUPTI or roctracer missing, in use by another profiler, or not permitted); set "
                "profile_steps: 0 to measure without profiled steps"
            )
        found.append(min(kernels, key=_begin))
    return found


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
    for event in sorted((event for event in events if _is_communication(event, names)), key=_begin):
        if begin <= _begin(event) < end:
            rows[event["args"].get("stream")].append(event)
    return rows


def _device_lanes(
    events: Iterable[Event], names: frozenset[str], kinds: Mapping[int, Collective], waits_ns: Mapping[int, int]
) -> dict[str, Intervals]:
    """Return the lanes of device activity; ``kinds`` and ``waits_ns`` map the ``id`` of events to what is known."""
    spans: dict[str, list[Span]] = defaultdict(list)
    for event in filter(_is_on_device, events):
        begin, end = _span(event)
        if _is_communication(event, names):
            lane: str = kinds.get(id(event)) or _kind(event)
            arrived = begin + waits_ns.get(id(event), 0)
            spans[Lane.WAIT].append((begin, arrived))
            spans[lane].append((arrived, end))
        else:
            spans[Lane.COMPUTE if event["cat"] == "kernel" else Lane.COPY].append((begin, end))
    return {name: union(rows) for name, rows in spans.items()}


def _is_communication(event: Event, names: frozenset[str]) -> bool:
    """Return True for a kernel of a collective: one of ``names``, or one that its name reveals."""
    return event.get("cat") == "kernel" and bool(event["name"] in names or COMMUNICATION.search(event["name"]))


def _kind(event: Event) -> Collective:
    # RCCL's kernels have generic names, and an all-to-all consists of sends. Torch records the requested collective.
    return collective_of(str(event["args"].get("Collective name", "")), event["name"])


def _call(kernel: Event) -> Call:
    """Return the call that a kernel served, as far as the trace has host events that show it."""
    args = kernel["args"]
    parts = [str(args[key]) for key in ("Process Group Name", "Process Group Ranks") if args.get(key) is not None]
    counts = [args[key] for key in ("In msg nelems", "Out msg nelems") if _is_count(args.get(key), 0)]
    dtype = str(args.get("dtype", ""))
    element_bytes = 1 if dtype.startswith("Float8") else _ELEMENT_BYTES.get(dtype)
    is_known = counts and element_bytes and args.get("Collective name") not in _ON_LISTS
    size = args.get("Group size")
    return Call(
        _kind(kernel),
        " ".join(parts)[:_MAX_GROUP_TEXT],
        size if _is_count(size, 1) and size <= _MAX_GROUP_SIZE else None,
        max(counts) * element_bytes if is_known and element_bytes else None,
    )


def _is_count(value: object, least: int) -> bool:
    return type(value) is int and least <= value < _MAX_ELEMENTS


def _cpu_capture(events: list[Event], edges: list[int], thread: object) -> OverlapCapture:
    operators = _operators(events, thread)
    works = _gloo_works(events, operators)
    gloo = [(kind, work) for kind, work in works if _is_within(work, edges)]
    lanes = _cpu_lanes(operators) | _gloo_lanes(works)
    durations = [(name[:MAX_NAME], own_ns) for name, own_ns in _own_times(operators, edges)]
    durations += [(f"{GLOO}{kind}", _duration(work)) for kind, work in gloo]
    return replace(
        _overlap(edges, lanes),
        kernels=family_times(durations, len(edges) - 1),
        collectives=_collectives((Call(kind), _duration(work)) for kind, work in gloo),
    )


def _operators(events: Iterable[Event], thread: object) -> list[Event]:
    """Return a thread's operators, each before those that it calls."""
    own = [event for event in events if event["tid"] == thread and event.get("cat") == "cpu_op"]
    return sorted((event for event in own if "::" in event["name"]), key=lambda event: (_begin(event), -_end(event)))


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
        while callers and _end(found[callers[-1]]) <= _begin(event):
            callers.pop()
        if callers:
            own_ns[callers[-1]] -= _duration(event)
        callers.append(len(found))
        found.append(event)
        own_ns.append(_duration(event))
    return [
        (event["name"], max(0, time_ns))
        for event, time_ns in zip(found, own_ns, strict=True)
        if _is_within(event, edges) and not event["name"].startswith(_COMMUNICATING_NAMESPACES)
    ]


def _cpu_lanes(operators: Iterable[Event]) -> dict[str, Intervals]:
    calls = [event for event in operators if event["name"].startswith(_COMMUNICATING_NAMESPACES)]
    computing: dict[Lane, list[Span]] = {Lane.COMPUTE: [], Lane.COPY: []}
    reached = 0
    for event in operators:
        # An operator includes the operators that it calls. Autograd's wrappers include hooks that wait, so they are
        # left out and their operators count.
        if _begin(event) < reached or event["name"].startswith("autograd::"):
            continue
        reached = _end(event)
        computing[Lane.COPY if event["name"] == "aten::copy_" else Lane.COMPUTE].append(_span(event))
    waiting = union(map(_span, calls))
    return {name: difference(union(rows), waiting) for name, rows in computing.items()}


def _gloo_lanes(works: Iterable[tuple[Collective, Event]]) -> dict[str, Intervals]:
    spans: dict[str, list[Span]] = defaultdict(list)
    for kind, work in works:
        spans[kind].append(_span(work))
    return {kind: union(rows) for kind, rows in spans.items()}


def _gloo_works(events: Iterable[Event], operators: Iterable[Event]) -> list[tuple[Collective, Event]]:
    """Return the work of gloo's threads with the requested collective: gloo serves reduce-scatters with all-reduces."""
    works = sorted((event for event in events if event["name"].startswith("gloo:") and _is_host(event)), key=_begin)
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
    return sorted(found, key=lambda entry: _begin(entry[1]))


def _is_host(event: Event) -> bool:
    return event.get("cat") == "user_annotation"


def _is_on_device(event: Event) -> bool:
    return event.get("cat") in _DEVICE_CATEGORIES


def _begin(event: Event) -> int:
    """Return the beginning in nanoseconds; traces have microseconds with three decimals."""
    return round(float(event["ts"]) * 1000)


def _holds(outer: Event, inner: Event) -> bool:
    return _begin(outer) <= _begin(inner) and _end(inner) <= _end(outer)


def _end(event: Event) -> int:
    return _begin(event) + round(float(event["dur"]) * 1000)


def _span(event: Event) -> Span:
    return _begin(event), _end(event)
