"""Noise of a metric: session blocks, the variance that is expected, and the tolerances that a baseline resolves."""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable
from statistics import median

from pytest_aorta.common.text import counted
from pytest_aorta.plan.device_kind import ByDevice
from pytest_aorta.result.facts import Launches, LaunchFacts
from pytest_aorta.verdict.baseline import Baseline
from pytest_aorta.verdict.metrics import LARGEST, Metric, MetricKind, Tolerance
from pytest_aorta.verdict.statistics.decision import Scale, StoredRule
from pytest_aorta.verdict.statistics.variance import Revision, Variance, VarianceComponents

RESET = "--update-baselines --aorta-record=replace"
# The most launches that --aorta-launches records.
_MOST_LAUNCHES = 50

# After a pause of this length the state of a machine has changed: clocks, temperature, other jobs.
BLOCK_GAP_S = ByDevice(6 * 3600, cpu=3600)
# Standard deviations within and between blocks, measured on H200s and on shared CPUs (docs/benchmarks.md).
_WITHIN = ByDevice(0.005, cpu=0.15)
_BETWEEN = ByDevice(0.005, cpu=0.25)
_WITHIN_DF, _BETWEEN_DF = 1.0, 6.0
# Means and tails vary more than medians, by these factors; memory hardly varies. Nothing is known of metrics that a
# workload itself records and that are no times.
_TIMES = {"step_time_p99": 10.0, "step_time_tail5": 10.0, "step_time_mean": 3.0, "tokens_per_s": 3.0}
_MEMORY, _OWN = 0.001, 0.01
# Standard deviations of fractions, and of times as fractions of a step. Device idle time has its own values: on GPUs,
# the host's delays are far larger than the noise of communication in steps in which the host has a head start.
_FRACTION = ByDevice({Scale.POINTS: 0.005, Scale.OF_STEP: 0.002}, cpu={Scale.POINTS: 0.1, Scale.OF_STEP: 0.1})
_IDLE = ByDevice(0.05, cpu=0.1)
# A loss has no noise, unless recorded launches show noise, which then outweighs this prior.
_NUMERIC, _NUMERIC_DF = 1e-12, 0.1
# The block of all values that do not depend on the state of a machine.
_EVERY_BLOCK = "every block"


def default_variance(metric: Metric, device: str) -> VarianceComponents:
    """Return the variance that is assumed without any measurement; ``device`` is a kind of device."""
    if metric.kind is MetricKind.NUMERIC:
        return VarianceComponents.of(_NUMERIC, _NUMERIC, _NUMERIC_DF)
    if metric.kind in (MetricKind.MEMORY, MetricKind.OWN):
        within = between = _MEMORY if metric.kind is MetricKind.MEMORY else _OWN
    elif metric.scale is not Scale.RELATIVE:
        within = between = _IDLE[device] if metric.name == "device_idle_ms" else _FRACTION[device][metric.scale]
    else:
        factor = _TIMES.get(metric.name, 1.0)
        within, between = factor * _WITHIN[device], factor * _BETWEEN[device]
    side = Variance(within**2, _WITHIN_DF)
    return VarianceComponents(side, side, Variance(between**2, _BETWEEN_DF))


def transformed_by_revision(metric: Metric, baseline: Baseline) -> list[Revision]:
    """Return the transformed values of a metric as ``[revision][block][launch]``; absent values are left out."""
    center_launches = baseline.center_launches
    return [list(transformed_by_block(metric, launches, center_launches).values()) for launches in baseline.revisions]


def transformed_by_block(metric: Metric, launches: Launches, center_launches: Launches) -> dict[Hashable, list[float]]:
    """Return the transformed values of a metric, by the key of the block; absent values are left out."""
    groups: dict[Hashable, list[float]] = defaultdict(list)
    keys = metric_blocks(metric, launches)
    for value, key in zip(transformed_values(metric, launches, center_launches), keys, strict=True):
        if value is not None:
            groups[key].append(value)
    return dict(groups)


def transformed_values(
    metric: Metric, launches: Iterable[LaunchFacts], center_launches: Launches
) -> list[float | None]:
    """Return each launch's value on the metric's scale, or None for a value that is absent or can't be transformed.

    ``center_launches`` are the launches to compare with. Their step time is the unit of exposed times.
    """
    step_ms = median_step_ms(center_launches)
    return [metric.scale.transform(metric.measure(launch), step_ms) for launch in launches]


def median_step_ms(launches: Launches) -> float:
    """Return the median p50 of launches in ms; that of the center launches is what exposed times are divided by."""
    return median(launch.step_time_ms["p50"] for launch in launches)


def blocks(launches: Launches) -> list[Hashable]:
    """Return a key for each launch that is equal for launches of one session block.

    A block is one machine since one boot, without a pause longer than :data:`BLOCK_GAP_S`.
    """
    keys: dict[int, Hashable] = {}
    last: dict[str, tuple[int, int]] = {}
    measured = [launch.provenance for launch in launches]
    for number in sorted(range(len(launches)), key=lambda number: measured[number].moment_s):
        block, moment_s = measured[number].block, measured[number].moment_s
        before_s, stretch = last.get(block, (moment_s, 0))
        stretch += int(moment_s - before_s > BLOCK_GAP_S[launches[number].device])
        last[block] = moment_s, stretch
        keys[number] = (block, stretch)
    return [keys[number] for number in range(len(launches))]


def metric_blocks(metric: Metric, launches: Launches) -> list[Hashable]:
    """Return a key for each launch that is equal for launches whose values of ``metric`` share a block's noise.

    Session blocks do not change a loss, so its launches are all of one block.
    """
    return [_EVERY_BLOCK] * len(launches) if metric.kind is MetricKind.NUMERIC else blocks(launches)


def next_block(metric: Metric, center_launches: Launches) -> Hashable:
    """Return the key of the block in which further launches are expected to be compared with ``center_launches``.

    Times of CPU ranks are compared within one block only.
    """
    is_known = metric.kind is MetricKind.NUMERIC or center_launches[-1].device == "cpu"
    return metric_blocks(metric, center_launches)[-1] if is_known else "another"


def unresolved(rule: StoredRule, tolerance: Tolerance) -> str | None:
    """Return the remedy if noise of the stored launches may keep unchanged code from passing, or None."""
    have, least = rule.baseline.num_launches, rule.least_tolerance()
    if least <= rule.tolerance:
        return None
    counts = range(have + 1, _MOST_LAUNCHES + 1)
    enough = next((count for count in counts if rule.with_launches(count).least_tolerance() <= rule.tolerance), None)
    if enough is not None:
        more = counted(enough - have, "more launch")
        return f"record {more} ({RESET} --aorta-launches={enough}): the baseline's {have} cannot resolve {tolerance}"
    return f"no number of launches recorded at once resolves {tolerance}; {wider_or_paired(least, rule.scale)}"


def wider_or_paired(least: float, scale: Scale) -> str:
    """Return the advice to set a tolerance of at least ``least``, as a marker takes it, or to compare side by side."""
    wider = math.ceil(round(least * 1000, 6)) / 1000
    advice = f"set a tolerance of {scale.text(wider)}, or " if wider <= LARGEST[scale] else ""
    return f"{advice}compare with another version side by side (--aorta-ab)"
