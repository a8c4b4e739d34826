"""The table of compared metrics. A new metric is a new row."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from statistics import fmean, median_high, median_low
from typing import TypeAlias

from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.model import Model
from pytest_aorta.common.text import did_you_mean
from pytest_aorta.result.facts import Launches, LaunchFacts
from pytest_aorta.result.measurements import MIN_STEPS_P99
from pytest_aorta.result.series import BUFFERS, PARAMETERS, SeriesFacts
from pytest_aorta.result.trace.families import is_compute
from pytest_aorta.result.trace.profiled_steps import AS_RUN, BUS_FACTORS, Cost, by_rank
from pytest_aorta.result.trace.schedule import Schedule
from pytest_aorta.verdict.statistics.decision import Scale

Value: TypeAlias = float | str | None
LATE_RANK = "late_rank_ms"
# The values of each rank by step.
Curve: TypeAlias = Callable[[SeriesFacts], list[dict[str, float]]]


class MetricKind(StrEnum):
    """The kind of a metric, which decides between which launches it can be compared."""

    TIMING = "timing"
    """Comparable between session blocks on GPUs, but not on CPU ranks."""
    MEMORY = "memory"
    """Comparable between session blocks."""
    COUNT = "count"
    """Depends on the config alone."""
    NUMERIC = "numeric"
    """Comparable bit for bit, within one numeric environment only."""
    OWN = "own"
    """A metric of a workload or script that is not a time; comparable between session blocks."""


class Direction(StrEnum):
    """The direction in which a metric gets better."""

    LOWER = "lower"
    HIGHER = "higher"
    EXACT = "exact"
    """Any change is wrong."""


class Origin(StrEnum):
    """The source of a tolerance."""

    DEFAULT = "default"
    """The table of metrics."""
    GROSS = "gross"
    """The table of metrics for times of CPU ranks: a change that other work on the machine does not explain."""
    MARKER = "marker"
    """A marker, or an option of the command."""
    NUMERICS = "numerics"
    """The table of metrics, and the marker ``numerics`` asks for the metric if a launch has it."""
    COMPARE = "compare"
    """Exactness, because ``workload.compare`` names the metric."""
    UNDECLARED = "undeclared"
    """Nothing: a metric of the workload or script only has to be there."""


class Tolerance(Model, frozen=True):
    """The change that is allowed.

    Attributes:
        value: The change, e.g. 0.05 for 5%, 5 points or 5% of a step by ``scale``; None allows no change of any bit.
        scale: The scale of the change.
        origin: The source of the tolerance.
        direction: The direction in which a metric of a workload or script gets better; None for a metric of the table.
    """

    value: float | None
    scale: Scale = Scale.RELATIVE
    origin: Origin = Origin.MARKER
    direction: Direction | None = None

    @property
    def is_exact(self) -> bool:
        """Return True if values have to be equal bit for bit."""
        return self.value is None

    def __str__(self) -> str:
        """Return the text of a marker that sets this tolerance."""
        if self.origin is Origin.UNDECLARED:
            return "-"
        sign = "" if self.direction is None else _SIGNS[self.direction]
        return "exact" if self.value is None else f"{sign}{self.scale.text(self.value)}"


# Metric -> the change that is allowed.
Tolerances: TypeAlias = Mapping[str, Tolerance]


@dataclass(frozen=True)
class Metric:
    """One compared quantity. Most are times of which less is better, and that ranks record under the metric's name.

    Attributes:
        name: The name.
        help: What it is, for the documentation.
        unit: The unit; empty for a number.
        reader: Returns the value from a launch's facts, or None if the launch has no such value; None if ranks record
            the metric.
        percent: The change that is allowed without a marker, in hundredths on ``scale``, where 0 allows none; None
            compares the metric only if a marker names it.
        kind: The kind of metric.
        direction: The direction in which the metric gets better.
        min_steps: The least number of measured steps for which the metric is meaningful; a launch with fewer steps has
            no value.
        scale: The scale on which changes are measured.
        on_cpu: The tolerance of a time or of memory of CPU ranks without a marker, in place of ``default``.
        cost: The cost of a step that is compared rank by rank, while ``measure`` returns its largest sum over ranks.
        curve: Returns the values of one optimizer of an unedited script by rank and step, which are compared one by
            one, while ``measure`` returns the last of them.
        grows: ``memory`` or ``resident`` if its growth is compared rank by rank, while ``measure`` returns the largest.
        scheduled: Returns the value of a rank's schedule on the nominal machine, which is compared rank by rank, while
            ``measure`` returns the worst.
        hashed: What a hash by step is of, ``weights`` or ``buffers``; else empty.
        is_new: Whether baselines of earlier versions lack the metric, which is then compared only if a marker names it.
    """

    name: str
    help: str
    unit: str = ""
    reader: Callable[[LaunchFacts], Value] | None = None
    percent: float | None = None
    kind: MetricKind = MetricKind.TIMING
    direction: Direction = Direction.LOWER
    min_steps: int = 1
    scale: Scale = Scale.RELATIVE
    on_cpu: Tolerance | None = None
    cost: Cost | None = None
    curve: Curve | None = None
    grows: str = ""
    scheduled: Callable[[Schedule], float] | None = None
    hashed: str = ""
    is_new: bool = False

    @property
    def default(self) -> Tolerance | None:
        """Return the tolerance without a marker; None if the metric is compared only if a marker names it."""
        return None if self.percent is None else Tolerance(self.percent / 100 or None, self.scale, Origin.DEFAULT)

    def measure(self, facts: LaunchFacts) -> Value:
        """Return the value of a launch, or None if the launch has none."""
        if self.reader is None:
            return facts.metrics.get(self.name)
        return self.reader(facts) if facts.num_steps >= self.min_steps else None

    def by_step(self, facts: LaunchFacts) -> dict[int, str]:
        """Return step -> hash after the step, the last of which is the value; empty for any other metric."""
        hashes = getattr(facts, f"{self.name}es") if self.hashed else {}
        return {int(step): value for step, value in hashes.items()}

    @property
    def has_noise(self) -> bool:
        """Return False if one launch decides, e.g. because equal code has equal values."""
        is_by_rank = bool(self.grows or self.cost or self.curve or self.scheduled)
        return self.direction is not Direction.EXACT and not is_by_rank

    @property
    def worse(self) -> int:
        """Return 1 if a larger value is worse, else -1."""
        return -1 if self.direction is Direction.HIGHER else 1

    def num_values(self, facts: LaunchFacts) -> int:
        """Return the number of values of a launch: those of each step and rank, if they are compared one by one."""
        if self.hashed:
            return len(self.by_step(facts))
        if self.curve is not None:
            return sum(len(rank) for series in facts.series for rank in self.curve(series))
        if self.cost is not None:
            return len(by_rank(facts.costs, self.cost) or ())
        return int(self.measure(facts) is not None)

    def parse_tolerance(self, given: object) -> Tolerance:
        """Parse a marker's value: a change such as ``"2%"`` on this metric's scale, or ``"exact"``.

        Raises:
            SpecError: The value is neither of the two, or is not allowed for this metric.
        """
        own = None if self.name in METRICS else self.direction
        if given == "exact":
            return Tolerance(None)
        most = LARGEST[self.scale]
        change = self.scale.parse(given if own is None else str(given)[1:])
        is_exact = self.direction is Direction.EXACT
        if is_exact or change is None or not 0 < change <= most:
            allowed = "'exact'" if is_exact else f"{_range_text(self.scale, most)}, or 'exact'"
            raise SpecError(f"tolerance of {self.name}: got {given!r}, allowed is {allowed}")
        return Tolerance(change, self.scale, direction=own)


# The largest tolerance on each scale; a larger one would allow every change.
LARGEST = {Scale.RELATIVE: 10.0, Scale.POINTS: 1.0, Scale.OF_STEP: 10.0}


def _range_text(scale: Scale, most: float) -> str:
    if scale is Scale.RELATIVE:
        return f"a percentage above 0% up to {scale.text(most)}"
    return f"a number above 0 and up to {scale.text(most)}, such as {scale.text(0.05)!r}"


def _step_time(statistic: str, text: str, percent: float | None = None, min_steps: int = 1) -> Metric:
    """Return the row of a statistic over the steps' times."""
    name = f"step_time_{statistic}"
    return Metric(name, text, "ms", lambda facts: facts.step_time_ms.get(statistic), percent, min_steps=min_steps)


def _cost(cost: Cost, text: str, percent: float = 0, unit: str = "") -> Metric:
    """Return the row of a cost of a step."""

    def reader(facts: LaunchFacts) -> Value:
        ranks = by_rank(facts.costs, cost)
        return None if ranks is None else float(max(sum(parts.values()) for parts in ranks.values()))

    return Metric(cost.value, text, unit, reader, percent, MetricKind.COUNT, cost=cost)


def _scheduled(
    name: str,
    text: str,
    value: Callable[[Schedule], float],
    percent: float,
    unit: str = "",
    direction: Direction = Direction.LOWER,
    scale: Scale = Scale.RELATIVE,
) -> Metric:
    """Return the row of a value of the step's schedule on the nominal machine."""

    def reader(facts: LaunchFacts) -> Value:
        worst = min if direction is Direction.HIGHER else max
        return worst((float(value(group.schedule)) for group in facts.schedules), default=None)

    count = MetricKind.COUNT
    return Metric(name, text, unit, reader, percent, count, direction, scale=scale, scheduled=value, is_new=True)


def _curve(name: str, curve: Curve, text: str) -> Metric:
    """Return the row of a quantity that is compared by step and rank; a step may differ by 5%."""

    def reader(facts: LaunchFacts) -> Value:
        known = [series for series in facts.series if curve(series)]
        values = curve(max(known, key=lambda series: series.num_steps)) if known else []
        return fmean(rank[max(rank, key=int)] for rank in values if rank) if known else None

    return Metric(name, text, "", reader, 5, MetricKind.NUMERIC, curve=curve)


def _other_steps_ms(facts: LaunchFacts) -> Value:
    """Return the times of all optimizers but the one that :attr:`LaunchFacts.step_time_ms` times."""
    times = sorted(series.p50_ms for series in facts.series if not series.is_main and series.p50_ms is not None)
    return math.fsum(times) if times else None


def _kernel_ms(facts: LaunchFacts) -> Value:
    times = [time.ms for family, time in facts.kernels.items() if is_compute(family)]
    return math.fsum(times) if times else None


def _transfer(kind: str) -> Metric:
    """Return the row of the transfers of a kind of collective."""

    def reader(facts: LaunchFacts) -> Value:
        return facts.collectives[kind].transfer_ms if kind in facts.collectives else None

    return Metric(f"{kind}_ms", "transfers of a profiled step, without waits", "ms", reader)


def _hash(kind: str, text: str) -> Metric:
    """Return the row of the hash of a model's ``weights`` or ``buffers``."""

    def reader(facts: LaunchFacts) -> Value:
        hashes = found.by_step(facts)
        return hashes[max(hashes)] if hashes else None

    name = f"{kind.removesuffix('s')}_hash"
    found = Metric(name, text, "", reader, 0, MetricKind.NUMERIC, Direction.EXACT, hashed=kind)
    return found


def _growth(kind: str, text: str, on_cpu: float, on_device: float | None = None) -> Metric:
    """Return the row of the growth of ``memory`` or ``resident`` memory, with its default tolerances in points."""

    def reader(facts: LaunchFacts) -> Value:
        ranks = facts.growth_of(kind)
        return None if facts.simulated or not ranks else round(max(ranks), 3)

    name, memory, points = f"{kind}_growth", MetricKind.MEMORY, Scale.POINTS
    at_most = Tolerance(on_cpu / 100, points, Origin.DEFAULT)
    return Metric(name, text, "", reader, on_device, memory, scale=points, on_cpu=at_most, grows=kind, is_new=True)


_HIGHER, _POINTS, _OF_STEP = Direction.HIGHER, Scale.POINTS, Scale.OF_STEP

_ROWS = (
    _step_time("p50", "median step time", 5),
    replace(
        _step_time("p10", "10th percentile of step times, which other work on the machine disturbs least"),
        on_cpu=Tolerance(1.0, origin=Origin.GROSS),
        is_new=True,
    ),
    Metric(
        LATE_RANK,
        "how much longer the others wait for one rank than this rank waits for them, in nine of ten steps at least",
        "ms",
        lambda facts: max(facts.late_ms, default=None),
        scale=_OF_STEP,
        on_cpu=Tolerance(0.25, _OF_STEP, Origin.GROSS),
        is_new=True,
    ),
    # Its prior of 5% between sessions (noise.py) resolves no less.
    _step_time("p99", "99th percentile of step times", 20, MIN_STEPS_P99),
    _step_time("mean", "mean step time"),
    _step_time("tail5", "mean of the slowest 5% of steps"),
    Metric(
        "other_steps_ms",
        "median step times of the other optimizers of an unedited script, added up",
        "ms",
        _other_steps_ms,
        5,
    ),
    Metric(
        "gemm_throughput_tflops",
        "matrix products of one rank, over the measured loop",
        "TFLOP/s",
        direction=_HIGHER,
    ),
    Metric(
        "overlap_ratio",
        "fraction of communication time that is hidden under compute, in profiled steps",
        percent=3,
        direction=_HIGHER,
        scale=_POINTS,
    ),
    Metric(
        "exposed_comm_ms",
        "communication time of a profiled step during which a rank computes nothing",
        "ms",
        percent=1,
        scale=_OF_STEP,
    ),
    Metric(
        "device_idle_ms",
        "time of a step without a head start of the host in which no stream of a rank is busy",
        "ms",
        scale=_OF_STEP,
    ),
    Metric(
        "kernel_ms",
        "time of all kernels of a profiled step, mean over ranks; operators on CPU ranks",
        "ms",
        _kernel_ms,
        3,
    ),
    *map(_transfer, BUS_FACTORS),
    Metric(
        "overlap_saving",
        "fraction of the serial time of compute and copies that running both at once saves",
        percent=3,
        direction=_HIGHER,
        scale=_POINTS,
    ),
    Metric("samples_per_s", "samples per second of one rank", "1/s", direction=_HIGHER),
    Metric("tokens_per_s", "tokens per second of one rank", "1/s", direction=_HIGHER),
    Metric(
        "model_tflops",
        "operations of one rank that the model needs, without those that checkpointing repeats",
        "TFLOP/s",
        direction=_HIGHER,
    ),
    Metric(
        "mfu",
        "`model_tflops` as a fraction of the device's peak for bfloat16, where the peak is known",
        direction=_HIGHER,
        scale=_POINTS,
    ),
    Metric("peak_memory_bytes", "largest peak of device memory over ranks", "B", percent=2, kind=MetricKind.MEMORY),
    Metric("peak_resident_bytes", "largest peak of memory on the host", "B", kind=MetricKind.MEMORY),
    _growth(
        "memory",
        "growth of a rank's memory in a launch as a fraction of it, which may exceed that of the baseline",
        2,
        10,
    ),
    _growth("resident", "the same of memory that is resident on the host", 10),
    _scheduled(
        "serialized_collectives",
        "collectives of a step that have nothing to hide under: each matrix product waits for them or they for it",
        lambda schedule: schedule.serialized,
        0,
    ),
    _scheduled(
        "scheduled_overlap_ratio",
        "fraction of communication time that is hidden under compute, in the step's schedule on the nominal machine",
        lambda schedule: schedule.overlap_ratio,
        0.5,
        direction=_HIGHER,
        scale=_POINTS,
    ),
    _scheduled(
        "scheduled_exposed_comm_ms",
        "communication time of that schedule during which the rank computes nothing",
        lambda schedule: schedule.exposed_ms,
        1,
        "ms",
    ),
    _scheduled("scheduled_step_ms", "step time of that schedule", lambda schedule: schedule.step_ms, 1, "ms"),
    _cost(Cost.COLLECTIVES, "calls of collectives in a step, by kind, size of the group and type"),
    _cost(Cost.COLLECTIVE_BYTES, "bytes of the larger of input and output, over the collectives of a step", unit="B"),
    _cost(Cost.FLOPS, "floating-point operations of a step, by operator", 0.1),
    _cost(Cost.OPERATORS, "calls of operators in a step", 1),
    _cost(Cost.KERNELS, "kernels of a step on a GPU, by family", 1),
    _cost(Cost.HOST_SYNCS, "runtime calls of a step in which the host waits for the GPU"),
    _cost(
        Cost.HOST_COPIES,
        "copies of a step from the GPU to the host; on CPU ranks values that Python reads from tensors",
    ),
    replace(_cost(Cost.COMPILED_GRAPHS, "graphs compiled before the measured steps"), is_new=True),
    _cost(Cost.RECOMPILATIONS, "compilations of torch.compile in the measured steps"),
    _cost(Cost.GRAPH_BREAKS, "graph breaks of torch.compile"),
    Metric("compile_s", "time of torch.compile before the measured steps", "s"),
    Metric("checkpoint_ms", "time of a checkpoint of an unedited script", "ms"),
    Metric(
        "num_parameters",
        "parameters of the whole model",
        percent=0,
        kind=MetricKind.COUNT,
        direction=Direction.EXACT,
    ),
    _hash(PARAMETERS, "hash of the weights after the last step"),
    replace(
        _hash(
            BUFFERS,
            "hash of the persistent buffers of an unedited script's model, such as the statistics of BatchNorm, and of "
            "averaged copies of the model",
        ),
        is_new=True,
    ),
    _curve(
        "loss",
        lambda series: series.loss,
        "loss of each step and rank of an unedited script, bit for bit if recorded launches are equal",
    ),
    _curve(
        "grad_norm",
        lambda series: series.grad_norm,
        "what `clip_grad_norm_` returned in each step and rank of an unedited script, compared as `loss`",
    ),
    Metric(
        "final_loss",
        "loss of the last measured step",
        reader=lambda facts: facts.final_loss,
        kind=MetricKind.NUMERIC,
    ),
)
METRICS = {row.name: row for row in _ROWS}
# What the marker ``numerics`` asks for.
NUMBERS = {
    row.name: row.default.replace(origin=Origin.NUMERICS)
    for row in _ROWS
    if row.kind is MetricKind.NUMERIC and row.default is not None
}
# Sign of the change by which a metric of a workload or script may get worse.
_SIGNS = {Direction.LOWER: "+", Direction.HIGHER: "-"}
_SIGN_NEEDED = (
    "; for a metric that the workload or script records, write '+5%' if lower is better, '-5%' if higher is better"
)
# Ends of the names of times and rates, as a metric's name includes its unit.
_TIME_UNITS = ("_us", "_ms", "_s", "_sec", "tflops")
UNDECLARED = Tolerance(None, origin=Origin.UNDECLARED)


def metric_of(name: str, direction: Direction | None = None) -> Metric:
    """Return the row of a metric: that of the table, or one for a metric that the workload or script itself records."""
    return METRICS.get(name) or _own_metric(name, direction or Direction.EXACT)


@cache
def _own_metric(name: str, direction: Direction) -> Metric:
    kind = MetricKind.TIMING if name.endswith(_TIME_UNITS) else MetricKind.OWN
    return Metric(name, "recorded by the workload or script", kind=kind, direction=direction)


def own_metrics(facts: LaunchFacts) -> list[str]:
    """Return the names of the metrics that the workload or script of a launch records beside those of the table."""
    return [name for name in facts.metrics if name not in METRICS and name.removesuffix(AS_RUN) not in METRICS]


def middle(metric: Metric, launches: Launches) -> Value:
    """Return :func:`middle_of` the launches' values, or the first value if some launch has no number, if any."""
    values = [metric.measure(launch) for launch in launches]
    numbers = [value for value in values if isinstance(value, float | int)]
    if not numbers or len(numbers) < len(values):
        return values[0] if values else None
    return middle_of(numbers, is_relative=metric.scale is Scale.RELATIVE)


def middle_of(values: Sequence[float], *, is_relative: bool) -> float:
    """Return the median of values on their scale.

    Of an even number of values, the two in the middle have their geometric mean where changes are relative. So the
    values that a reader sees have the change that was judged.
    """
    low, high = median_low(values), median_high(values)
    return math.sqrt(low * high) if is_relative and 0 < low < high else float(low + (high - low) / 2)


def measured_values(launches: Launches) -> dict[str, float | str]:
    """Return metric -> :func:`middle` of the launches, for each metric that has a value for this number of steps."""
    values = {name: middle(row, launches) for name, row in METRICS.items()}
    return {name: value for name, value in values.items() if value is not None}


def format_value(value: Value, unit: str, *, exact: bool = False) -> str:
    """Return a value with its unit, short enough for a table; ``exact`` shows all digits that can differ."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value[:12]
    if unit == "B" and not exact and math.fabs(value) >= 2**14:
        return f"{value / 2**20:.5g} MiB"
    if value % 1 == 0 and (exact or math.fabs(value) < 1e7):
        return f"{value:,.0f} {unit}".rstrip()
    if exact:
        return f"{value!r} {unit}".rstrip()
    digits = f"{value:.4g}" if value == 0 or 1e-3 <= math.fabs(value) < 1e5 else f"{value:.3e}"
    return f"{digits} {unit}".rstrip()


def check_compared(metrics: Collection[str], known: Collection[str]) -> None:
    """Check the metrics that ``workload.compare`` is given.

    Raises:
        SpecError: There is none, or one is not among the ``known`` metrics.
    """
    if not metrics:
        raise SpecError(f"compare: metrics is empty; allowed are {sorted(known)}, or None for the default")
    _refuse_unknown(metrics, known, "compare")


def parse_tolerances(given: Mapping[str, object], source: str) -> dict[str, Tolerance]:
    """Parse tolerances by metric, from texts such as ``5%`` or ``exact``.

    Raises:
        SpecError: A metric is unknown, or a text is not allowed for its metric.
    """
    _refuse_unknown([name for name, text in given.items() if _sign(text) is None], METRICS, source, _SIGN_NEEDED)
    return {name: metric_of(name, _sign(text)).parse_tolerance(text) for name, text in given.items()}


def _sign(given: object) -> Direction | None:
    """Return the direction in which a metric of a workload or script gets better, by the sign of its tolerance."""
    if given == "exact":
        return Direction.EXACT
    return next((found for found, sign in _SIGNS.items() if isinstance(given, str) and given.startswith(sign)), None)


def _refuse_unknown(metrics: Collection[str], known: Collection[str], source: str, further: str = "") -> None:
    """Raise SpecError, which names the ``source``, if a metric is not among the ``known`` ones."""
    if unknown := sorted(set(metrics) - set(known)):
        similar = did_you_mean(unknown, known)
        raise SpecError(f"{source}: metrics {unknown} are unknown{similar}; allowed are {sorted(known)}{further}")
