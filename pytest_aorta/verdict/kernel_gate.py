"""Comparison of each kernel family with the baseline, as one metric.

A family is compared by itself if it takes at least ``MIN_FRACTION`` of the step and both sides call it equally often.
All other kernels are compared as one sum: small families, families that took no time on the other side, and families
whose number of calls changed. If one kernel replaces another, this sum changes by the difference of their times, not by
either time.

Holm's step-down procedure divides the false-alarm rate (Holm, Scandinavian Journal of Statistics 6, 1979).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from statistics import median
from typing import TypeAlias

from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.trace.families import OTHER, is_compute
from pytest_aorta.verdict.baseline import Baseline
from pytest_aorta.verdict.causes import median_times, moved
from pytest_aorta.verdict.metrics import Metric
from pytest_aorta.verdict.noise import (
    blocks,
    default_variance,
    reference_step_ms,
    transformed_by_block,
    transformed_by_revision,
    transformed_values,
)
from pytest_aorta.verdict.rows import Row
from pytest_aorta.verdict.statistics.decision import PAIR_FALSE_ALARM_RATE, Decision, Outcome, Scale, decide_pairs
from pytest_aorta.verdict.statistics.stored import FALSE_ALARM_RATE, RESOLVED_BY, decide_stored, detectable
from pytest_aorta.verdict.statistics.variance import (
    Estimate,
    Variance,
    VarianceComponents,
    baseline_estimate,
    observed,
    typical,
)
from pytest_aorta.verdict.verdicts import Verdict, format_change

# A family that takes less than this fraction of the step is not compared by itself.
MIN_FRACTION = 0.005
# A family may change by the tolerance of its own time, but by at most this fraction of the tolerance of the step.
STEP_PART = 1 / 16
# Name of the sum of all kernels that are not compared by themselves.
REST = "all other kernels"
# Degrees of freedom of each side, slower and faster, of the prior from the other families of a baseline.
_FAMILIES_DF = 4.0
_MIN_FAMILIES = 3
_SAME_CALLS = 1e-6
_MOST_NAMED = 3


@dataclass(frozen=True)
class Part:
    """A compared quantity: the time of one family, or of :data:`REST`.

    Attributes:
        metric: Measures the time in a launch, in ms per step; its changes are fractions of the step.
        fraction: Median time on the other side, as a fraction of the step.
    """

    name: str
    metric: Metric
    fraction: float

    def median_ms(self, launches: Sequence[LaunchFacts]) -> float:
        """Return the median time over launches; a launch without any kernel counts 0."""
        return median(float(self.metric.measure(launch) or 0.0) for launch in launches)


@dataclass(frozen=True)
class _Judged:
    """A part with its decision; ``allowed`` is the allowed change as a fraction of the step."""

    part: Part
    decision: Decision
    allowed: float

    @property
    def excess(self) -> float:
        """Return the change as a multiple of the allowed one."""
        return self.decision.effect / self.allowed

    def __str__(self) -> str:
        """Return the name of the part with its change."""
        return f"{self.part.name} {format_change(self.decision.effect, Scale.OF_STEP)}"


# Decides on a part at the part's false-alarm rate.
Decide: TypeAlias = Callable[[Part, float], Decision]


def parts_of(metric: Metric, launches: Sequence[LaunchFacts], others: Sequence[LaunchFacts]) -> list[Part]:
    """Return the quantities to compare: the large families that both sides run equally often, and the rest."""
    here, there = median_times(launches), median_times(others)
    step_ms = reference_step_ms(others)
    common = set.intersection(*(_families(facts) for facts in (*launches, *others))) - {OTHER}
    alone = [
        name
        for name in sorted(common)
        if math.isclose(here[name].calls, there[name].calls, rel_tol=_SAME_CALLS)
        and there[name].ms > 0
        and max(here[name].ms, there[name].ms) >= MIN_FRACTION * step_ms
    ]
    measures = {name: _time_of(name) for name in alone} | {REST: _time_of_others(frozenset(alone))}
    parts = [
        Part(name, replace(metric, measure=measure, scale=Scale.OF_STEP), 0.0) for name, measure in measures.items()
    ]
    return [replace(part, fraction=part.median_ms(others) / step_ms) for part in parts]


def of_family(metric: Metric, name: str) -> Metric:
    """Return a metric that is the time of one family; its changes are relative to this time."""
    return replace(metric, measure=_time_of(name))


def _time_of(name: str) -> Callable[[LaunchFacts], float | None]:
    return lambda facts: facts.kernel_ms.get(name)


def _time_of_others(alone: frozenset[str]) -> Callable[[LaunchFacts], float | None]:
    def measure(facts: LaunchFacts) -> float | None:
        families = _families(facts)
        return fsum(facts.kernel_ms[name] for name in families - alone) if families else None

    return measure


def _families(facts: LaunchFacts) -> set[str]:
    """Return the families of a launch, without communication and copies."""
    return {family for family in facts.kernels if is_compute(family)}


def allowed_change(part: Part, tolerance: float, deviation: float) -> float:
    """Return the allowed change of a part, as a fraction of the step.

    A part may change by :data:`STEP_PART` of the tolerance of the step. Noise widens this limit to ``RESOLVED_BY``
    times ``deviation``, the standard deviation of a launch from the baseline center. The tolerance of the part's own
    time limits the change too, but :data:`REST` may always change by the limit of the step.
    """
    of_step, of_own = STEP_PART * tolerance, tolerance * part.fraction
    if part.name == REST:
        of_own = max(of_own, of_step)
    return min(max(min(of_own, of_step), RESOLVED_BY * deviation), of_own)


def step_down(parts: Sequence[Part], rate: float, decide: Decide) -> list[Decision]:
    """Return a decision for each part; Holm's step-down procedure divides ``rate``, the false-alarm rate.

    After r of m parts have regressed, all parts are tested again at rate / (m - r), until no further part regresses.
    """
    num_regressed = 0
    while True:
        decisions = [decide(part, rate / max(1, len(parts) - num_regressed)) for part in parts]
        found = sum(decision.outcome is Outcome.REGRESSION for decision in decisions)
        if found <= num_regressed:
            return decisions
        num_regressed = found


def judged_stored(
    metric: Metric, launches: Sequence[LaunchFacts], baseline: Baseline, tolerance: float, max_launches: int
) -> list[_Judged]:
    """Return the decision on each part of launches of one session block, compared with a stored baseline."""
    center = baseline.center_launches
    parts = parts_of(metric, launches, center)
    block = blocks([*center, *launches])[-1]
    limits = _limits(parts, baseline, tolerance, block)

    def decide(part: Part, rate: float) -> Decision:
        stored, allowed = limits[part.name]
        values, most = _values(part, launches, center), max_launches
        return decide_stored(
            values, block, stored, allowed, max_launches=most, worse=1, scale=Scale.OF_STEP, false_alarm_rate=rate
        )

    return _judged(parts, {name: allowed for name, (_, allowed) in limits.items()}, FALSE_ALARM_RATE, decide)


def judged_pairs(
    metric: Metric,
    launches: Sequence[LaunchFacts],
    others: Sequence[LaunchFacts],
    tolerance: float,
    within: Variance,
    max_pairs: int,
) -> list[_Judged]:
    """Return the decision on each part in pairs of launches; ``within`` is relative to a family's time."""
    parts = parts_of(metric, launches, others)
    deviation = math.sqrt(within.value)
    allowed = {part.name: allowed_change(part, tolerance, part.fraction * deviation) for part in parts}

    def decide(part: Part, rate: float) -> Decision:
        here, there = (_values(part, side, others) for side in (launches, others))
        # A part that the reference does not run has no variance of its own.
        variance = within.times(max(part.fraction, MIN_FRACTION) ** 2)
        return decide_pairs(
            list(zip(here, there, strict=True)),
            variance,
            allowed[part.name],
            max_pairs=max_pairs,
            worse=1,
            scale=Scale.OF_STEP,
            false_alarm_rate=rate,
        )

    return _judged(parts, allowed, PAIR_FALSE_ALARM_RATE, decide)


def _judged(parts: Sequence[Part], allowed: Mapping[str, float], rate: float, decide: Decide) -> list[_Judged]:
    decisions = step_down(parts, rate, decide)
    return [_Judged(part, found, allowed[part.name]) for part, found in zip(parts, decisions, strict=True)]


def is_within(metric: Metric, launches: Sequence[LaunchFacts], baseline: Baseline, tolerance: float) -> bool:
    """Return whether no part changed by more than its allowed change, in either direction."""
    judged = judged_stored(metric, launches, baseline, tolerance, len(launches))
    return all(abs(one.excess) <= 1 for one in judged)


def detectable_of_step(
    metric: Metric, baseline: Baseline, block: Hashable, num_launches: int, *, tolerance: float, max_launches: int
) -> float:
    """Return the smallest slowdown, as a fraction of the step, that is detected whichever family it is in.

    Other arguments are as in :func:`~pytest_aorta.verdict.statistics.stored.detectable`.
    """
    parts = parts_of(metric, baseline.center_launches, baseline.center_launches)
    return max(
        detectable(
            stored,
            block,
            num_launches,
            tolerance=allowed,
            max_launches=max_launches,
            scale=Scale.OF_STEP,
            false_alarm_rate=FALSE_ALARM_RATE / len(parts),
        )
        for stored, allowed in _limits(parts, baseline, tolerance, block).values()
    )


def noisy_parts(metric: Metric, launches: Sequence[LaunchFacts], tolerance: float) -> list[str]:
    """Return a line for each part whose time varies too much between launches for the part's own tolerance."""
    is_known = len(launches) > 1 and all(launch.kernels for launch in launches)
    found = []
    for part in parts_of(metric, launches, launches) if is_known else ():
        variance = observed([[_values(part, launches, launches)]]).within
        deviation, allowed = math.sqrt(variance.value), allowed_change(part, tolerance, math.inf)
        if RESOLVED_BY * deviation > allowed:
            shown, limit = (format_change(value, Scale.OF_STEP).lstrip("+") for value in (deviation, allowed))
            found.append(
                f"{part.name}: standard deviation of launches is {shown}, too large for {limit} allowed; profile more "
                f"steps, or set a larger tolerance"
            )
    return found


def _values(part: Part, launches: Sequence[LaunchFacts], others: Sequence[LaunchFacts]) -> list[float]:
    return [value or 0.0 for value in transformed_values(part.metric, launches, others)]


def _limits(
    parts: Sequence[Part], baseline: Baseline, tolerance: float, block: Hashable
) -> dict[str, tuple[Estimate, float]]:
    """Return the baseline estimate of each part, and the part's allowed change, by name.

    Each part's variance is divided by the square of the part's time. The median over all parts is the prior, since the
    device's clock affects all parts.
    """
    center, found = baseline.center_launches, {}
    revisions = {part.name: transformed_by_revision(part.metric, baseline) for part in parts}
    prior = _relative_prior(parts, [observed(revisions[part.name]) for part in parts], center[-1].device)
    for part in parts:
        factor = max(part.fraction, MIN_FRACTION) ** 2
        own_prior = VarianceComponents(*(side.times(factor) for side in (prior.slower, prior.faster, prior.between)))
        stored = baseline_estimate(transformed_by_block(part.metric, center, center), revisions[part.name], own_prior)
        deviation = math.sqrt(stored.error(block, 1, stored.variance.within).value)
        found[part.name] = stored, allowed_change(part, tolerance, deviation)
    return found


def _relative_prior(parts: Sequence[Part], variances: Sequence[VarianceComponents], device: str) -> VarianceComponents:
    default = default_variance(replace(parts[0].metric, scale=Scale.RELATIVE), device)
    known = [
        (variance.slower.times(part.fraction**-2), variance.faster.times(part.fraction**-2))
        for part, variance in zip(parts, variances, strict=True)
        if part.fraction >= MIN_FRACTION and variance.slower.df > 0
    ]
    if len(known) < _MIN_FAMILIES:
        return default
    slower, faster = (typical(sides, _FAMILIES_DF) for sides in zip(*known, strict=True))
    return VarianceComponents(slower, faster, default.between)


def verdict_of(row: Row, judged: Sequence[_Judged], stale: str = "") -> Verdict:
    """Return the verdict on all parts, with the time of the worst part before and after.

    The detail of an improvement ends with ``stale``.
    """
    # One regression fails the metric. Else a part that needs more launches keeps all of them open.
    order = (Outcome.REGRESSION, None, Outcome.INCONCLUSIVE, Outcome.IMPROVED, Outcome.PASS)
    outcome = min((one.decision.outcome for one in judged), key=order.index)
    deciding = [one for one in judged if one.decision.outcome is outcome]
    worst = max(deciding, key=lambda one: one.excess if outcome is Outcome.REGRESSION else abs(one.excess))
    part, decision = worst.part, worst.decision
    details = [f"{worst}, {format_change(worst.allowed, Scale.OF_STEP).lstrip('+')} allowed"]
    if outcome is Outcome.REGRESSION:
        further = sorted((one for one in deciding if one is not worst), key=lambda one: -one.excess)
        details += [f"also {', '.join(map(str, further[:_MOST_NAMED]))}"] if further else []
        details.append(moved(row.launches, row.others))
    elif outcome is Outcome.IMPROVED:
        details.append(stale)
    # The tolerance of the rest is a fraction of the step. Its own time can be 0, so it has no relative change.
    ends = () if part.name == REST else (decision.effect, decision.low, decision.high)
    return row.decided(
        outcome,
        "; ".join(filter(None, details)),
        value=part.median_ms(row.launches),
        baseline=part.median_ms(row.others),
        launches=decision.launches,
        part=part.name,
        **dict(zip(("delta", "low", "high"), (end / part.fraction for end in ends), strict=False)),
    )
