"""Parses Kineto's profiles within limits, and computes what was captured in profiled steps of devices and of CPUs."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from pytest_aorta.common.errors import AortaError
from pytest_aorta.common.files import raised_as, without_collection
from pytest_aorta.common.model import decode
from pytest_aorta.result.trace.families import (
    GLOO,
    MAX_NAME,
    communicates,
    family_of,
    family_times,
    is_communication,
    serving,
)
from pytest_aorta.result.trace.overlap import Intervals, Lane, difference, overlap_of, union
from pytest_aorta.result.trace.profiled_steps import Call, Collective, Profile, joined_calls

# Limits of one rank's trace. A step of an 8B model on one rank has about 30 MB with host events.
MAX_TRACE_BYTES = 256 << 20
MAX_TRACE_VALUES = 16_000_000
# The remedy for a trace that is too large.
FEWER = "trace fewer steps, or steps with fewer micro-batches"


class TraceError(AortaError, ValueError):
    """An error in a trace that can't be parsed; the message names the file and the place."""


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


def check_size(path: Path) -> None:
    """Raise TraceTooLarge if a file has too many bytes to be read."""
    if (num_bytes := path.stat().st_size) > MAX_TRACE_BYTES:
        raise TraceTooLarge(path, num_bytes=num_bytes)


@without_collection()
def parse_trace(path: Path, data: bytes) -> dict[str, Any]:
    """Return the document of a trace that torch has written; errors name ``path``.

    Raises:
        TraceTooLarge: The trace has too many values.
        TraceError: It is not JSON, as where a program gave an annotation a name that torch does not escape.
    """
    # A value of two bytes, "[]," for example, takes thirty times as much memory.
    if (num_values := sum(map(data.count, (b",", b"[", b"{")))) > MAX_TRACE_VALUES:
        raise TraceTooLarge(path, num_values=num_values)
    with raised_as(TraceError):
        document: dict[str, Any] = decode(data, dict[str, Any], str(path), by_hand=False)
    return document


Trace: TypeAlias = Mapping[str, Any]
Event: TypeAlias = Mapping[str, Any]
# What torch recorded of an event, by name.
Args: TypeAlias = Mapping[str, Any]
Span: TypeAlias = tuple[int, int]
# The annotation around the work that separates profiled steps: n + 1 boundaries for n steps.
BOUNDARY = "aorta::boundary"
_DEVICE_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}


def events_and_boundaries(trace: Trace) -> tuple[list[Event], list[Event]]:
    """Return all events with a duration, and the boundaries in order.

    Raises:
        ValueError: The trace has fewer than two boundaries.
    """
    events = _with_duration(trace)
    marks = sorted((event for event in events if event["name"] == BOUNDARY and is_annotation(event)), key=begin_of)
    if len(marks) < 2:
        raise ValueError(f"the trace has {len(marks)} annotations {BOUNDARY!r}; at least two are needed for a step")
    return events, marks


def _with_duration(trace: Trace) -> list[Event]:
    """Return the events that have a duration, with their spans; an event without arguments gets empty ones."""
    events = (event for event in trace["traceEvents"] if event.get("ph") == "X")
    # A span is asked for dozens of times. A clock that was set back can make a duration negative.
    return [
        {"args": {}, **event, "begin": begin, "end": begin + max(0, _nanoseconds(event["dur"]))}
        for event in events
        for begin in [_nanoseconds(event["ts"])]
    ]


def _boundary_kernels(events: Iterable[Event], marks: list[Event]) -> list[Event]:
    """Return each boundary's own kernel on the device, which runs in order on the training stream.

    Raises:
        ValueError: The trace has no device activity for a boundary.
    """
    launches = [event for event in events if is_runtime_call(event)]
    activity = by_correlation(filter(is_on_device, events))
    found = []
    for mark in marks:
        kernels = [
            activity[number]
            for launch in launches
            if launch["tid"] == mark["tid"]
            and is_within(launch, span_of(mark))
            and (number := launch["args"].get("correlation")) in activity
        ]
        if not kernels:
            raise ValueError(
                "the trace has no device activity for a boundary between steps: the profiler did not record the "
                "device (CUPTI or roctracer missing, in use by another profiler, or not permitted); set "
                "profile_steps: 0 to measure without profiled steps"
            )
        found.append(min(kernels, key=begin_of))
    return found


def by_correlation(events: Iterable[Event]) -> dict[object, Event]:
    """Return calls of the runtime, or activity of the device, by the number that a call and its activity share."""
    found = {event["args"].get("correlation"): event for event in events}
    # A call without a correlation does not belong to activity without one, such as kernels of a graph.
    found.pop(None, None)
    return found


def steps_alone(trace: Trace, *, on_device: bool) -> dict[str, Any]:
    """Return the trace without events outside the boundaries, such as the ranks' barrier and the profiler itself."""
    events, marks = events_and_boundaries(trace)
    host = begin_of(marks[0]), end_of(marks[-1])
    edges = [begin_of(kernel) for kernel in _boundary_kernels(events, marks)] if on_device else host

    def is_of_steps(event: Event) -> bool:
        if "ts" not in event or event.get("ph") == "M":
            return True
        first, last = (edges[0], edges[-1]) if is_on_device(event) else host
        return first <= _nanoseconds(event["ts"]) <= (last if event.get("ph") == "X" else max(last, edges[-1]))

    return {**trace, "traceEvents": [event for event in trace["traceEvents"] if is_of_steps(event)]}


def is_annotation(event: Event) -> bool:
    """Return True for a span that a program on the host named."""
    return event.get("cat") == "user_annotation"


def is_runtime_call(event: Event) -> bool:
    """Return True for a call of the device's runtime or driver."""
    return str(event.get("cat", "")).endswith(("_runtime", "_driver"))


def waits_of_host(calls: Sequence[Event]) -> list[Event]:
    """Return the runtime calls that return only after the device has done earlier work.

    Calls of threads that launch nothing, such as NCCL's watchdog, don't count.
    """
    threads = {call["tid"] for call in calls if "aunchKernel" in call["name"]}
    return [call for call in calls if call["tid"] in threads and _BLOCKING.search(call["name"])]


def operators_of(events: Iterable[Event]) -> list[Event]:
    """Return the operators, in the order of the events."""
    return [event for event in events if event.get("cat") == "cpu_op" and "::" in event["name"]]


def by_thread(events: Iterable[Event]) -> list[Event]:
    """Return events by thread, each before those that ran while it did."""
    return sorted(events, key=lambda event: (str(event["tid"]), event["begin"], -event["end"]))


def works_of_gloo(events: Iterable[Event]) -> list[Event]:
    """Return the work of gloo's threads, in order."""
    return sorted((one for one in events if one["name"].startswith("gloo:") and is_annotation(one)), key=begin_of)


def tensors_of(args: Args) -> list[tuple[str, list[list[int]]]]:
    """Return the type and shapes of each argument that is a tensor, or a list of tensors, whose type is empty."""
    given = zip(args.get("Input type", ()), args.get("Input Dims", ()), strict=False)
    return [
        ("", [*dims]) if kind == "TensorList" else (str(kind), [dims])
        for kind, dims in given
        if kind not in ("", "Scalar", "ScalarList")
    ]


def is_on_device(event: Event) -> bool:
    """Return True for a kernel, copy or memset."""
    return event.get("cat") in _DEVICE_CATEGORIES


def is_within(event: Event, edges: Sequence[int]) -> bool:
    """Return True if the event began between the first and the last of ``edges``."""
    return edges[0] <= begin_of(event) < edges[-1]


def holds(outer: Event, inner: Event) -> bool:
    """Return True if ``inner`` ran while ``outer`` did."""
    return begin_of(outer) <= begin_of(inner) and end_of(inner) <= end_of(outer)


def _nanoseconds(time: float) -> int:
    """Return a time in whole nanoseconds; traces have microseconds with three decimals."""
    return round(float(time) * 1000)


def begin_of(event: Event) -> int:
    """Return the beginning of an event that has a duration, in nanoseconds."""
    begin: int = event["begin"]
    return begin


def end_of(event: Event) -> int:
    """Return the end of an event that has a duration, in nanoseconds."""
    end: int = event["end"]
    return end


def _duration_of(event: Event) -> int:
    """Return the duration in nanoseconds."""
    return end_of(event) - begin_of(event)


def span_of(event: Event) -> Span:
    """Return beginning and end in nanoseconds."""
    return begin_of(event), end_of(event)


# Searched in the lower-case letters of a collective's or kernel's name, in this order.
_KINDS = {
    "reducescatter": Collective.REDUCE_SCATTER,
    "allgather": Collective.ALL_GATHER,
    "allreduce": Collective.ALL_REDUCE,
    "alltoall": Collective.ALL_TO_ALL,
    "broadcast": Collective.BROADCAST,
    "send": Collective.SEND_RECV,
    "recv": Collective.SEND_RECV,
    # A gather of NVSHMEM, a custom all-reduce of vLLM, and the exchange of tokens of DeepEP.
    "fcollect": Collective.ALL_GATHER,
    "crossdevicereduce": Collective.ALL_REDUCE,
    "deepep": Collective.ALL_TO_ALL,
}
# Limits on what a call says of its group and size; the schema has the same limits.
_MAX_GROUP_TEXT = 160
_MAX_GROUP_SIZE = 10_000_000
_MAX_ELEMENTS = 1 << 56
# The names of types of elements in torch's records of collectives and in Kineto's arguments -> torch's own names.
DTYPES = {
    "float": "float32",
    "Float": "float32",
    "double": "float64",
    "Double": "float64",
    "c10::BFloat16": "bfloat16",
    "BFloat16": "bfloat16",
    "c10::Half": "float16",
    "Half": "float16",
    "long": "int64",
    "long int": "int64",
    "Long": "int64",
    "int": "int32",
    "Int": "int32",
    "short": "int16",
    "Short": "int16",
    "unsigned char": "uint8",
    "Byte": "uint8",
    "signed char": "int8",
    "Char": "int8",
    "bool": "bool",
    "Bool": "bool",
    "ComplexFloat": "complex64",
    "c10::complex<float>": "complex64",
    "ComplexDouble": "complex128",
    "c10::complex<double>": "complex128",
}
_BITS = re.compile(r"(?:c10::)?(?:u?int|b?float|complex)(\d+)\w*")
# Collectives on lists of tensors, by torch's names. The tensors may have unequal sizes, and torch records only the size
# of the rank's own.
_ON_LISTS = {"all_gather", "reduce_scatter"}


def collective_of(*names: str) -> Collective:
    """Return the kind of communication of the first name that reveals one, e.g. a kernel's name; else ``other``."""
    for name in names:
        letters = re.sub("[^a-z]", "", name.lower())
        if kind := next((kind for part, kind in _KINDS.items() if part in letters), None):
            return kind
    return Collective.OTHER


def _kind_of(args: Args, *names: str) -> Collective:
    """Return the collective that a kernel served: the requested one if torch recorded it, else by the kernel's name."""
    # RCCL's kernels have generic names, and an all-to-all consists of sends.
    return collective_of(str(args.get("Collective name", "")), *names)


def _call_of(transfer: Event, copies: Mapping[int, Args]) -> Call | None:
    """Return the call that a kernel or one of ``copies`` served, as far as the trace has host events that show it."""
    if not _is_copy(transfer):
        return _served(transfer["args"], transfer["name"])
    # Several copies are one call, whose size is that of none of them.
    return _served(copies[id(transfer)]).replace(num_bytes=None) if id(transfer) in copies else None


def _served(args: Args, *names: str) -> Call:
    parts = [str(args[key]) for key in ("Process Group Name", "Process Group Ranks") if args.get(key) is not None]
    counts = [args[key] for key in ("In msg nelems", "Out msg nelems") if _is_count(args.get(key), 0)]
    num_bytes = element_bytes(str(args.get("dtype", "")))
    is_known = counts and args.get("Collective name") not in _ON_LISTS
    size: Any = args.get("Group size")
    return Call(
        _kind_of(args, *names),
        " ".join(parts)[:_MAX_GROUP_TEXT],
        size if _is_count(size, 1) and size <= _MAX_GROUP_SIZE else None,
        max(counts) * num_bytes if is_known and num_bytes else None,
    )


def element_bytes(dtype: str) -> int | None:
    """Return the bytes of an element of a type by any name in :data:`DTYPES`; None if the type is not known."""
    name = DTYPES.get(dtype, dtype).lower()
    bits = _BITS.fullmatch(name)
    return int(bits[1]) // 8 if bits else 1 if name == "bool" else None


def _is_count(value: object, least: int) -> bool:
    return type(value) is int and least <= value < _MAX_ELEMENTS


# Runtime calls that return only after the device has done earlier work: CUDA's, HIP's of the same names, and the copy
# that torch's .item() makes on HIP.
_BLOCKING = re.compile(r"^(cuda|hip|cu)(\w*Synchronize|Free|Memcpy|MemcpyDtoH)(_v\d+)?$|^hipMemcpyWithStream$")


def find_blocking_call(trace: Trace) -> str | None:
    """Return the longest wait of the host for the device within a step, with its operator, or None."""
    events, marks = events_and_boundaries(trace)
    edges = begin_of(marks[0]), begin_of(marks[-1])
    waits = waits_of_host([event for event in events if is_runtime_call(event)])
    longest = max((wait for wait in waits if is_within(wait, edges)), key=lambda event: event["dur"], default=None)
    if longest is None:
        return None
    operators = (one for one in events if one.get("cat") == "cpu_op" and one["tid"] == longest["tid"])
    around = min((one for one in operators if holds(one, longest)), key=begin_of, default=None)
    return " in ".join(one["name"] for one in (longest, around) if one)


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
        communication: stream -> the name of each communication kernel and each copy, in order, and the call that it
            served; None for a copy that served none.
        names: names of kernels that served collectives and did nothing else.
    """

    boundary: str
    communication: Mapping[object, list[tuple[str, Call | None]]]
    names: frozenset[str]


def learn_step(trace: Trace) -> LearnedStep:
    """Return the facts of a step that are needed to read traces of device activity alone.

    Raises:
        ValueError: The trace has fewer than two boundaries, or no device activity for them, or a kernel of the workload
            has the name of the boundary's.
    """
    events, marks = events_and_boundaries(trace)
    kernels = _boundary_kernels(events, marks)
    name = str(kernels[0]["name"])
    if sum(event["name"] == name for event in events if is_on_device(event)) != len(marks):
        raise ValueError(
            f"kernel {name} separates profiled steps, but the workload runs it too; set profile_steps: 0 to measure "
            "without profiled steps"
        )
    names = _serving_names(events)
    inside = _transfers_by_stream(events, names, [begin_of(kernel) for kernel in kernels])
    copies = _copies_of_collectives(events)
    calls = {stream: [(one["name"], _call_of(one, copies)) for one in rows] for stream, rows in inside.items()}
    return LearnedStep(name, calls, names)


def overlap_of_device(
    trace: Trace,
    step: LearnedStep,
    num_steps: int,
    waits_ms: Mapping[Call, Sequence[float]] = MappingProxyType({}),
) -> Profile:
    """Return the breakdown of ``num_steps`` steps like ``step`` from a trace of device activity alone.

    A stream whose transfers do not repeat those of ``step`` is classified by its kernels' names. ``waits_ms``
    contains waits for late ranks at the beginning of calls by :attr:`Call.key`, in order, which are no communication
    (:func:`~pytest_aorta.result.trace.profiled_steps.waits_ms`).

    Raises:
        ValueError: The trace does not have ``num_steps`` + 1 boundaries.
    """
    events = _with_duration(trace)
    edges = sorted(begin_of(event) for event in events if is_on_device(event) and event["name"] == step.boundary)
    if len(edges) != num_steps + 1:
        raise ValueError(f"the profiler lost activity: {len(edges)} kernels {step.boundary} between {num_steps} steps")
    calls: dict[int, Call] = {}
    copies = _copies_of_collectives(events)
    for stream, transfers in _transfers_by_stream(events, step.names, edges).items():
        expected = step.communication.get(stream, []) * num_steps
        is_repeated = [one["name"] for one in transfers] == [name for name, _ in expected]
        of_stream = [call for _, call in expected] if is_repeated else [_call_of(one, copies) for one in transfers]
        calls |= {id(one): call for one, call in zip(transfers, of_stream, strict=True) if call is not None}
    inside = [event for event in sorted(filter(is_on_device, events), key=begin_of) if is_within(event, edges)]
    durations = [(_family(event, calls), _duration_of(event)) for event in inside if event["name"] != step.boundary]
    served = [event for event in inside if id(event) in calls]
    kinds = {number: call.kind for number, call in calls.items()}
    lanes = _lanes(events, step.names, kinds, _waits_ns(served, calls, waits_ms))
    return _capture_of(edges, lanes, durations, ((calls[id(event)], _duration_of(event)) for event in served))


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


def _copies_of_collectives(events: Sequence[Event]) -> dict[int, Args]:
    """Return what torch recorded of the collective that a copy engine served by a copy, by the ``id`` of the copy."""
    records = [event for event in events if event["name"] == "record_param_comms"]
    launching = by_correlation(filter(is_runtime_call, events))
    found = {}
    for copy in filter(_is_copy, events):
        call = launching.get(copy["args"].get("correlation"))
        around = (one for one in records if call and one["tid"] == call["tid"] and holds(one, call))
        if (record := next(around, None)) is not None:
            found[id(copy)] = record["args"]
    return found


def _is_copy(event: Event) -> bool:
    return event.get("cat") == "gpu_memcpy"


def _transfers_by_stream(
    events: Iterable[Event], names: frozenset[str], edges: Sequence[int]
) -> dict[object, list[Event]]:
    """Return the communication kernels and the copies of each stream that began between ``edges``, in order."""
    rows: dict[object, list[Event]] = defaultdict(list)
    for event in sorted((one for one in events if _is_copy(one) or _is_communication(one, names)), key=begin_of):
        if is_within(event, edges):
            rows[event["args"].get("stream")].append(event)
    return rows


def _lanes(
    events: Iterable[Event], names: frozenset[str], kinds: Mapping[int, Collective], waits_ns: Mapping[int, int]
) -> dict[str, Intervals]:
    """Return the lanes of device activity; ``kinds`` and ``waits_ns`` map the ``id`` of events to what is known."""
    spans: list[tuple[str, Span]] = []
    for event in filter(is_on_device, events):
        begin, end = span_of(event)
        if id(event) in kinds or _is_communication(event, names):
            arrived = begin + waits_ns.get(id(event), 0)
            spans += [
                (Lane.WAIT, (begin, arrived)),
                (kinds.get(id(event)) or _kind_of(event["args"], event["name"]), (arrived, end)),
            ]
        else:
            spans.append((Lane.COMPUTE if event["cat"] == "kernel" else Lane.COPY, (begin, end)))
    return _unions(spans)


def _unions(spans: Iterable[tuple[str, Span]]) -> dict[str, Intervals]:
    """Return the union of the spans of each lane."""
    lanes: dict[str, list[Span]] = defaultdict(list)
    for lane, span in spans:
        lanes[lane].append(span)
    return {lane: union(rows) for lane, rows in lanes.items()}


def _is_communication(event: Event, names: frozenset[str]) -> bool:
    """Return True for a kernel of a collective: one of ``names``, or one that its name reveals."""
    return event.get("cat") == "kernel" and bool(event["name"] in names or communicates(event["name"]))


_COMMUNICATING_NAMESPACES = ("c10d::", "_c10d_functional::", "c10d_functional::", "_c10d_functional_autograd::")
# Operators that gloo serves with another collective than the requested one -> the collective that serves them.
_SERVED_AS = {
    "c10d::_reduce_scatter_base_": "gloo:all_reduce",
    "c10d::reduce_scatter_tensor_coalesced_": "gloo:all_reduce",
    "c10d::allreduce_": "gloo:all_reduce",
}


def overlap_of_cpu(trace: Trace) -> Profile:
    """Return the breakdown of a CPU rank's steps between the trace's boundaries.

    Raises:
        ValueError: The trace has fewer than two boundaries.
    """
    events, marks = events_and_boundaries(trace)
    edges = [begin_of(mark) for mark in marks]
    # Autograd's wrappers include hooks that wait, so they are left out and their operators count.
    operators = [
        event
        for event in by_thread(operators_of(events))
        if event["tid"] == marks[0]["tid"] and not event["name"].startswith("autograd::")
    ]
    works = _gloo_works(events, operators)
    gloo = [(kind, work) for kind, work in works if is_within(work, edges)]
    durations = [(name[:MAX_NAME], own_ns) for name, own_ns in _own_times(operators, edges)]
    durations += [(f"{GLOO}{kind}", _duration_of(work)) for kind, work in gloo]
    lanes = _operator_lanes(operators) | _unions((kind, span_of(work)) for kind, work in works)
    served = ((Call(kind, "", None, None), _duration_of(work)) for kind, work in gloo)
    return _capture_of(edges, lanes, durations, served)


def _own_times(operators: Sequence[Event], edges: list[int]) -> list[tuple[str, int]]:
    """Return name and time in ns of each operator that began between ``edges``, without the operators that it calls.

    Communication is left out.
    """
    own_ns: dict[int, int] = {}
    callers: list[Event] = []
    for event in operators:
        while callers and end_of(callers[-1]) <= begin_of(event):
            callers.pop()
        if callers:
            own_ns[id(callers[-1])] -= _duration_of(event)
        callers.append(event)
        own_ns[id(event)] = _duration_of(event)
    return [
        (event["name"], max(0, own_ns[id(event)]))
        for event in operators
        if is_within(event, edges) and not event["name"].startswith(_COMMUNICATING_NAMESPACES)
    ]


def _operator_lanes(operators: Iterable[Event]) -> dict[str, Intervals]:
    spans: list[tuple[str, Span]] = []
    reached = 0
    for event in operators:
        # An operator includes the operators that it calls.
        if begin_of(event) >= reached:
            reached = end_of(event)
            spans.append((Lane.COPY if event["name"] == "aten::copy_" else Lane.COMPUTE, span_of(event)))
    waiting = union(span_of(event) for event in operators if event["name"].startswith(_COMMUNICATING_NAMESPACES))
    return {lane: difference(moments, waiting) for lane, moments in _unions(spans).items()}


def _gloo_works(events: Iterable[Event], operators: Iterable[Event]) -> list[tuple[Collective, Event]]:
    """Return the work of gloo's threads with the requested collective: gloo serves reduce-scatters with all-reduces."""
    works = works_of_gloo(events)
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
