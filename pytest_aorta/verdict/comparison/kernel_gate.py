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

from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.trace.families import OTHER, is_compute
from pytest_aorta.verdict.baseline import Baseline
from pytest_aorta.verdict.causes.kernels import median_times, moved
from pytest_aorta.verdict.metrics import Metric
from pytest_aorta.verdict.noise.priors import (
    blocks,
    default_variance,
    reference_step_ms,
    transformed_by_block,
    transformed_by_revision,
    transformed_values,
)
from pytest_aorta.verdict.statistics.decision import Decision, Outcome
from pytest_aorta.verdict.statistics.pairs import PAIR_FALSE_ALARM_RATE, decide_pairs
from pytest_aorta.verdict.statistics.scale import Scale
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
class Judged:
    """A part with its decision; ``allowed`` is the allowed change as a fraction of the step."""

    part: Part
    decision: Decision
    allowed: float

    @property
    def excess(self) -> float:
        """Return the change as a multiple of the allowed one."""
        return self.decision.effect / self.allowed


def compared_ms(facts: LaunchFacts) -> dict[str, float]:
    """Return the time per step of each family of a launch, without communication and copies, in ms."""
    return {family: ms for family, ms in facts.kernel_ms.items() if is_compute(family)}


def parts_of(metric: Metric, launches: Sequence[LaunchFacts], others: Sequence[LaunchFacts]) -> list[Part]:
    """Return the quantities to compare: the large families that both sides run equally often, and the rest."""
    here, there = median_times(launches), median_times(others)
    step_ms = reference_step_ms(others)
    common = set.intersection(*(set(compared_ms(facts)) for facts in (*launches, *others))) - {OTHER}
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
        times = compared_ms(facts)
        return fsum(ms for name, ms in times.items() if name not in alone) if times else None

    return measure


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


def step_down(parts: Sequence[Part], rate: float, decide: Callable[[Part, float], Decision]) -> list[Decision]:
    """Return a decision for each part; Holm's step-down procedure divides ``rate``, the false-alarm rate.

    ``decide`` is called with a part and the part's rate. After r of m parts have regressed, all parts are tested again
    at rate / (m - r), until no further part regresses.
    """
    num_regressed = 0
    while True:
        decisions = [decide(part, rate / max(1, len(parts) - num_regressed)) for part in parts]
        found = sum(decision.outcome is Outcome.REGRESSION for decision in decisions)
        if found <= num_regressed:
            return decisions
        num_regressed = found


def judge_stored(
    blank: Verdict,
    metric: Metric,
    launches: Sequence[LaunchFacts],
    baseline: Baseline,
    tolerance: float,
    max_launches: int,
) -> Verdict:
    """Return the verdict on all families of launches of one session block, compared with a stored baseline."""
    judged = _judged_stored(metric, launches, baseline, tolerance, max_launches)
    return verdict_of(blank, judged, launches, baseline.center_launches)


def is_within(metric: Metric, launches: Sequence[LaunchFacts], baseline: Baseline, tolerance: float) -> bool:
    """Return whether no part changed by more than its allowed change, in either direction."""
    judged = _judged_stored(metric, launches, baseline, tolerance, len(launches))
    return all(abs(one.excess) <= 1 for one in judged)


def _judged_stored(
    metric: Metric, launches: Sequence[LaunchFacts], baseline: Baseline, tolerance: float, max_launches: int
) -> list[Judged]:
    center = baseline.center_launches
    parts = parts_of(metric, launches, center)
    estimates = estimates_of(parts, baseline)
    block = blocks([*center, *launches])[-1]
    allowed = {part.name: _allowed_by(part, tolerance, estimates[part.name], block) for part in parts}

    def decide(part: Part, rate: float) -> Decision:
        return decide_stored(
            _values(part, launches, center),
            block,
            estimates[part.name],
            allowed[part.name],
            max_launches=max_launches,
            worse=1,
            relative=False,
            false_alarm_rate=rate,
        )

    return _judged(parts, allowed, FALSE_ALARM_RATE, decide)


def detectable_of_step(
    metric: Metric, baseline: Baseline, block: Hashable, num_launches: int, *, tolerance: float, max_launches: int
) -> float:
    """Return the smallest slowdown, as a fraction of the step, that is detected whichever family it is in.

    Other arguments are as in :func:`~pytest_aorta.verdict.statistics.stored.detectable`.
    """
    parts = parts_of(metric, baseline.center_launches, baseline.center_launches)
    estimates = estimates_of(parts, baseline)
    return max(
        detectable(
            estimates[part.name],
            block,
            num_launches,
            tolerance=_allowed_by(part, tolerance, estimates[part.name], block),
            max_launches=max_launches,
            relative=False,
            false_alarm_rate=FALSE_ALARM_RATE / len(parts),
        )
        for part in parts
    )


def noisy_parts(metric: Metric, launches: Sequence[LaunchFacts], tolerance: float) -> list[str]:
    """Return a line for each part whose time varies too much between launches for the part's own tolerance."""
    is_known = len(launches) > 1 and all(launch.kernels for launch in launches)
    parts = parts_of(metric, launches, launches) if is_known else []
    found = []
    for part in parts:
        variance = observed([[_values(part, launches, launches)]]).within
        deviation, allowed = math.sqrt(variance.value), allowed_change(part, tolerance, math.inf)
        if RESOLVED_BY * deviation > allowed:
            shown, limit = (format_change(value, Scale.OF_STEP).lstrip("+") for value in (deviation, allowed))
            found.append(
                f"{part.name}: standard deviation of launches is {shown}, too large for {limit} allowed; profile more "
                f"steps, or set a larger tolerance"
            )
    return found


def _allowed_by(part: Part, tolerance: float, stored: Estimate, block: Hashable) -> float:
    return allowed_change(part, tolerance, math.sqrt(stored.error(block, 1, stored.variance.within).value))


def judge_pairs(
    blank: Verdict,
    metric: Metric,
    candidates: Sequence[LaunchFacts],
    references: Sequence[LaunchFacts],
    tolerance: float,
    variance: VarianceComponents,
    max_pairs: int,
) -> Verdict:
    """Return the verdict on all families in pairs of launches; ``variance`` is relative to a family's time."""
    parts = parts_of(metric, candidates, references)
    allowed = {
        part.name: allowed_change(part, tolerance, part.fraction * math.sqrt(variance.within.value)) for part in parts
    }

    def decide(part: Part, rate: float) -> Decision:
        here, there = (_values(part, side, references) for side in (candidates, references))
        # A part that the reference does not run has no variance of its own.
        fraction = max(part.fraction, MIN_FRACTION)
        return decide_pairs(
            [value - other for value, other in zip(here, there, strict=True)],
            Variance(variance.within.value * fraction**2, variance.within.df),
            allowed[part.name],
            max_pairs=max_pairs,
            worse=1,
            relative=False,
            false_alarm_rate=rate,
        )

    judged = _judged(parts, allowed, PAIR_FALSE_ALARM_RATE, decide)
    return verdict_of(blank, judged, candidates, references)


def _judged(
    parts: Sequence[Part], allowed: Mapping[str, float], rate: float, decide: Callable[[Part, float], Decision]
) -> list[Judged]:
    """Return each part with its decision, by :func:`step_down`, and its allowed change from ``allowed``."""
    decisions = step_down(parts, rate, decide)
    return [Judged(part, found, allowed[part.name]) for part, found in zip(parts, decisions, strict=True)]


def _values(part: Part, launches: Sequence[LaunchFacts], others: Sequence[LaunchFacts]) -> list[float]:
    return [value or 0.0 for value in transformed_values(part.metric, launches, others)]


def estimates_of(parts: Sequence[Part], baseline: Baseline) -> dict[str, Estimate]:
    """Return the baseline estimate of each part.

    Each part's variance is divided by the square of the part's time. The median over all parts is the prior, since the
    device's clock affects all parts.
    """
    center = baseline.center_launches
    revisions = {part.name: transformed_by_revision(part.metric, baseline) for part in parts}
    prior = _relative_prior(parts, [observed(revisions[part.name]) for part in parts], center[-1].device)
    return {
        part.name: baseline_estimate(
            transformed_by_block(part.metric, center, center),
            revisions[part.name],
            _times(prior, max(part.fraction, MIN_FRACTION) ** 2),
        )
        for part in parts
    }


def _relative_prior(parts: Sequence[Part], variances: Sequence[VarianceComponents], device: str) -> VarianceComponents:
    default = default_variance(replace(parts[0].metric, scale=Scale.RELATIVE), device)
    known = [
        _times(variance, part.fraction**-2)
        for part, variance in zip(parts, variances, strict=True)
        if part.fraction >= MIN_FRACTION and variance.slower.df > 0
    ]
    within = [VarianceComponents(one.slower, one.faster, one.slower) for one in known]
    shared = typical(within, _FAMILIES_DF) if len(within) >= _MIN_FAMILIES else None
    return default if shared is None else replace(shared, between=default.between)


def _times(variance: VarianceComponents, factor: float) -> VarianceComponents:
    sides = (variance.slower, variance.faster, variance.between)
    return VarianceComponents(*(Variance(side.value * factor, side.df) for side in sides))


def verdict_of(
    blank: Verdict, judged: Sequence[Judged], launches: Sequence[LaunchFacts], others: Sequence[LaunchFacts]
) -> Verdict:
    """Return the verdict on all parts, with the time of the worst part before and after."""
    outcome = _joined([one.decision.outcome for one in judged])
    deciding = [one for one in judged if one.decision.outcome is outcome]
    worst = max(deciding, key=lambda one: one.excess if outcome is Outcome.REGRESSION else abs(one.excess))
    part, decision = worst.part, worst.decision
    row = replace(
        blank,
        outcome=outcome or Outcome.INCONCLUSIVE,
        is_open=outcome is None,
        value=part.median_ms(launches),
        baseline=part.median_ms(others),
        launches=decision.launches,
        detail=_detail(worst, outcome, deciding, launches, others),
        part=part.name,
    )
    if part.name == REST:
        # The tolerance of the rest is a fraction of the step. Its own time can be 0, so it has no relative change.
        return row
    delta, low, high = (end / part.fraction for end in (decision.effect, decision.low, decision.high))
    return replace(row, delta=delta, low=low, high=high)


def _joined(outcomes: Sequence[Outcome | None]) -> Outcome | None:
    """Return the outcome of all parts together; None if more launches are needed."""
    order = (Outcome.REGRESSION, None, Outcome.INCONCLUSIVE, Outcome.IMPROVED, Outcome.PASS)
    return next(outcome for outcome in order if outcome in outcomes)


def _detail(
    worst: Judged,
    outcome: Outcome | None,
    deciding: Sequence[Judged],
    launches: Sequence[LaunchFacts],
    others: Sequence[LaunchFacts],
) -> str:
    change, allowed = (format_change(value, Scale.OF_STEP) for value in (worst.decision.effect, worst.allowed))
    parts = [f"{worst.part.name} {change}, {allowed.lstrip('+')} allowed"]
    if outcome is Outcome.REGRESSION:
        further = sorted((one for one in deciding if one is not worst), key=lambda one: -one.excess)
        named = [f"{one.part.name} {format_change(one.decision.effect, Scale.OF_STEP)}" for one in further]
        parts += [f"also {', '.join(named[:_MOST_NAMED])}"] if named else []
        parts.append(moved(launches, others))
    return "; ".join(filter(None, parts))
