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
from pytest_aorta.verdict.metrics import METRICS, Metric
from pytest_aorta.verdict.statistics.scale import Scale
from pytest_aorta.verdict.statistics.variance import Epoch, Spread, Variance, observed, typical

# A machine left to itself for so long is in another state: its clocks, its temperature, its neighbours.
SITTING_GAP_S = {"cuda": 6 * 3600, "cpu": 3600}
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
_SHARE = {"cuda": 0.01, "cpu": 0.1}


def default_spread(metric: Metric, device: str) -> Spread:
    """What stands in for everything that is not known."""
    if metric.kind == "memory":
        side = Variance(_MEMORY**2, _WITHIN_DF)
        return Spread(side, side, Variance(_MEMORY**2, _BETWEEN_DF))
    if metric.scale is not Scale.RELATIVE:
        side = Variance(_SHARE[device] ** 2, _WITHIN_DF)
        return Spread(side, side, Variance(_SHARE[device] ** 2, _BETWEEN_DF))
    factor = _TIMES.get(metric.name, 1.0)
    within, between = Variance((factor * _WITHIN[device]) ** 2, _WITHIN_DF), (factor * _BETWEEN[device]) ** 2
    return Spread(within, within, Variance(between, _BETWEEN_DF))


def prior_spread(metric: Metric, device: str, cases: Sequence[Baseline]) -> Spread:
    """The median spread of a platform's other cases, where three of them or more tell one, else the default."""
    default = default_spread(metric, device)
    spreads = [observed(epochs_of(metric, case)) for case in cases]
    telling = [spread for spread in spreads if spread.slower.df > 0]
    if len(telling) < MIN_CASES:
        return default
    within = typical([Spread(part.slower, part.faster, part.slower) for part in telling], CASES_DF)
    sittings = [spread.between for spread in spreads if spread.between.df > 0]
    shared = (
        typical([Spread(part, part, part) for part in sittings], 2 * CASES_DF) if len(sittings) >= MIN_CASES else None
    )
    return Spread(
        within.slower if within else default.slower,
        within.faster if within else default.faster,
        shared.between if shared else default.between,
    )


def epochs_of(metric: Metric, baseline: Baseline) -> list[Epoch]:
    """The places of a metric's values, by epoch and sitting."""
    anchor = baseline.anchor
    return [list(places_by_sitting(metric, launches, anchor).values()) for launches in baseline.epochs]


def places_by_sitting(
    metric: Metric, launches: Sequence[LaunchFacts], anchor: Sequence[LaunchFacts]
) -> dict[Hashable, list[float]]:
    """The places of a metric's values, by sitting."""
    groups: dict[Hashable, list[float]] = defaultdict(list)
    for value, key in zip(places(metric, launches, anchor), sittings(launches), strict=True):
        if value is not None:
            groups[key].append(value)
    return dict(groups)


def places(metric: Metric, launches: Iterable[LaunchFacts], anchor: Sequence[LaunchFacts]) -> list[float | None]:
    """Where each launch's value lies on the metric's scale, None where it has none or it has no place.

    ``anchor`` are the launches that others are compared with.
    """
    step_ms = reference_step_ms(anchor)
    return [metric.scale.place(metric.measure(launch), step_ms) for launch in launches]


def reference_step_ms(anchor: Sequence[LaunchFacts]) -> float:
    """The step time that exposed times are a part of."""
    return median(launch.step_time_ms["p50"] for launch in anchor)


def sittings(launches: Sequence[LaunchFacts]) -> list[Hashable]:
    """A key for each launch, the same for those of one machine, boot and stretch of work."""
    keys: dict[int, Hashable] = {}
    last: dict[str, tuple[int, int]] = {}
    for number in sorted(range(len(launches)), key=lambda number: launches[number].moment_s):
        launch = launches[number]
        before_s, stretch = last.get(launch.sitting, (launch.moment_s, 0))
        gap_s = SITTING_GAP_S[launch.device]
        stretch += int(launch.moment_s - before_s > gap_s)
        last[launch.sitting] = launch.moment_s, stretch
        keys[number] = (launch.sitting, stretch)
    return [keys[number] for number in range(len(launches))]


def platform_priors(folder: Path, platform: str, device: str, case: str) -> Callable[[Metric], Spread]:
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
    def of(name: str) -> Spread:
        return prior_spread(METRICS[name], device, others())

    return lambda metric: of(metric.name)
