"""Adapters: conversion of a script's own log into the result of a rank. Ranks call this module; it needs no torch."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta

from pytest_aorta.common.errors import AortaError
from pytest_aorta.common.files import UnreadableFile, raised_as, read_bytes
from pytest_aorta.common.model import Model, convert
from pytest_aorta.common.text import brief, filled

LOG, TORCHTITAN = "log", "torchtitan"
# Quantities that do not become metrics.
STEP, TIMESTAMP, LOSS, GRAD_NORM = "step", "timestamp", "loss", "grad_norm"
STEP_TIMES = {"step_time_ms": 1.0, "step_time_s": 1000.0}
THROUGHPUT = "tokens_per_s"
_SERIES = {STEP, TIMESTAMP, LOSS, GRAD_NORM, *STEP_TIMES}
_METRIC = re.compile(r"[a-z][a-z0-9_]{0,63}")
GIB = 1 << 30
MAX_COUNT = 10**15
_Count: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_LAST_LINES = 5
# Limits of a log: its size in bytes, and the number of characters of a line that are searched. The time of a search can
# grow with the square of that number.
MAX_LOG_BYTES = 256 << 20
MAX_LINE = 10_000
# The line that torchtitan logs for a step; its memory is the peak reserved since the previous line. Every repetition
# has a limit, so that the search takes linear time.
TORCHTITAN_PATTERN = (
    r"\[titan\] (?P<timestamp>\d\S{1,30} \d\S{1,30}) - \S{1,80} - \S{1,20} - step:\s{0,20}(?P<step>\d{1,18})"
    r"\s{1,20}loss:\s{0,20}(?P<loss>\S{1,30})(?:\s{1,20}grad_norm:\s{0,20}(?P<grad_norm>\S{1,30}))?"
    r"\s{1,20}memory:\s{0,20}(?P<peak_memory_reserved_gib>-?[\d.,]{1,20})GiB\([^)]{0,20}\)"
    r"\s{1,20}tps:\s{0,20}(?P<tokens_per_s>[\d,]{1,20})(?:\s{1,20}tflops:\s{0,20}(?P<model_tflops>[\d,.]{1,20}))?"
)


class AdapterError(AortaError):
    """The log of a script is missing, or does not match the adapter."""


@dataclass(frozen=True)
class Record:
    """One logged step.

    Attributes:
        step: Number of the step.
        moment_s: Time of logging in seconds, by any clock; None if unknown.
        values: Quantity -> value.
    """

    step: int
    moment_s: float | None
    values: dict[str, float]


class Adapter(Model, frozen=True):
    """The block ``adapter:`` of a workload's yaml, its texts filled in.

    Attributes:
        kind: ``log``; the yaml may have ``torchtitan``, which stands for its pattern.
        pattern: Regular expression for a line of the log, with named groups for quantities.
        file: Path of the log; empty for the rank's own output.
        ranks: ``all`` if all ranks log, ``first`` if only rank 0 does, ``last`` if only the last rank does.
        warmup: Number of records to leave out at the beginning.
        last_step: Required number of the last logged step; 0: any number.
        every: Steps between records; step times are means over that many steps.
        tokens_per_step: Factors of the tokens of one rank per step, from which throughput gives the step time; none:
            unknown.
    """

    kind: Literal["log"]
    pattern: str = ""
    file: str = ""
    ranks: Literal["all", "first", "last"] = "all"
    warmup: _Count = 0
    last_step: _Count = 0
    every: Annotated[int, Meta(ge=1, le=MAX_COUNT)] = 1
    tokens_per_step: Annotated[tuple[_Count, ...], Meta(max_length=8)] = ()

    @property
    def quantities(self) -> set[str]:
        """The quantities that a record can contain."""
        return set(re.compile(self.pattern).groupindex)

    def is_read(self, rank: int, num_ranks: int) -> bool:
        """Return whether the log of a rank is read."""
        return self.ranks == "all" or rank == (0 if self.ranks == "first" else num_ranks - 1)

    @property
    def clock(self) -> str:
        """The source of step times; empty if no quantity gives them.

        Step times that the script logs are preferred to throughput, which is often rounded. Throughput is preferred to
        the times of logging, which include the time of writing.
        """
        if logged := sorted(self.quantities & set(STEP_TIMES)):
            return f"logged {logged[0]}"
        if THROUGHPUT in self.quantities and self.tokens_per_step:
            return f"logged {THROUGHPUT}"
        return "moments of logging" if TIMESTAMP in self.quantities else ""


@dataclass(frozen=True)
class _Adapted:
    """The measurements in the records of one rank, named as in :class:`pytest_aorta.result.measurements.RankResult`."""

    step_times_ms: list[float]
    loss: list[float]
    grad_norm: list[float]
    metrics: dict[str, float]
    environment: dict[str, str | int | float | bool | None]


def _refuse_bad_adapter(adapter: Adapter) -> None:
    """Check that an adapter names a source, the step and the step time.

    Raises:
        AdapterError: A value is missing, not allowed, or contradicts another.
    """
    with raised_as(AdapterError, f"pattern {adapter.pattern!r} is not a regular expression: ", re.error):
        quantities = adapter.quantities
    if not adapter.pattern:
        raise AdapterError("kind log needs a pattern, a regular expression with named groups such as (?P<step>\\d+)")
    if STEP not in quantities:
        raise AdapterError(f"the pattern names {sorted(quantities)}; it has to have a group (?P<step>...)")
    if not adapter.clock:
        raise AdapterError(
            f"step times are missing: none of {sorted(quantities)} is step_time_ms, step_time_s, timestamp, or "
            f"tokens_per_s together with the key tokens_per_step"
        )
    if adapter.clock == "moments of logging" and adapter.warmup < 1:
        raise AdapterError(f"warmup is {adapter.warmup}; step times are differences of logging times: give 1 or more")
    if bad := sorted(name for name in quantities if not _METRIC.fullmatch(name)):
        raise AdapterError(f"names {bad}: allowed are lower case letters, digits and _, a letter first")


def adapted(adapter: Adapter, records: Sequence[Record], source: str) -> _Adapted:
    """Return the measurements in the records of a rank; ``source`` names the log in messages.

    Raises:
        AdapterError: Steps are missing, repeated or out of order, only some steps have a quantity, or a value is not
            finite.
    """
    measured = records[adapter.warmup :]
    if not measured:
        raise AdapterError(f"{source}: {len(records)} steps are logged and {adapter.warmup} of them are warm-up")
    _check_steps(adapter, records, source)
    names = {name for record in measured for name in record.values}
    columns = {name: _column(name, measured, source) for name in sorted(names)}
    metrics = {
        _in_bytes(name): (max(values) if name.startswith("peak_") else mean(values))
        * (GIB if name.endswith("_gib") else 1)
        for name, values in columns.items()
        # Scripts log a peak of 0 or less if they can't measure it; torchtitan logs -1.
        if name not in _SERIES and not (name.startswith("peak_") and max(values) <= 0)
    }
    environment: dict[str, str | int | float | bool | None] = {"step_clock": adapter.clock, "adapter": adapter.kind}
    if adapter.every > 1:
        environment["steps_per_step_time"] = adapter.every
    times = _step_times_ms(adapter, records, columns, source)
    for name, value in [*(("step time", time) for time in times), *metrics.items()]:
        if not math.isfinite(value):
            raise AdapterError(f"{source}: {name} is {value}, allowed is a finite number")
    return _Adapted(times, columns.get(LOSS, []), columns.get(GRAD_NORM, []), metrics, environment)


def _check_steps(adapter: Adapter, records: Sequence[Record], source: str) -> None:
    steps = [record.step for record in records[max(0, adapter.warmup - 1) :]]
    for before, after in pairwise(steps):
        if after - before != adapter.every:
            raise AdapterError(
                f"{source}: step {after} follows step {before}, and every {adapter.every} is expected; have every "
                f"step logged, or say so with `every: {abs(after - before) or 1}` (a step's time is their mean then)"
            )
    if adapter.last_step and steps[-1] != adapter.last_step:
        raise AdapterError(f"{source}: the last step logged is {steps[-1]}, expected is {adapter.last_step}")


def _column(name: str, records: Sequence[Record], source: str) -> list[float]:
    column = []
    for record in records:
        value = record.values.get(name)
        if value is None:
            raise AdapterError(f"{source}: step {record.step} has no {name}, and other steps have one")
        if not math.isfinite(value):
            raise AdapterError(f"{source}: {name} of step {record.step} is {value}")
        column.append(value)
    return column


def _step_times_ms(
    adapter: Adapter, records: Sequence[Record], columns: Mapping[str, list[float]], source: str
) -> list[float]:
    for name, factor in STEP_TIMES.items():
        if name in columns:
            return [value * factor for value in columns[name]]
    if adapter.clock == f"logged {THROUGHPUT}":
        if any(rate <= 0 for rate in columns.get(THROUGHPUT, [0.0])):
            raise AdapterError(f"{source}: {THROUGHPUT} is missing or 0, so it gives no step time")
        return [1000.0 * math.prod(adapter.tokens_per_step) / rate for rate in columns[THROUGHPUT]]
    moments = [record.moment_s for record in records[adapter.warmup - 1 :]]
    times = [
        1000 * (after - before) / adapter.every
        for before, after in pairwise(moments)
        if before is not None and after is not None
    ]
    if len(times) != len(records) - adapter.warmup or min(times) < 0:
        raise AdapterError(f"{source}: times of logging are missing or go backwards, so they give no step times")
    return times


def _in_bytes(name: str) -> str:
    return f"{name.removesuffix('_gib')}_bytes" if name.endswith("_gib") else name


def make_adapter(block: Mapping[str, Any], values: Mapping[str, Any]) -> Adapter:
    """Return the adapter of the yaml's block, its texts and the texts in place of numbers filled in with ``values``.

    Raises:
        AdapterError: A key is unknown, a value is not allowed, or the adapter is contradictory.
    """
    # Braces in a pattern are repetition counts, not names.
    found = {key: value if key == "pattern" else _filled(value, values) for key, value in block.items()}
    if found.get("kind") == TORCHTITAN:
        if found.get("pattern"):
            raise AdapterError("kind torchtitan has its own pattern; drop it, or use kind log")
        found |= {"kind": LOG, "pattern": TORCHTITAN_PATTERN}
    try:
        adapter = convert(found, Adapter, "adapter", strict=False)
    except UnreadableFile as error:
        raise AdapterError(str(error).removeprefix("adapter: ")) from None
    _refuse_bad_adapter(adapter)
    return adapter


def _filled(value: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_filled(entry, values) for entry in value]
    return filled(value, values) if isinstance(value, str) else value


def read_records(adapter: Adapter, rank_log: Path) -> tuple[list[Record], str]:
    """Return the records of a rank in order, and the name of their source.

    Raises:
        AdapterError: The log does not exist or has no records.
    """
    path = Path(adapter.file) if adapter.file else rank_log
    try:
        # The log of a script may be a link to its newest run.
        text = read_bytes(path.resolve(), max_bytes=MAX_LOG_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError, UnreadableFile) as error:
        raise AdapterError(str(error) if isinstance(error, UnreadableFile) else f"{path}: {error}") from None
    return log_records(adapter.pattern, text, str(path)), str(path)


def log_records(pattern: str, text: str, source: str) -> list[Record]:
    """Return one record per line that matches, after terminal colors are removed.

    Raises:
        AdapterError: No line matches, or a group of the match is not a number.
    """
    lines = _ANSI.sub("", text).splitlines()
    matches = [match for line in lines if (match := re.search(pattern, line[:MAX_LINE]))]
    if not matches:
        last = "".join(f"\n  | {line[:300]}" for line in lines[-_LAST_LINES:]) or " it is empty"
        raise AdapterError(f"pattern {pattern!r} matches no line of {source}, which ends:{last}")
    return [_record(match.groupdict(), source) for match in matches]


def _record(groups: Mapping[str, str | None], source: str) -> Record:
    given = {name: text for name, text in groups.items() if text is not None}
    step = given.pop(STEP, "")
    moment = given.pop(TIMESTAMP, None)
    try:
        values = {name: float(text.replace(",", "")) for name, text in given.items()}
        return Record(int(step.replace(",", "")), None if moment is None else _moment_s(moment), values)
    except (ValueError, OverflowError) as error:
        problem = brief(str(error), 200)
        raise AdapterError(f"{source}: a line matches, but a value is not a number: {problem}") from None


def _moment_s(text: str) -> float:
    """Return seconds, from a number or from a date and time in the form of Python's logging or ISO 8601."""
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text.replace(",", ".")).timestamp()
