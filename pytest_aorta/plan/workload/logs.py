"""The sources of adapters: lines of a log, and event files of TensorBoard."""

from __future__ import annotations

import glob
import importlib
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from math import prod
from pathlib import Path
from typing import Any

from pytest_aorta.common.documents import UnreadableFile, read_bytes
from pytest_aorta.common.files import files_below
from pytest_aorta.common.regular import open_regular
from pytest_aorta.common.text import brief
from pytest_aorta.plan.workload.adapter import (
    LOG,
    STEP,
    TENSORBOARD,
    TIMESTAMP,
    TORCHTITAN,
    Adapter,
    AdapterBlock,
    AdapterError,
    Record,
    refuse_bad_adapter,
)
from pytest_aorta.plan.workload.command import filled

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_LAST_LINES = 5
# Limits of a log: its size in bytes, which is also the limit of an event file, and the number of characters of a line
# that are searched. The time of a search can grow with the square of that number.
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
TORCHTITAN_SCALARS = {
    "step_time_s": "time_metrics/end_to_end(s)",
    "loss": "loss_metrics/global_avg_loss",
    "grad_norm": "grad_norm",
    "tokens_per_s": "throughput(tps)",
    "peak_memory_active_gib": "memory/max_active(GiB)",
    "peak_memory_reserved_gib": "memory/max_reserved(GiB)",
}


def make_adapter(block: AdapterBlock, values: Mapping[str, Any]) -> Adapter:
    """Return the adapter of the yaml's block, its texts filled in with ``values``.

    Raises:
        AdapterError: The adapter is contradictory, or a value that has to be a number is not one.
    """
    factors = [_integer("tokens_per_step", factor, values) for factor in block.tokens_per_step]
    adapter = Adapter(
        kind=block.kind,
        pattern=block.pattern,
        file=filled(block.file, values),
        folder=filled(block.folder, values),
        scalars=tuple(block.scalars.items()),
        ranks=block.ranks,
        warmup=_integer("warmup", block.warmup, values),
        last_step=_integer("last_step", block.last_step, values),
        every=_integer("every", block.every, values),
        tokens_per_step=prod(factors) if factors else 0,
    )
    if adapter.kind == TORCHTITAN:
        if adapter.pattern or adapter.scalars:
            raise AdapterError(
                "kind torchtitan has its own pattern and scalars; drop them, or use kind log or tensorboard"
            )
        # Event files contain all digits, but exist only for rank 0 unless torchtitan saves them for all ranks.
        by_tag = tuple(TORCHTITAN_SCALARS.items())
        events = replace(adapter, kind=TENSORBOARD, scalars=by_tag)
        adapter = events if adapter.folder else replace(adapter, kind=LOG, pattern=TORCHTITAN_PATTERN)
    refuse_bad_adapter(adapter)
    return adapter


def read_records(adapter: Adapter, rank_log: Path) -> tuple[list[Record], str]:
    """Return the records of a rank in order, and the name of their source.

    Raises:
        AdapterError: The log or the event file does not exist or has no records.
    """
    if adapter.kind == TENSORBOARD:
        return _event_records(adapter)
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


def _event_records(adapter: Adapter) -> tuple[list[Record], str]:
    try:
        module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    except ImportError:
        raise AdapterError(
            "event files are read by tensorboard, which is not installed here: pip install 'pytest-aorta[tensorboard]'"
        ) from None
    # A part of the path may be a glob pattern, for folders that scripts name by date and time.
    folders = [Path(folder) for folder in glob.glob(adapter.folder)]  # noqa: PTH207 - an absolute pattern
    files = sorted(file for folder in folders for file in files_below(folder, "*tfevents*"))
    if len(files) != 1:
        there = f"there are {len(files)}: {', '.join(map(str, files[:3]))}" if files else "there is none"
        raise AdapterError(f"{adapter.folder}: expected one event file in this folder or below; {there}")
    _refuse_unreadable(files[0])
    # 0 keeps every event; the default keeps a sample.
    events = module.EventAccumulator(str(files[0]), size_guidance={"scalars": 0, "tensors": 0})
    try:
        events.Reload()
    except Exception as error:  # noqa: BLE001 - tensorboard names no error for damaged event files
        raise AdapterError(f"{files[0]}: tensorboard can't read it: {brief(_described(error), 300)}") from None
    tags = events.Tags()["scalars"]
    steps: dict[int, tuple[float, dict[str, float]]] = {}
    for name, tag in adapter.scalars:
        if tag not in tags:
            there = brief(str(sorted(tags)), 500)
            raise AdapterError(f"{files[0]}: there is no scalar {tag!r} for {name}; there are {there}")
        for event in events.Scalars(tag):
            moment_s, values = steps.setdefault(event.step, (event.wall_time, {}))
            steps[event.step] = min(moment_s, event.wall_time), values | {name: float(event.value)}
    return [Record(step, moment_s, values) for step, (moment_s, values) in sorted(steps.items())], str(files[0])


def _refuse_unreadable(file: Path) -> None:
    """Check an event file, since tensorboard would wait for a FIFO, or read a device, forever."""
    try:
        # The event file of a script may be a link to its newest run.
        with open_regular(file, follow_links=True) as opened:
            size = os.fstat(opened.fileno()).st_size
    except OSError as error:
        raise AdapterError(f"{file}: can't be read: {error.strerror or error}") from None
    if size > MAX_LOG_BYTES:
        raise AdapterError(
            f"{file}: {size:,} bytes are more than the {MAX_LOG_BYTES:,} allowed; write the scalars to an event file "
            f"of their own"
        )


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _integer(name: str, given: Any, values: Mapping[str, Any]) -> int:
    text = filled(str(given), values)
    try:
        return int(text)
    except ValueError:
        raise AdapterError(f"{name}: got {brief(repr(text))}, allowed is an integer") from None
