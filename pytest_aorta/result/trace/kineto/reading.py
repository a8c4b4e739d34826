"""Reads the file of a Chrome trace within limits of bytes and values, and checks its events."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from pathlib import Path
from typing import Any

from pytest_aorta.common.documents import UnreadableFile, read_bytes
from pytest_aorta.common.errors import AortaError
from pytest_aorta.common.text import brief

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
