"""Reads Kineto's profiles within limits: checked events, steps, collectives, and calls that block the host."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from msgspec import UNSET, Meta, UnsetType, field

from pytest_aorta.common.documents import raised_as, read_bytes
from pytest_aorta.common.errors import AortaError
from pytest_aorta.common.model import Model, decode
from pytest_aorta.result.trace.profiled_steps import Call, Collective

# Limits of one rank's trace, packed and unpacked. A step of an 8B model on one rank has about 30 MB with host events.
MAX_TRACE_BYTES = 256 << 20
MAX_TRACE_VALUES = 16_000_000
# The remedy for a trace that is too large.
FEWER = "trace fewer steps, or steps with fewer micro-batches"


class _Event(Model, frozen=True, forbid_unknown_fields=False):
    """An event of a Chrome trace as far as it is read; times are in microseconds."""

    ph: str
    name: str
    cat: str = ""
    ts: Annotated[float, Meta(gt=-(1 << 63), lt=1 << 63)] | UnsetType = UNSET
    dur: Annotated[float, Meta(gt=-(1 << 63), lt=1 << 63)] | UnsetType = UNSET
    pid: int | str = 0
    tid: int | str = 0
    id: int | str = 0
    args: dict[str, Any] = field(default_factory=dict)


class _Trace(Model, frozen=True, forbid_unknown_fields=False):
    """A Chrome trace as far as it is read."""

    traceEvents: list[_Event]
    baseTimeNanoseconds: Annotated[int, Meta(gt=-(1 << 63), lt=(1 << 63) - 1)] = 0


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


def check_size(path: Path) -> None:
    """Raise TraceTooLarge if a file has too many bytes to be read."""
    if (num_bytes := path.stat().st_size) > MAX_TRACE_BYTES:
        raise TraceTooLarge(path, num_bytes=num_bytes)


def read_trace(path: Path) -> dict[str, Any]:
    """Return the document of a trace file, gzipped or not, in which every event has a phase and a name.

    Raises:
        TraceTooLarge: The file has too many bytes or values.
        TraceError: The file can't be read, is too large when unpacked, or is not a Chrome trace.
    """
    if path.exists():
        check_size(path)
    with raised_as(TraceError):
        data = _unzipped(path, read_bytes(path, max_bytes=MAX_TRACE_BYTES))
    return parse_trace(path, data)


def parse_trace(path: Path, data: bytes) -> dict[str, Any]:
    """Return the document of a trace; errors, which are those of :func:`read_trace`, name ``path``."""
    # A value of two bytes, "[]," for example, takes thirty times as much memory.
    if (num_values := sum(map(data.count, (b",", b"[", b"{")))) > MAX_TRACE_VALUES:
        raise TraceTooLarge(path, num_values=num_values)
    with raised_as(TraceError):
        events = decode(data, _Trace, str(path), by_hand=False).traceEvents
    for number, event in enumerate(events):
        if event.ph == "X" and UNSET in (event.ts, event.dur):
            raise TraceError(f"{path}: $.traceEvents[{number}]: an event of phase X lacks `ts` or `dur`")
    text = data.decode("utf-8", "replace")
    # Events take several times the memory of their text, so that the document is made only when these are gone.
    del events, data
    document: dict[str, Any] = json.loads(text)
    return document


def _unzipped(path: Path, data: bytes) -> bytes:
    if data[:2] != b"\x1f\x8b":
        return data
    with raised_as(TraceError, f"{path}: not a whole gzip file: ", (OSError, EOFError, zlib.error)):
        text = gzip.GzipFile(fileobj=io.BytesIO(data)).read(MAX_TRACE_BYTES + 1)
    if len(text) > MAX_TRACE_BYTES:
        raise TraceError(
            f"{path}: {len(data):,} bytes are more than {MAX_TRACE_BYTES:,} bytes when unpacked, which is the limit; "
            f"{FEWER}"
        )
    return text


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


def is_blocking_call(event: Event) -> bool:
    """Return True for a call of the runtime that returns only after the device has done earlier work."""
    return bool(_BLOCKING.search(event["name"]))


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
    "float": "float32", "Float": "float32", "double": "float64", "Double": "float64", "c10::BFloat16": "bfloat16",
    "BFloat16": "bfloat16", "c10::Half": "float16", "Half": "float16", "long": "int64", "long int": "int64",
    "Long": "int64", "int": "int32", "Int": "int32", "short": "int16", "Short": "int16", "unsigned char": "uint8",
    "Byte": "uint8", "signed char": "int8", "Char": "int8", "bool": "bool", "Bool": "bool",
    "ComplexFloat": "complex64", "c10::complex<float>": "complex64", "ComplexDouble": "complex128",
    "c10::complex<double>": "complex128",
}  # fmt: skip
_ELEMENT_BYTES = {
    "uint8": 1, "int8": 1, "bool": 1, "float16": 2, "bfloat16": 2, "int16": 2, "int32": 4, "float32": 4, "int64": 8,
    "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip
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


def kind_of(kernel: Event) -> Collective:
    """Return the collective that a kernel served: the requested one if torch recorded it, else by the kernel's name."""
    # RCCL's kernels have generic names, and an all-to-all consists of sends.
    return collective_of(str(kernel["args"].get("Collective name", "")), kernel["name"])


def call_of(kernel: Event) -> Call:
    """Return the call that a kernel served, as far as the trace has host events that show it."""
    args = kernel["args"]
    parts = [str(args[key]) for key in ("Process Group Name", "Process Group Ranks") if args.get(key) is not None]
    counts = [args[key] for key in ("In msg nelems", "Out msg nelems") if _is_count(args.get(key), 0)]
    num_bytes = element_bytes(str(args.get("dtype", "")))
    is_known = counts and args.get("Collective name") not in _ON_LISTS
    size = args.get("Group size")
    return Call(
        kind_of(kernel),
        " ".join(parts)[:_MAX_GROUP_TEXT],
        size if _is_count(size, 1) and size <= _MAX_GROUP_SIZE else None,
        max(counts) * num_bytes if is_known and num_bytes else None,
    )


def element_bytes(dtype: str) -> int | None:
    """Return the bytes of an element of a type by any name in :data:`DTYPES`; None if the type is not known."""
    return 1 if "float8" in dtype.lower() else _ELEMENT_BYTES.get(DTYPES.get(dtype, dtype))


def _is_count(value: object, least: int) -> bool:
    return type(value) is int and least <= value < _MAX_ELEMENTS


# Runtime calls that return only after the device has done earlier work: CUDA's, HIP's of the same names, and the copy
# that torch's .item() makes on HIP.
_BLOCKING = re.compile(r"^(cuda|hip|cu)(\w*Synchronize|Free|Memcpy|MemcpyDtoH)(_v\d+)?$|^hipMemcpyWithStream$")


def find_blocking_call(trace: Mapping[str, Any]) -> str | None:
    """Return the runtime call in which the host waits for the device within a step, with its operator, or None.

    The longest such call is named. Calls of threads that launch nothing, such as NCCL's watchdog, don't count.
    """
    events, marks = events_and_boundaries(trace)
    calls = [event for event in events if is_runtime_call(event)]
    threads = {event["tid"] for event in calls if "aunchKernel" in event["name"]}
    begin, end = begin_of(marks[0]), begin_of(marks[-1])
    waits = [one for one in calls if one["tid"] in threads and is_blocking_call(one) and begin <= begin_of(one) < end]
    if not waits:
        return None
    longest = max(waits, key=lambda event: event["dur"])
    around = [
        event
        for event in events
        if event.get("cat") == "cpu_op" and event["tid"] == longest["tid"] and holds(event, longest)
    ]
    names = [event["name"] for event in sorted(around, key=begin_of)]
    return " in ".join([longest["name"], *names[:1]])
