"""Condenses a result into the compact facts that a baseline stores and verdicts are computed from."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import combinations, pairwise
from statistics import NormalDist, mean, median
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pytest_aorta.common.model import (
    Count,
    Fact,
    Finite,
    Milliseconds,
    Model,
    Name,
    NotNegative,
    Positive,
    Step,
    WeightHash,
)
from pytest_aorta.plan.device_kind import LIBRARIES
from pytest_aorta.result.outcome import LauncherName
from pytest_aorta.result.provenance import Provenance
from pytest_aorta.result.sensors import PlatformFacts
from pytest_aorta.result.series import (
    Parted,
    SeriesFacts,
    optimizers_facts,
)
from pytest_aorta.result.trace.families import mean_over_ranks
from pytest_aorta.result.trace.overlap import Breakdown, break_down
from pytest_aorta.result.trace.profiled_steps import (
    ANOTHER_RANK,
    CollectiveFacts,
    CostsOfRanks,
    HeadStart,
    Kernels,
    StepOverlap,
    collective_facts,
    distinct_costs,
)
from pytest_aorta.result.trace.schedule import ScheduleOfRanks, distinct_schedules

if TYPE_CHECKING:
    from pytest_aorta.result.measurements import WorkloadResult

# Medians of at most 16 groups of values; fewer groups show no growth.
_MAX_GROUPS = 16
_MIN_GROUPS = 7
# Neighboring steps are correlated, often with a lag-1 autocorrelation of 0.6, so a group has at least this many steps.
DEPENDENT_STEPS = 5
_CONFIDENCE = 0.99


def growth(values: Sequence[float], dependent: int = 1) -> float:
    """Return the relative growth from the first value to the last that is certain at 99% confidence, else 0.

    The slope is estimated from the medians of up to 16 groups of consecutive values, each of at least ``dependent``
    values because neighboring values are correlated. The bound of its confidence interval that is closer to 0 counts. A
    decline is negative. Fewer than 7 groups show no growth.
    """
    groups = min(_MAX_GROUPS, len(values) // dependent)
    if groups < _MIN_GROUPS or min(values) <= 0:
        return 0.0
    bounds = [len(values) * number // groups for number in range(groups + 1)]
    medians = [median(values[begin:end]) for begin, end in pairwise(bounds)]
    low, high = _slope_bounds(medians, _CONFIDENCE)
    certain = low if low > 0 else high if high < 0 else 0.0
    return certain * (groups - 1) / median(medians)


def _slope_bounds(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Return the confidence interval of the Theil-Sen slope per value (Sen, J. Am. Stat. Assoc. 63, 1968, eq. 2.6).

    ``scipy.stats.theilslopes`` computes the same bits, and importing it takes longer than a warm launch.
    """
    numbered = combinations(enumerate(values), 2)
    slopes = sorted((later - earlier) / (after - before) for (before, earlier), (after, later) in numbered)
    size, ties = len(values), Counter(values).values()
    pairs = size * (size - 1) * (2 * size + 5) - sum(count * (count - 1) * (2 * count + 5) for count in ties)
    reach = NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(pairs / 18)
    low, high = round((len(slopes) - reach) / 2) - 1, round((len(slopes) + reach) / 2)
    return slopes[max(low, 0)], slopes[min(high, len(slopes) - 1)]


# Facts of the environment that the code under test can set by itself and that bitwise numerics depend on. Another value
# of such a fact is a change of the code, so it never keeps numbers from being compared.
PROGRAM_ENVIRONMENT = (
    "attention",
    "bitwise_reproducible",
    "deterministic_algorithms",
    "num_threads",
    "tf32_matmul",
)
# Facts that the CPU and the code determine together: the pins of CPU kernels, and what the pins leave to be reported.
CPU_ENVIRONMENT = ("cpu_capability", "cpu_kernels", "cpu_vendor")
# Facts of the environment that bitwise numerics depend on, in addition to the world's size and device. Those that are
# not named above belong to the machine or to what is installed on it.
NUMERIC_ENVIRONMENT = (
    "torch",
    "device",
    "device_name",
    *LIBRARIES,
    "weight_hash_version",
    *CPU_ENVIRONMENT,
    *PROGRAM_ENVIRONMENT,
)
# Facts of the environment that a workload chooses in setup() by the available memory. They change times and memory, but
# no bit of the numbers.
CHOICES = ("activation_checkpointing",)
# The fact about a rank whose Python code was traced, e.g. by coverage. Other ranks do not have the fact.
PYTHON_TRACER = "python_tracer"
# Prefix of metrics whose value over ranks is the maximum; for every other metric it is the mean.
_PEAK = "peak_"
# A rank's steps of one sign of lag, at least, per step of the other sign. Ranks that are late in turns lag in as many
# steps as they are ahead; with 1 ms of work on one rank of four H200s, this rank lagged in 92% of the steps or more.
_MOST_IN_TURN = 2


# Launches that were recorded by earlier versions have no p10.
STEP_TIMES = ("mean", "p50", "p99", "tail5")


class LaunchDescription(Model, frozen=True, kw_only=True, omit_defaults=True):
    """The explanation of a launch's facts to a reader: notes and reasons name it, and no metric is made of it.

    Attributes:
        step_time_growth: relative growth of the step time within the launch that noise does not explain.
        most_exposed_rank: the rank with the most exposed communication; None if no step was profiled.
        critical_rank: the rank that the parts of ``breakdown_ms`` belong to; None with one rank.
        throttled: the devices that were throttled, and why; empty if none was throttled or nothing is known.
        blocked_by: the runtime call in which profiled steps wait for the device, so that no host could be ahead of
            the device; empty if there was none.
        late_steps: how many profiled steps do not count because the host was late in them; empty if all of them count.
        overlap_problem: the reason why steps were profiled without a result; empty if there is a result or no step was
            profiled.
        graph_problem: the reason why a rank's step has no graph of streams, or what the graph lacks; empty if neither.
        optimizers: a line on what the series measured; empty if there is nothing to say.
        apart: whether no rank communicates in its steps.
        replicas: the replicas of parameters that became different.
        system: what can move times and is not in ``environment``: versions of what is beside the ranks, settings of the
            host and of its devices.
    """

    step_time_growth: Finite = 0.0
    most_exposed_rank: Count | None = None
    critical_rank: Count | None = None
    throttled: str = ""
    blocked_by: str = ""
    late_steps: str = ""
    overlap_problem: str = ""
    graph_problem: str = ""
    optimizers: str = ""
    apart: bool = False
    replicas: list[Parted] = []
    system: dict[Name, Fact] = {}


class LaunchFacts(Model, frozen=True, kw_only=True, omit_defaults=True):
    """The facts of one launch, with the unit in each name: what baselines, the history and searches store of a launch.

    Attributes:
        provenance: time, session block and code version of the launch.
        description: what explains the launch and is not compared.
        launcher: what started the ranks: torchrun, forkserver or the name of a plugin's launcher.
        simulated: whether nothing was exchanged, so that weights, losses and times mean nothing.
        num_steps: measured steps.
        step_time_ms: mean, p10, p50, p99 and tail5 (mean of the slowest 5%) of the steps' maxima over ranks.
        metrics: the workload's metrics over ranks: the maximum of a peak, the mean of every other metric; and the
            maximum of what ranks measured outside of the steps' times.
        weight_hashes: step -> hash.
        buffer_hashes: step -> hash of the persistent buffers that each rank has; empty if none were hashed.
        final_loss: the loss of the last measured step; None if nothing was trained.
        environment: the versions and settings that bitwise numerics depend on, and what setup() chose.
        rank_lag_ms: how much less each rank waits per step than its peers; empty if waits are not known.
        late_ms: how much less it waits in nine steps of ten, at least; likewise.
        memory_bytes: the median memory in use of each rank; empty if it was read in too few steps to show growth.
        memory_growth_bytes: its growth within the launch on each rank, likewise.
        resident_bytes: the median memory of each rank that is resident on the host, likewise.
        resident_growth_bytes: its growth within the launch on each rank, likewise.
        cpu_wait: for which part of the steps' time ranks waited for a CPU, at most: the sum over ranks and threads;
            None if it is not known.
        gc_ms: time of a step in which each rank collected garbage, a mean over steps.
        exposed_ms: exposed communication of a profiled step by collective, mean over steps and ranks.
        breakdown_ms: parts of the median step, as in :class:`~pytest_aorta.result.trace.overlap.Part`; empty if no
            step was profiled.
        sm_clock_mhz: the lowest of the devices' median SM clocks; None if no clock is known.
        profiler: the Python tracer that slowed the steps down, e.g. coverage; empty if there was none.
        kernels: kernels of a profiled step by family, mean over ranks; operators on CPU ranks.
        collectives: transfers and waits of a profiled step by collective.
        costs: the costs of a step by the ranks that have them in common; empty if a rank counted none.
        schedules: the step's schedules on the nominal machine, by the ranks that have them in common; empty if a rank
            has no graph of its step, or no collective in it.
        series: the optimizers of an unedited script, in the order of their first steps.
    """

    provenance: Provenance
    description: LaunchDescription = LaunchDescription()
    launcher: LauncherName
    simulated: bool = False
    num_steps: Positive
    step_time_ms: dict[str, Milliseconds]
    metrics: dict[Name, Finite]
    weight_hashes: dict[Step, WeightHash]
    buffer_hashes: dict[Step, WeightHash] = {}
    final_loss: Finite | None
    environment: dict[str, Fact]
    rank_lag_ms: list[Finite]
    late_ms: list[Finite] = []
    memory_bytes: list[Positive] = []
    memory_growth_bytes: list[Finite] = []
    resident_bytes: list[Positive] = []
    resident_growth_bytes: list[Finite] = []
    cpu_wait: NotNegative | None = None
    gc_ms: list[Milliseconds] = []
    exposed_ms: dict[str, Milliseconds] = {}
    breakdown_ms: dict[str, Milliseconds] = {}
    sm_clock_mhz: float | None = None
    profiler: str = ""
    kernels: Kernels = {}
    collectives: dict[str, CollectiveFacts] = {}
    costs: list[CostsOfRanks] = []
    schedules: list[ScheduleOfRanks] = []
    series: list[SeriesFacts] = []

    def __post_init__(self) -> None:
        """Refuse what the types allow: values of other ranks, and step times without one."""
        ranks = sorted(rank for group in self.costs for rank in group.ranks)
        if ranks != [*range(len(ranks))] and not self.simulated:
            raise ValueError(f"costs: got ranks {ranks}, allowed is each rank once")
        if absent := [name for name in STEP_TIMES if name not in self.step_time_ms]:
            raise ValueError(f"step_time_ms: {', '.join(absent)} is missing")
        for name in ("memory", "resident"):
            grown, used = (len(getattr(self, f"{name}{part}_bytes")) for part in ("_growth", ""))
            if grown != used:
                raise ValueError(f"{name}_growth_bytes: got {grown} values for {used} ranks, allowed is one per rank")

    def condensed(self, *, has_names: bool) -> LaunchFacts:
        """Return what a baseline keeps of these facts."""
        series = [one.condensed(has_names=has_names) for one in self.series]
        costs = [group.replace(costs=group.costs.replace(places={})) for group in self.costs]
        if has_names:
            return self.replace(series=series)
        return self.replace(series=series, costs=costs, schedules=[group.condensed() for group in self.schedules])

    @property
    def device(self) -> str:
        """Return the kind of device that the ranks computed on, such as ``cuda``."""
        return str(self.environment.get("device", "cuda"))

    def growth_of(self, memory: str) -> list[float]:
        """Return the growth of each rank's ``memory`` or ``resident`` memory as a fraction of its median, if known."""
        grown, used = (getattr(self, f"{memory}{part}_bytes") for part in ("_growth", ""))
        return [more / of for more, of in zip(grown, used, strict=True)]


Launches: TypeAlias = Sequence[LaunchFacts]


def launch_facts(result: WorkloadResult) -> LaunchFacts:
    """Return the facts of a result. The time of a step is its maximum over ranks."""
    steps = np.asarray(result.step_times_ms)
    tail = np.sort(steps)[-max(1, len(steps) // 20) :]
    p10, p50, p99 = np.quantile(steps, (0.1, 0.5, 0.99))
    quantities = {"mean": steps.mean(), "p10": p10, "p50": p50, "p99": p99, "tail5": tail.mean()}
    broken_down = _breakdown(result, float(p50))
    exposed_ms = [sum(step.exposed_comm_ms for step in rank) for rank in result.overlap]
    memory, resident = map(_grown, (result.memory_bytes, [rank.resident_bytes for rank in result.ranks]))
    graphs = [None if costs is None else costs.graph for costs in result.costs]
    has_messages, is_simulated = any(one and one.collectives for one in result.costs), bool(result.simulated)
    optimizers = optimizers_facts(
        [rank.series for rank in result.ranks], has_messages=has_messages, is_simulated=is_simulated
    )
    sensors = result.platform_facts or PlatformFacts("")
    return LaunchFacts(
        provenance=result.provenance,
        description=LaunchDescription(
            step_time_growth=_short(growth(result.step_times_ms, DEPENDENT_STEPS)),
            most_exposed_rank=exposed_ms.index(max(exposed_ms)) if exposed_ms else None,
            critical_rank=broken_down.rank if broken_down and broken_down.num_ranks > 1 else None,
            throttled="; ".join(sensors.throttled),
            blocked_by=_blocking_call(result.head_start),
            late_steps=_late_steps(result),
            overlap_problem=result.overlap_problem,
            graph_problem=next((text for graph in graphs if graph and (text := graph.problem)), ""),
            apart=optimizers.are_apart,
            optimizers=optimizers.text,
            replicas=optimizers.replicas,
            system=result.system | sensors.about,
        ),
        launcher=result.launcher,
        simulated=is_simulated,
        num_steps=len(steps),
        step_time_ms=_short(quantities),
        metrics=_largest([rank.outside for rank in result.ranks])
        | {name: _over_ranks(name, values) for name, values in sorted(result.rank_metrics.items())},
        weight_hashes=result.weight_hashes,
        buffer_hashes=optimizers.buffer_hashes,
        final_loss=result.loss[-1] if result.loss else None,
        environment=_environment(result),
        rank_lag_ms=_short(rank_lags_ms(result.collective_ms)),
        late_ms=_short(_least_lags_ms(result.collective_ms)),
        memory_bytes=[used for used, _ in memory],
        memory_growth_bytes=_short([more for _, more in memory]),
        resident_bytes=[used for used, _ in resident],
        resident_growth_bytes=_short([more for _, more in resident]),
        cpu_wait=_cpu_wait([rank.cpu_wait for rank in result.ranks]),
        gc_ms=_short([rank.gc_ms for rank in result.ranks]),
        exposed_ms=_exposed(result.overlap),
        breakdown_ms=_short(broken_down.parts_ms) if broken_down else {},
        sm_clock_mhz=sensors.lowest_sm_clock_mhz,
        profiler=str(result.environment.get(PYTHON_TRACER, "")),
        kernels=_short(mean_over_ranks(result.kernels)),
        collectives=_short(collective_facts(result.collectives, len(result.overlap[0]))) if result.overlap else {},
        costs=distinct_costs(result.costs, result.simulated or range(len(result.ranks))),
        schedules=distinct_schedules(graphs, result.simulated or range(len(result.ranks))),
        series=optimizers.series,
    )


def _grown(ranks: Sequence[Sequence[int]]) -> list[tuple[int, float]]:
    """Return the median and the growth of each rank's bytes; empty if they were read in too few steps."""
    is_known = all(len(values) >= _MIN_GROUPS and min(values) > 0 for values in ranks)
    return [(used := round(median(values)), growth(values) * used) for values in ranks] if is_known else []


def _largest(ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the largest of the ranks' values by name."""
    names = sorted({name for rank in ranks for name in rank})
    return {name: _short(max(rank[name] for rank in ranks if name in rank)) for name in names}


def _cpu_wait(ranks: Sequence[float | None]) -> float | None:
    known = [wait for wait in ranks if wait is not None]
    return round(sum(known), 3) if len(known) == len(ranks) else None


def _exposed(overlap: list[list[StepOverlap]]) -> dict[str, float]:
    """Return exposed milliseconds per step by collective; a step that lacks a collective counts as 0."""
    steps = [step for rank in overlap for step in rank]
    total_ms: dict[str, float] = defaultdict(float)
    for step in steps:
        for kind, time in step.collectives.items():
            total_ms[kind] += time.exposed_ms
    return {kind: _short(total_ms[kind] / len(steps)) for kind in sorted(total_ms)}


def _blocking_call(head_starts: Sequence[HeadStart]) -> str:
    """Return the call that blocked a rank itself, if known, else the report of the first blocked rank."""
    calls = [lead.blocked_by for lead in head_starts if lead.blocked_by]
    return next((call for call in calls if call != ANOTHER_RANK), calls[0] if calls else "")


def _late_steps(result: WorkloadResult) -> str:
    # All ranks leave out the same steps.
    num_late = max((lead.late_steps for lead in result.head_start), default=0)
    num_ahead = max(map(len, result.overlap), default=0)
    if not num_late:
        return ""
    of_all = f"{num_late} of {num_late + num_ahead} profiled steps"
    return f"the host was late in {of_all} in spite of every head start; the other {num_ahead} count"


def _breakdown(result: WorkloadResult, p50_ms: float) -> Breakdown | None:
    """Return the parts of the median step; None if no step was profiled."""
    if not result.overlap or not all(result.overlap):
        return None
    is_known = len(result.overlap_as_run) == len(result.overlap) and all(result.overlap_as_run)
    as_run = result.overlap_as_run if is_known else result.overlap
    # If a head start failed, its steps show neither the overlap that dependencies allow nor that of the timed steps.
    was_ahead = all(lead.succeeded for lead in result.head_start)
    return break_down(result.overlap if was_ahead else as_run, as_run, p50_ms)


def _environment(result: WorkloadResult) -> dict[str, Any]:
    # Numbers that are computed on a GPU do not depend on the host's instruction set and threads.
    left_out = (*CPU_ENVIRONMENT, "num_threads") if result.device != "cpu" else ()
    kept = (*NUMERIC_ENVIRONMENT, *CHOICES)
    names = [name for name in kept if name in result.environment and name not in left_out]
    return {name: result.environment[name] for name in names}


def over_ranks(name: str, values: Sequence[float]) -> float:
    """Return a metric over ranks: the largest value if the name starts with ``peak_``, else the mean."""
    return float(max(values) if name.startswith(_PEAK) else mean(values))


def _over_ranks(name: str, values: Sequence[float]) -> float:
    """Return a metric over ranks. Counts are compared exactly, so the mean of integers keeps all digits."""
    value = over_ranks(name, values)
    return value if all(float(one).is_integer() for one in values) else _short(value)


def _short(value: Any) -> Any:
    """Return a number with six digits, or a list, dictionary or struct of such numbers; integers stay exact.

    Six digits resolve far less than the noise and keep diffs of baselines readable.
    """
    if isinstance(value, float):
        return float(value) if value.is_integer() else float(f"{value:.6g}")
    if isinstance(value, list):
        return list(map(_short, value))
    if isinstance(value, Model):
        return value.replace(**{name: _short(getattr(value, name)) for name in value.__struct_fields__})
    return {str(key): _short(one) for key, one in value.items()} if isinstance(value, dict) else value


def rank_lags_ms(collective_ms: Sequence[Sequence[float]]) -> list[float]:
    """Return how much less each rank waits in collectives than its peers, in milliseconds per step.

    A rank's lag is the median over steps of the peers' median wait minus the rank's own wait, from
    ``collective_ms[rank][step]``. The straggler arrives last, so its lag is the time that its peers spend waiting
    for it. Ranks that are late in turns lag in some steps and are ahead in others. The median is then that of either
    kind of step by chance, so the lag is 0 unless one kind is at least twice as frequent as the other. Empty without
    waits, or with one rank.
    """
    by_step = _lags_by_step_ms(collective_ms)
    late, ahead = (by_step > 0).sum(axis=1), (by_step < 0).sum(axis=1)
    is_clear = np.maximum(late, ahead) >= _MOST_IN_TURN * np.minimum(late, ahead)
    return [float(lag) for lag in np.where(is_clear, np.median(by_step, axis=1), 0.0)] if by_step.size else []


def _least_lags_ms(collective_ms: Sequence[Sequence[float]]) -> list[float]:
    """Return the lag of each rank that nine steps of ten exceed, 0 at least, so that no disturbance of some counts."""
    by_step = _lags_by_step_ms(collective_ms)
    return np.maximum(np.quantile(by_step, 0.1, axis=1), 0.0).tolist() if by_step.size else []


def _lags_by_step_ms(collective_ms: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """Return ``lag[rank][step]``; empty without waits, or with one rank."""
    if len(collective_ms) < 2 or not collective_ms[0]:
        return np.empty((0, 0))
    waits = np.asarray(collective_ms)
    num_ranks = len(waits)
    # Sort each step's waits once. Leaving out a rank's own wait moves the later waits up by one, so the median of its
    # peers is one of two neighboring sorted waits, or the mean of two such pairs.
    order = np.argsort(waits, axis=0)
    position = np.argsort(order, axis=0)
    in_order = np.take_along_axis(waits, order, axis=0)
    low, high = (num_ranks - 2) // 2, (num_ranks - 1) // 2
    peers = [np.where(position <= middle, in_order[middle + 1], in_order[middle]) for middle in (low, high)]
    return np.asarray((peers[0] + peers[1]) / 2 - waits)
