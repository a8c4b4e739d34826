"""What is taken for a metric's spread before a baseline has shown its own, and which launches are of one sitting."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import median

from pytest_aorta.common.errors import BaselineError
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.verdict.baseline import Baseline, read_baseline_file
from pytest_aorta.verdict.metrics import METRICS, Metric, MetricKind
from pytest_aorta.verdict.statistics.scale import Scale
from pytest_aorta.verdict.statistics.variance import Revision, Variance, VarianceComponents, observed, typical

# A machine left to itself for so long is in another state: its clocks, its temperature, its neighbours.
BLOCK_GAP_S = {"cuda": 6 * 3600, "cpu": 3600}
MIN_CASES = 3
# Of each side, slower and faster.
CASES_DF = 2.0
# Standard deviations within and between sittings, seen on H200s and on shared CPUs (docs/benchmarks.md).
_WITHIN = {"cuda": 0.005, "cpu": 0.15}
_BETWEEN = {"cuda": 0.005, "cpu": 0.25}
_WITHIN_DF, _BETWEEN_DF = 1.0, 6.0
# Means and tails scatter more than medians; memory hardly at all.
_TIMES = {"step_time_p99": 10.0, "step_time_tail5": 10.0, "step_time_mean": 3.0, "tokens_per_s": 3.0}
_MEMORY = 0.001
# Shares in points, exposed times as parts of a step.
_FRACTION = {"cuda": 0.01, "cpu": 0.1}


def default_variance(metric: Metric, device: str) -> VarianceComponents:
    """What stands in for everything that is not known."""
    if metric.kind is MetricKind.MEMORY:
        side = Variance(_MEMORY**2, _WITHIN_DF)
        return VarianceComponents(side, side, Variance(_MEMORY**2, _BETWEEN_DF))
    if metric.scale is not Scale.RELATIVE:
        side = Variance(_FRACTION[device] ** 2, _WITHIN_DF)
        return VarianceComponents(side, side, Variance(_FRACTION[device] ** 2, _BETWEEN_DF))
    factor = _TIMES.get(metric.name, 1.0)
    within, between = Variance((factor * _WITHIN[device]) ** 2, _WITHIN_DF), (factor * _BETWEEN[device]) ** 2
    return VarianceComponents(within, within, Variance(between, _BETWEEN_DF))


def prior_variance(metric: Metric, device: str, cases: Sequence[Baseline]) -> VarianceComponents:
    """The median spread of a platform's other cases, where three of them or more tell one, else the default."""
    default = default_variance(metric, device)
    variances = [observed(transformed_by_revision(metric, case)) for case in cases]
    telling = [variance for variance in variances if variance.slower.df > 0]
    if len(telling) < MIN_CASES:
        return default
    within = typical([VarianceComponents(part.slower, part.faster, part.slower) for part in telling], CASES_DF)
    between = [variance.between for variance in variances if variance.between.df > 0]
    shared = (
        typical([VarianceComponents(part, part, part) for part in between], 2 * CASES_DF)
        if len(between) >= MIN_CASES
        else None
    )
    return VarianceComponents(
        within.slower if within else default.slower,
        within.faster if within else default.faster,
        shared.between if shared else default.between,
    )


def transformed_by_revision(metric: Metric, baseline: Baseline) -> list[Revision]:
    """The places of a metric's values, by epoch and sitting."""
    center_launches = baseline.center_launches
    return [list(transformed_by_block(metric, launches, center_launches).values()) for launches in baseline.revisions]


def transformed_by_block(
    metric: Metric, launches: Sequence[LaunchFacts], center_launches: Sequence[LaunchFacts]
) -> dict[Hashable, list[float]]:
    """The places of a metric's values, by sitting."""
    groups: dict[Hashable, list[float]] = defaultdict(list)
    for value, key in zip(transformed_values(metric, launches, center_launches), blocks(launches), strict=True):
        if value is not None:
            groups[key].append(value)
    return dict(groups)


def transformed_values(
    metric: Metric, launches: Iterable[LaunchFacts], center_launches: Sequence[LaunchFacts]
) -> list[float | None]:
    """Where each launch's value lies on the metric's scale, None where it has none or it has no place.

    ``anchor`` are the launches that others are compared with.
    """
    step_ms = reference_step_ms(center_launches)
    return [metric.scale.transform(metric.measure(launch), step_ms) for launch in launches]


def reference_step_ms(center_launches: Sequence[LaunchFacts]) -> float:
    """The step time that exposed times are a part of."""
    return median(launch.step_time_ms["p50"] for launch in center_launches)


def blocks(launches: Sequence[LaunchFacts]) -> list[Hashable]:
    """A key for each launch, the same for those of one machine, boot and stretch of work."""
    keys: dict[int, Hashable] = {}
    last: dict[str, tuple[int, int]] = {}
    for number in sorted(range(len(launches)), key=lambda number: launches[number].moment_s):
        launch = launches[number]
        before_s, stretch = last.get(launch.block, (launch.moment_s, 0))
        gap_s = BLOCK_GAP_S[launch.device]
        stretch += int(launch.moment_s - before_s > gap_s)
        last[launch.block] = launch.moment_s, stretch
        keys[number] = (launch.block, stretch)
    return [keys[number] for number in range(len(launches))]


def platform_priors(folder: Path, platform: str, device: str, case: str) -> Callable[[Metric], VarianceComponents]:
    """:func:`prior_spread` of each metric from the stored baselines of a platform, all but that of ``case``."""

    @cache
    def others() -> tuple[Baseline, ...]:
        found = []
        for path in sorted((folder / platform).glob("*.json")):
            try:
                found.append(read_baseline_file(path))
            except BaselineError:  # its own test tells
                continue
        return tuple(baseline for baseline in found if baseline.case != case)

    @cache
    def of(name: str) -> VarianceComponents:
        return prior_variance(METRICS[name], device, others())

    return lambda metric: of(metric.name)
