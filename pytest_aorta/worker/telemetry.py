"""The telemetry of a rank: one line of JSON per measured step, written after the loop."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_aorta.common.files import write_text
from pytest_aorta.result.folder import TELEMETRY_FILE
from pytest_aorta.result.measurements import RankResult
from pytest_aorta.result.trace.profiled_steps import Profile, StepOverlap

# A run with more steps keeps only every second, third, ... step; a lane with more segments loses its last segments.
MAX_LINES = 5000
MAX_SEGMENTS = 50


@dataclass(frozen=True)
class Telemetry:
    """Facts of single measured steps that are not part of a result.

    Attributes:
        series: name, such as ``lr`` -> one value per measured step, in order.
        captures: step number from 0 -> capture of this one step, with its overlap and timeline.
    """

    series: Mapping[str, Sequence[float]] = field(default_factory=dict)
    captures: Mapping[int, Profile] = field(default_factory=dict)


def write_telemetry(folder: Path, result: RankResult, telemetry: Telemetry) -> Path:
    """Write ``folder/telemetry.jsonl`` atomically and return its path.

    A line contains ``step`` (from 0), ``step_time_ms`` and, if known, ``loss``, ``grad_norm`` and the value of each
    series. Lines of captured steps also contain ``stream_ms`` by lane, ``utilisation`` (compute as a fraction of the
    step), ``hidden_comm_ms``, ``exposed_comm_ms``, ``hidden_ms`` by collective and ``segments``: ``[begin_ms, end_ms]``
    by lane.

    Raises:
        ValueError: The length of a series differs from the number of steps, or a value is NaN or infinite.
    """
    num_steps = len(result.step_times_ms)
    series = {name: _numbers(name, values, num_steps) for name, values in telemetry.series.items()}
    # A script may record losses of only some steps, and the result does not contain the numbers of these steps.
    recorded = {"loss": result.loss, "grad_norm": result.grad_norm}
    columns = {name: values for name, values in recorded.items() if len(values) == num_steps} | series
    lines = _lines(result.step_times_ms, columns, telemetry.captures)
    path = folder / TELEMETRY_FILE
    write_text(path, "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines), durable=False)
    return path


def _numbers(name: str, values: Sequence[float], num_steps: int) -> list[float]:
    if len(values) != num_steps:
        raise ValueError(f"telemetry of {name}: {len(values)} values for {num_steps} steps; they have to be equal")
    # A value may be a tensor, such as the learning rate of a capturable optimizer.
    numbers = [float(value) for value in values]
    if bad := [step for step, number in enumerate(numbers) if not math.isfinite(number)]:
        raise ValueError(
            f"telemetry of {name}: the value of step {bad[0]} is {numbers[bad[0]]}; record a finite number in each step"
        )
    return numbers


def _lines(
    step_times_ms: Sequence[float], columns: Mapping[str, Sequence[float]], captures: Mapping[int, Profile]
) -> Iterator[dict[str, Any]]:
    stride = -(-len(step_times_ms) // MAX_LINES)
    for step in range(0, len(step_times_ms), stride):
        line: dict[str, Any] = {"step": step, "step_time_ms": step_times_ms[step]}
        line |= {name: values[step] for name, values in columns.items()}
        yield line | (_of_capture(captures[step]) if step in captures else {})


def _of_capture(capture: Profile) -> dict[str, Any]:
    (step,) = capture.steps
    return {
        "stream_ms": _stream_ms(step),
        "utilisation": round(step.compute_ms / step.step_ms, 4),
        "hidden_comm_ms": step.hidden_comm_ms,
        "exposed_comm_ms": round(step.exposed_comm_ms, 6),
        "hidden_ms": {kind: time.hidden_ms for kind, time in step.collectives.items()},
        "segments": {name: rows[:MAX_SEGMENTS] for name, rows in capture.timeline.items()},
    }


def _stream_ms(step: StepOverlap) -> dict[str, float]:
    return {"compute": step.compute_ms, "copy": step.copy_ms} | {
        kind: time.total_ms for kind, time in step.collectives.items()
    }
