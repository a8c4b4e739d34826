"""Adapters: conversion of a script's own log into the result of a rank. Ranks call this module; it needs no torch.

An adapter is the ``adapter:`` block of a workload's yaml. An adapter reads *records*, one per logged step, from a log
or from event files of TensorBoard, and converts them into step times and metrics. A value that the records do not
contain is absent from the result.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean
from typing import Literal

from msgspec import field

from pytest_aorta.common.errors import AortaError
from pytest_aorta.common.model import Model
from pytest_aorta.common.text import brief

LOG, TENSORBOARD, TORCHTITAN = "log", "tensorboard", "torchtitan"
ALL, FIRST = "all", "first"
# Quantities that do not become metrics.
STEP, TIMESTAMP, LOSS, GRAD_NORM = "step", "timestamp", "loss", "grad_norm"
STEP_TIMES = {"step_time_ms": 1.0, "step_time_s": 1000.0}
THROUGHPUT = "tokens_per_s"
_SERIES = {STEP, TIMESTAMP, LOSS, GRAD_NORM, *STEP_TIMES}
_METRIC = re.compile(r"[a-z][a-z0-9_]{0,63}")
GIB = 1 << 30
MAX_COUNT = 10**15


class AdapterError(AortaError):
    """The log of a script is missing, or does not match the adapter."""


class AdapterBlock(Model, frozen=True):
    """The block ``adapter:`` of a workload's yaml, as :class:`Adapter` describes it.

    Texts, and texts in place of numbers, may contain names in braces; ``tokens_per_step`` are factors.
    """

    kind: Literal["log", "tensorboard", "torchtitan"]
    pattern: str = ""
    file: str = ""
    folder: str = ""
    scalars: dict[str, str] = field(default_factory=dict)
    ranks: Literal["all", "first"] = "all"
    warmup: int | str = 0
    last_step: int | str = 0
    every: int | str = 1
    tokens_per_step: tuple[int | str, ...] = ()


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


@dataclass(frozen=True)
class Adapter:
    """An adapter whose texts are filled in.

    Attributes:
        kind: ``log`` or ``tensorboard``.
        pattern: Regular expression for a line of the log, with named groups for quantities.
        file: Path of the log; empty for the rank's own output.
        folder: Folder that contains the event file, at any depth.
        scalars: Pairs of a quantity and its tag in the event file.
        ranks: ``all`` if all ranks log, ``first`` if only rank 0 does.
        warmup: Number of records to leave out at the beginning.
        last_step: Required number of the last logged step; 0: any number.
        every: Steps between records; step times are means over that many steps.
        tokens_per_step: Tokens of one rank per step, from which throughput gives the step time; 0: unknown.
    """

    kind: str
    pattern: str = ""
    file: str = ""
    folder: str = ""
    scalars: tuple[tuple[str, str], ...] = ()
    ranks: str = ALL
    warmup: int = 0
    last_step: int = 0
    every: int = 1
    tokens_per_step: int = 0

    @property
    def quantities(self) -> set[str]:
        """The quantities that a record can contain."""
        if self.kind == TENSORBOARD:
            # Each event contains its step and time.
            return {STEP, TIMESTAMP, *(name for name, _ in self.scalars)}
        return set(re.compile(self.pattern).groupindex)

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
class Adapted:
    """The measurements in the records of one rank, named as in :class:`pytest_aorta.result.measurements.RankResult`."""

    step_times_ms: list[float]
    loss: list[float]
    grad_norm: list[float]
    metrics: dict[str, float]
    environment: dict[str, str | int | float | bool | None]


def refuse_bad_adapter(adapter: Adapter) -> None:
    """Check that an adapter names a source, the step and the step time.

    Raises:
        AdapterError: A value is missing, not allowed, or contradicts another.
    """
    try:
        quantities = adapter.quantities
    except re.error as error:
        raise AdapterError(f"pattern {adapter.pattern!r} is not a regular expression: {error}") from None
    if adapter.kind == LOG and not adapter.pattern:
        raise AdapterError("kind log needs a pattern, a regular expression with named groups such as (?P<step>\\d+)")
    if adapter.kind == TENSORBOARD and not (adapter.folder and adapter.scalars):
        raise AdapterError("kind tensorboard needs a folder, and scalars, a mapping of quantities to tags")
    if STEP not in quantities:
        raise AdapterError(f"the pattern names {sorted(quantities)}; it has to have a group (?P<step>...)")
    if not adapter.clock:
        raise AdapterError(
            f"step times are missing: none of {sorted(quantities)} is step_time_ms, step_time_s, timestamp, or "
            f"tokens_per_s together with the key tokens_per_step"
        )
    if adapter.clock == "moments of logging" and adapter.warmup < 1:
        raise AdapterError(
            f"warmup is {adapter.warmup}; step times are differences of logging times, so warmup has to be 1 or more"
        )
    for name, least in {"every": 1, "warmup": 0, "last_step": 0, "tokens_per_step": 0}.items():
        if not least <= (given := getattr(adapter, name)) <= MAX_COUNT:
            raise AdapterError(f"{name} is {brief(str(given))}; allowed is an integer from {least} to {MAX_COUNT:,}")
    if bad := sorted(name for name in quantities if not _METRIC.fullmatch(name)):
        raise AdapterError(f"names {bad}: allowed are lower case letters, digits and _, a letter first")


def adapted(adapter: Adapter, records: Sequence[Record], source: str) -> Adapted:
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
        _in_bytes(name): max(values) if name.startswith("peak_") else mean(values)
        for name, values in ((name, _scaled(name, column)) for name, column in columns.items())
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
    return Adapted(times, columns.get(LOSS, []), columns.get(GRAD_NORM, []), metrics, environment)


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
        return [1000.0 * adapter.tokens_per_step / rate for rate in columns[THROUGHPUT]]
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


def _scaled(name: str, values: list[float]) -> list[float]:
    return [value * GIB for value in values] if name.endswith("_gib") else values
