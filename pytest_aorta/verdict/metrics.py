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
from pytest_aorta.result.facts import LaunchFacts
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


@dataclass(frozen=True)
class Metric:
    """One compared quantity.

    Attributes:
        measure: Returns the value from a launch's facts, or None if the launch has no such value.
        kind: The kind of metric.
        direction: The direction in which the metric gets better.
        default: The tolerance without a marker; None compares the metric only if a marker names it.
        min_steps: The least number of measured steps for which the metric is meaningful; a launch with fewer steps has
            no value.
        scale: The scale on which changes are measured.
        by_step: Returns step -> value after the step; ``measure`` returns the last of these values. Empty for a
            metric of the whole launch.
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
    unit: str
    kind: MetricKind
    direction: Direction
    default: Tolerance | None
    measure: Callable[[LaunchFacts], Value]
    help: str
    min_steps: int = 1
    scale: Scale = Scale.RELATIVE
    by_step: Callable[[LaunchFacts], dict[int, str]] = lambda _: {}
    on_cpu: Tolerance | None = None
    cost: Cost | None = None
    curve: Curve | None = None
    grows: str = ""
    scheduled: Callable[[Schedule], float] | None = None
    hashed: str = ""
    is_new: bool = False

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


def _default(percent: float | None, direction: Direction, scale: Scale = Scale.RELATIVE) -> Tolerance | None:
    if direction is Direction.EXACT:
        return Tolerance(None, origin=Origin.DEFAULT)
    return None if percent is None else Tolerance(percent / 100, scale, Origin.DEFAULT)


def _step_time(statistic: str, percent: float | None, text: str, min_steps: int = 1) -> Metric:
    """Return the row of a statistic over the steps' times; ``percent`` is its default tolerance."""

    def measure(facts: LaunchFacts) -> Value:
        return facts.step_time_ms.get(statistic) if facts.num_steps >= min_steps else None

    default = _default(percent, Direction.LOWER)
    name = f"step_time_{statistic}"
    return Metric(name, "ms", MetricKind.TIMING, Direction.LOWER, default, measure, text, min_steps=min_steps)


def _recorded(
    name: str,
    unit: str,
    kind: MetricKind,
    direction: Direction,
    percent: float | None,
    text: str,
    scale: Scale = Scale.RELATIVE,
) -> Metric:
    """Return the row of a metric that ranks record under its name; ``percent`` is its default tolerance."""
    default = _default(percent, direction, scale)
    return Metric(name, unit, kind, direction, default, lambda facts: facts.metrics.get(name), text, scale=scale)


def _cost(cost: Cost, unit: str, percent: float | None, text: str) -> Metric:
    """Return the row of a cost of a step; ``percent`` is its default tolerance, None allows no increase."""

    def measure(facts: LaunchFacts) -> Value:
        ranks = by_rank(facts.costs, cost)
        return None if ranks is None else float(max(sum(parts.values()) for parts in ranks.values()))

    default = Tolerance(None if percent is None else percent / 100, origin=Origin.DEFAULT)
    return Metric(cost.value, unit, MetricKind.COUNT, Direction.LOWER, default, measure, text, cost=cost)


def _scheduled(
    name: str,
    unit: str,
    direction: Direction,
    allowed: Tolerance,
    value: Callable[[Schedule], float],
    text: str,
) -> Metric:
    """Return the row of a value of the step's schedule on the nominal machine."""

    def measure(facts: LaunchFacts) -> Value:
        worst = min if direction is Direction.HIGHER else max
        return worst((float(value(group.schedule)) for group in facts.schedules), default=None)

    return Metric(
        name,
        unit,
        MetricKind.COUNT,
        direction,
        allowed,
        measure,
        text,
        scale=allowed.scale,
        scheduled=value,
        is_new=True,
    )


def _curve(name: str, curve: Curve, text: str) -> Metric:
    """Return the row of a quantity that is compared by step and rank; a step may differ by 5%."""

    def measure(facts: LaunchFacts) -> Value:
        known = [series for series in facts.series if curve(series)]
        values = curve(max(known, key=lambda series: series.num_steps)) if known else []
        return fmean(rank[max(rank, key=int)] for rank in values if rank) if known else None

    default = _default(5, Direction.LOWER)
    return Metric(name, "", MetricKind.NUMERIC, Direction.LOWER, default, measure, text, curve=curve)


def _other_steps_ms(facts: LaunchFacts) -> Value:
    """Return the times of all optimizers but the one that :attr:`LaunchFacts.step_time_ms` times."""
    times = sorted(series.p50_ms for series in facts.series if not series.is_main and series.p50_ms is not None)
    return math.fsum(times) if times else None


def _kernel_ms(facts: LaunchFacts) -> Value:
    times = [ms for family, ms in facts.kernel_ms.items() if is_compute(family)]
    return math.fsum(times) if times else None


def _transfer(kind: str) -> Metric:
    """Return the row of the transfers of a kind of collective."""

    def measure(facts: LaunchFacts) -> Value:
        return facts.collectives[kind].transfer_ms if kind in facts.collectives else None

    text = "transfers of a profiled step, without waits"
    return Metric(f"{kind}_ms", "ms", MetricKind.TIMING, Direction.LOWER, None, measure, text)


def _hash(kind: str, text: str, *, is_new: bool = False) -> Metric:
    """Return the row of the hash of a model's ``weights`` or ``buffers``."""
    name = f"{kind.removesuffix('s')}_hash"

    def by_step(facts: LaunchFacts) -> dict[int, str]:
        return {int(step): value for step, value in getattr(facts, f"{name}es").items()}

    def measure(facts: LaunchFacts) -> Value:
        hashes = by_step(facts)
        return hashes[max(hashes)] if hashes else None

    default = _default(None, Direction.EXACT)
    numeric, exact = MetricKind.NUMERIC, Direction.EXACT
    return Metric(name, "", numeric, exact, default, measure, text, by_step=by_step, hashed=kind, is_new=is_new)


def _growth(kind: str, on_device: int | None, on_cpu: int, text: str) -> Metric:
    """Return the row of the growth of ``memory`` or ``resident`` memory, with its default tolerances in points."""
    name, lower, scale = f"{kind}_growth", Direction.LOWER, Scale.POINTS

    def measure(facts: LaunchFacts) -> Value:
        ranks = facts.growth_of(kind)
        return None if facts.simulated or not ranks else round(max(ranks), 3)

    default, at_most = (_default(points, lower, scale) for points in (on_device, on_cpu))
    memory = MetricKind.MEMORY
    return Metric(name, "", memory, lower, default, measure, text, scale=scale, on_cpu=at_most, grows=kind, is_new=True)


_TIME, _MEMORY, _COUNT, _NUMERIC = MetricKind.TIMING, MetricKind.MEMORY, MetricKind.COUNT, MetricKind.NUMERIC
_LOWER, _HIGHER, _EXACT = Direction.LOWER, Direction.HIGHER, Direction.EXACT
_POINTS, _OF_STEP = Scale.POINTS, Scale.OF_STEP

_ROWS = (
    _step_time("p50", 5, "median step time"),
    replace(
        _step_time("p10", None, "10th percentile of step times, which other work on the machine disturbs least"),
        on_cpu=Tolerance(1.0, origin=Origin.GROSS),
        is_new=True,
    ),
    Metric(
        LATE_RANK,
        "ms",
        _TIME,
        _LOWER,
        None,
        lambda facts: max(facts.late_ms, default=None),
        "how much longer the others wait for one rank than this rank waits for them, in nine of ten steps at least",
        scale=_OF_STEP,
        on_cpu=Tolerance(0.25, _OF_STEP, Origin.GROSS),
        is_new=True,
    ),
    _step_time("p99", 10, "99th percentile of step times", MIN_STEPS_P99),
    _step_time("mean", None, "mean step time"),
    _step_time("tail5", None, "mean of the slowest 5% of steps"),
    Metric(
        "other_steps_ms",
        "ms",
        _TIME,
        _LOWER,
        _default(5, _LOWER),
        _other_steps_ms,
        "median step times of the other optimizers of an unedited script, added up",
    ),
    _recorded(
        "gemm_throughput_tflops", "TFLOP/s", _TIME, _HIGHER, None, "matrix products of one rank, over the measured loop"
    ),
    _recorded(
        "overlap_ratio",
        "",
        _TIME,
        _HIGHER,
        3,
        "fraction of communication time that is hidden under compute, in profiled steps",
        _POINTS,
    ),
    _recorded(
        "exposed_comm_ms",
        "ms",
        _TIME,
        _LOWER,
        1,
        "communication time of a profiled step during which a rank computes nothing",
        _OF_STEP,
    ),
    _recorded(
        "device_idle_ms",
        "ms",
        _TIME,
        _LOWER,
        None,
        "time of a step without a head start of the host in which no stream of a rank is busy",
        _OF_STEP,
    ),
    Metric(
        "kernel_ms",
        "ms",
        _TIME,
        _LOWER,
        _default(2, _LOWER),
        _kernel_ms,
        "time of all kernels of a profiled step, mean over ranks; operators on CPU ranks",
    ),
    *map(_transfer, BUS_FACTORS),
    _recorded(
        "overlap_saving",
        "",
        _TIME,
        _HIGHER,
        3,
        "fraction of the serial time of compute and copies that running both at once saves",
        _POINTS,
    ),
    _recorded("samples_per_s", "1/s", _TIME, _HIGHER, None, "samples per second of one rank"),
    _recorded("tokens_per_s", "1/s", _TIME, _HIGHER, None, "tokens per second of one rank"),
    _recorded(
        "model_tflops",
        "TFLOP/s",
        _TIME,
        _HIGHER,
        None,
        "operations of one rank that the model needs, without those that checkpointing repeats",
    ),
    _recorded(
        "mfu",
        "",
        _TIME,
        _HIGHER,
        None,
        "`model_tflops` as a fraction of the device's peak for bfloat16, where the peak is known",
        _POINTS,
    ),
    _recorded("peak_memory_bytes", "B", _MEMORY, _LOWER, 2, "largest peak of device memory over ranks"),
    _recorded("peak_resident_bytes", "B", _MEMORY, _LOWER, None, "largest peak of memory on the host"),
    _growth(
        "memory",
        10,
        2,
        "growth of a rank's memory in a launch as a fraction of it, which may exceed that of the baseline",
    ),
    _growth(
        "resident",
        None,
        10,
        "the same of memory that is resident on the host",
    ),
    _scheduled(
        "serialized_collectives",
        "",
        _LOWER,
        Tolerance(None, origin=Origin.DEFAULT),
        lambda schedule: schedule.serialized,
        "collectives of a step that have nothing to hide under: each matrix product waits for them or they for it",
    ),
    _scheduled(
        "scheduled_overlap_ratio",
        "",
        _HIGHER,
        Tolerance(0.005, _POINTS, Origin.DEFAULT),
        lambda schedule: schedule.overlap_ratio,
        "fraction of communication time that is hidden under compute, in the step's schedule on the nominal machine",
    ),
    _scheduled(
        "scheduled_exposed_comm_ms",
        "ms",
        _LOWER,
        Tolerance(0.01, origin=Origin.DEFAULT),
        lambda schedule: schedule.exposed_ms,
        "communication time of that schedule during which the rank computes nothing",
    ),
    _scheduled(
        "scheduled_step_ms",
        "ms",
        _LOWER,
        Tolerance(0.01, origin=Origin.DEFAULT),
        lambda schedule: schedule.step_ms,
        "step time of that schedule",
    ),
    _cost(Cost.COLLECTIVES, "", None, "calls of collectives in a step, by kind, size of the group and type"),
    _cost(Cost.COLLECTIVE_BYTES, "B", None, "bytes of the larger of input and output, over the collectives of a step"),
    _cost(Cost.FLOPS, "", 0.1, "floating-point operations of a step, by operator"),
    _cost(Cost.OPERATORS, "", 1, "calls of operators in a step"),
    _cost(Cost.KERNELS, "", 1, "kernels of a step on a GPU, by family"),
    _cost(Cost.HOST_SYNCS, "", None, "runtime calls of a step in which the host waits for the GPU"),
    _cost(
        Cost.HOST_COPIES,
        "",
        None,
        "copies of a step from the GPU to the host; on CPU ranks values that Python reads from tensors",
    ),
    replace(
        _cost(Cost.COMPILED_GRAPHS, "", None, "graphs compiled before the measured steps"),
        is_new=True,
    ),
    _cost(Cost.RECOMPILATIONS, "", None, "compilations of torch.compile in the measured steps"),
    _cost(Cost.GRAPH_BREAKS, "", None, "graph breaks of torch.compile"),
    _recorded(
        "compile_s",
        "s",
        _TIME,
        _LOWER,
        None,
        "time of torch.compile before the measured steps",
    ),
    _recorded("checkpoint_ms", "ms", _TIME, _LOWER, None, "time of a checkpoint of an unedited script"),
    _recorded("num_parameters", "", _COUNT, _EXACT, None, "parameters of the whole model"),
    _hash(PARAMETERS, "hash of the weights after the last step"),
    _hash(
        BUFFERS,
        "hash of the persistent buffers of an unedited script's model, such as the statistics of BatchNorm",
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
    Metric("final_loss", "", _NUMERIC, _LOWER, None, lambda facts: facts.final_loss, "loss of the last measured step"),
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
    return Metric(
        name, "", kind, direction, None, lambda facts: facts.metrics.get(name), "recorded by the workload or script"
    )


def own_metrics(facts: LaunchFacts) -> list[str]:
    """Return the names of the metrics that the workload or script of a launch records beside those of the table."""
    return [name for name in facts.metrics if name not in METRICS and name.removesuffix(AS_RUN) not in METRICS]


def middle(metric: Metric, launches: Sequence[LaunchFacts]) -> Value:
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


def measured_values(launches: Sequence[LaunchFacts]) -> dict[str, float | str]:
    """Return metric -> :func:`middle` of the launches, for each metric that has a value for this number of steps."""
    values = {name: middle(row, launches) for name, row in METRICS.items()}
    return {name: value for name, value in values.items() if value is not None}


def format_value(value: Value, unit: str, *, exact: bool = False) -> str:
    """Return a value with its unit, short enough for a table; ``exact`` shows all digits that can differ."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value[:12]
    if unit == "B" and not exact:
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
