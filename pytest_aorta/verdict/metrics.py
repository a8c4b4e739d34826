"""The table of metrics: adding one is adding a row."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

from pytest_aorta.common.errors import SpecError
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.verdict.statistics.scale import Scale

Value: TypeAlias = float | str | None
# Below this a 99th percentile is the maximum or next to it.
MIN_STEPS_P99 = 100


@dataclass(frozen=True)
class Tolerance:
    """The change allowed: ``relative`` as a fraction of what ``scale`` says, or None for bit-for-bit equality."""

    relative: float | None
    scale: Scale = Scale.RELATIVE

    def __str__(self) -> str:
        """As a user writes it."""
        return "exact" if self.relative is None else self.scale.text(self.relative)


EXACT = Tolerance(None)


@dataclass(frozen=True)
class Metric:
    """One compared quantity.

    Attributes:
        measure: the value in a launch's facts, None where the launch has none.
        kind: ``timing`` doesn't carry over between sittings on CPU, ``numeric`` only within one numeric
            environment, ``memory`` carries over.
        direction: which way is better, ``lower`` or ``higher``; ``exact``: neither.
        default: tolerance without a marker; None: compared only where a marker names the metric.
        min_steps: measured steps below which the metric means nothing.
        scale: what a change is a fraction of.
    """

    name: str
    unit: str
    kind: str
    direction: str
    default: Tolerance | None
    measure: Callable[[LaunchFacts], Value]
    help: str
    min_steps: int = 1
    scale: Scale = Scale.RELATIVE

    @property
    def worse(self) -> int:
        """1 where a larger value is worse, else -1."""
        return -1 if self.direction == "higher" else 1

    def parse_tolerance(self, given: object) -> Tolerance:
        """Read a marker's value: a change such as ``"2%"`` on this metric's scale, or ``"exact"``.

        Raises:
            SpecError: it is neither, or not what this metric takes.
        """
        if given == "exact":
            return EXACT
        most = _MOST[self.scale]
        change = self.scale.parse(given)
        if self.direction == "exact" or change is None or not 0 < change <= most:
            allowed = "'exact'" if self.direction == "exact" else f"{_range_text(self.scale, most)}, or 'exact'"
            raise SpecError(f"tolerance of {self.name}: got {given!r}, allowed is {allowed}")
        return Tolerance(change, self.scale)


# Beyond which nothing is ruled out.
_MOST = {Scale.RELATIVE: 10.0, Scale.POINTS: 1.0, Scale.OF_STEP: 10.0}


def _range_text(scale: Scale, most: float) -> str:
    if scale is Scale.RELATIVE:
        return f"a percentage above 0% up to {scale.text(most)}"
    return f"a number above 0 and up to {scale.text(most)}, such as {scale.text(0.05)!r}"


def _step_time(statistic: str) -> Callable[[LaunchFacts], Value]:
    return lambda facts: facts.step_time_ms.get(statistic)


def _recorded(name: str) -> Callable[[LaunchFacts], Value]:
    return lambda facts: facts.metrics.get(name)


def _weight_hash(facts: LaunchFacts) -> Value:
    if not facts.weight_hashes:
        return None
    last = max(facts.weight_hashes, key=int)
    return facts.weight_hashes[last]


def _final_loss(facts: LaunchFacts) -> Value:
    return facts.final_loss


def _percent(value: float, scale: Scale = Scale.RELATIVE) -> Tolerance:
    return Tolerance(value / 100, scale)


_ROWS = (
    Metric("step_time_p50", "ms", "timing", "lower", _percent(5), _step_time("p50"), "median step time"),
    Metric(
        "step_time_p99", "ms", "timing", "lower", _percent(10), _step_time("p99"), "99th percentile of step times",
        min_steps=MIN_STEPS_P99,
    ),
    Metric("step_time_mean", "ms", "timing", "lower", None, _step_time("mean"), "mean step time"),
    Metric("step_time_tail5", "ms", "timing", "lower", None, _step_time("tail5"), "mean of the slowest 5% of steps"),
    Metric(
        "gemm_throughput_tflops", "TFLOP/s", "timing", "higher", None, _recorded("gemm_throughput_tflops"),
        "matrix products of one rank over the measured loop",
    ),
    Metric(
        "overlap_ratio", "", "timing", "higher", _percent(5, Scale.POINTS), _recorded("overlap_ratio"),
        "share of communication that is hidden under compute, in profiled steps", scale=Scale.POINTS,
    ),
    Metric(
        "exposed_comm_ms", "ms", "timing", "lower", _percent(2, Scale.OF_STEP), _recorded("exposed_comm_ms"),
        "communication of a profiled step during which a rank computes nothing", scale=Scale.OF_STEP,
    ),
    Metric(
        "overlap_saving", "", "timing", "higher", _percent(5, Scale.POINTS), _recorded("overlap_saving"),
        "share of the time of compute and copies one after the other that running both at once saves",
        scale=Scale.POINTS,
    ),
    Metric(
        "samples_per_s", "1/s", "timing", "higher", None, _recorded("samples_per_s"), "samples of one rank a second"
    ),
    Metric("tokens_per_s", "1/s", "timing", "higher", None, _recorded("tokens_per_s"), "tokens of one rank a second"),
    Metric(
        "peak_memory_bytes", "B", "memory", "lower", _percent(2), _recorded("peak_memory_bytes"),
        "largest peak of device memory over ranks",
    ),
    Metric(
        "all_gather_bytes_per_step", "B", "count", "exact", EXACT, _recorded("all_gather_bytes_per_step"),
        "bytes that all-gathers of one step fill on a rank",
    ),
    Metric(
        "reduce_scatter_bytes_per_step", "B", "count", "exact", EXACT, _recorded("reduce_scatter_bytes_per_step"),
        "bytes that one step's reduce-scatters read on a rank",
    ),
    Metric("num_parameters", "", "count", "exact", EXACT, _recorded("num_parameters"), "parameters of the whole model"),
    Metric("weight_hash", "", "numeric", "exact", EXACT, _weight_hash, "hash of the weights after the last step"),
    Metric("final_loss", "", "numeric", "lower", None, _final_loss, "loss of the last measured step"),
)  # fmt: skip
METRICS = {row.name: row for row in _ROWS}


def middle(metric: Metric, launches: Sequence[LaunchFacts]) -> Value:
    """The median over launches, or the first one's value where not each has a number."""
    values = [metric.measure(launch) for launch in launches]
    numbers = [value for value in values if isinstance(value, float | int)]
    return float(median(numbers)) if numbers and len(numbers) == len(values) else values[0]


def measured_values(launches: Sequence[LaunchFacts]) -> dict[str, float | str]:
    """Every metric that the launches have, and that means something with so few steps."""
    num_steps = min(launch.num_steps for launch in launches)
    values = {name: middle(row, launches) for name, row in METRICS.items() if num_steps >= row.min_steps}
    return {name: value for name, value in values.items() if value is not None}


def format_value(value: Value, unit: str, *, exact: bool = False) -> str:
    """A value with its unit, short enough for a table; ``exact``: with every digit that can differ."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value[:12]
    if exact:
        return f"{value:,.0f} {unit}".rstrip() if value.is_integer() else f"{value:.17g} {unit}".rstrip()
    if unit == "B":
        return f"{value / 2**20:.5g} MiB"
    digits = f"{value:.4g}" if value == 0 or 1e-3 <= math.fabs(value) < 1e5 else f"{value:.3e}"
    return f"{digits} {unit}".rstrip()


def parse_tolerances(given: Mapping[str, object], source: str) -> dict[str, Tolerance]:
    """Tolerances by metric, of texts such as ``5%`` or ``exact``.

    Raises:
        SpecError: there is no such metric, or a text is not allowed.
    """
    if unknown := sorted(set(given) - set(METRICS)):
        raise SpecError(f"{source}: no such metrics {unknown}; there are {sorted(METRICS)}")
    return {name: METRICS[name].parse_tolerance(text) for name, text in given.items()}
