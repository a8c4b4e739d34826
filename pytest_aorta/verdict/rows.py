"""One row of a comparison: a metric with the launches of both sides, and the verdicts that need no statistics."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from pytest_aorta.common.text import brief, counted
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.series import first_other_weights
from pytest_aorta.verdict.applicability import (
    is_not_profiled_again,
    lost_reproducibility,
    not_applicable,
    not_profiled,
    other_settings,
    profiled,
)
from pytest_aorta.verdict.metrics import Direction, Metric, MetricKind, Tolerance, Value, middle
from pytest_aorta.verdict.noise import RESET
from pytest_aorta.verdict.statistics.decision import FALSE_ALARM_RATE, MIN_LAUNCHES_TO_FAIL, Decision, Outcome
from pytest_aorta.verdict.verdicts import Missing, NotApplicable, ReferenceKind, Verdict, VerdictReference

STALE = f"the baseline is stale; record the better value with {RESET}"


@dataclass(frozen=True)
class Row:
    """A metric that is judged, with the launches of both sides. Each method builds the verdict, once.

    Attributes:
        reference: The other side of the comparison.
        launches, others: The launches under test and those of the other side.
        count: Number of launches under test, with those that have no value of the metric because their host was late.
        late: The explanation if hosts were late and no further launch is allowed, so that an open verdict is final.
    """

    case: str
    metric: Metric
    tolerance: Tolerance
    reference: VerdictReference
    launches: Sequence[LaunchFacts]
    others: Sequence[LaunchFacts]
    count: int
    late: str = ""

    @property
    def value(self) -> Value:
        """Return the value of the launches under test."""
        return middle(self.metric, self.launches)

    def verdict(self, outcome: Outcome | None, **known: Any) -> Verdict:
        """Return a verdict with the fields ``known``; it is open if ``outcome`` is None."""
        unknown = {"baseline": None, "delta": None, "tolerance": self.tolerance, "launches": self.count}
        fields = {"value": self.value} | unknown | known
        if outcome is None:
            fields |= {"detail": self.late} if self.late else {"is_open": True}
        outcome = outcome or Outcome.INCONCLUSIVE
        return Verdict(self.case, self.metric.name, outcome, reference=self.reference, **fields)

    def missing(self, part: Missing, detail: str, **known: Any) -> Verdict:
        """Return the verdict *missing*. Without a value of the candidate, the state of the baseline does not matter."""
        value = known.get("value", self.value)
        return self.verdict(
            Outcome.MISSING, missing=Missing.CANDIDATE_VALUE if value is None else part, detail=detail, **known
        )

    def not_applicable(self, reason: NotApplicable, detail: str, **known: Any) -> Verdict:
        """Return the verdict *not applicable*."""
        return self.verdict(Outcome.NOT_APPLICABLE, not_applicable=reason, detail=detail, **known)

    def decided(self, outcome: Outcome | None, detail: str, **known: Any) -> Verdict:
        """Return a statistical verdict; for a time that did not pass, the detail names throttled devices."""
        num_hot = sum(bool(launch.throttled) for launch in self.launches)
        if num_hot and self.metric.kind is MetricKind.TIMING and outcome is not Outcome.PASS:
            of = f"{num_hot} of {len(self.launches)} launches" if len(self.launches) > 1 else "the launch"
            detail = ", ".join(filter(None, [f"GPUs throttled in {of}", detail]))
        return self.verdict(outcome, **{"detail": detail} | known)

    def by_decision(self, decision: Decision, center: Value, detail: str) -> Verdict:
        """Return the verdict of a decision; ``center`` is the value of the other side."""
        change, worse, outcome = self.metric.scale.change, self.metric.worse, decision.outcome
        delta = change(worse * decision.effect)
        low, high = sorted(change(worse * end) for end in (decision.low, decision.high))
        known = {"baseline": center, "delta": delta, "low": low, "high": high, "launches": decision.launches}
        return self.decided(outcome, STALE if outcome is Outcome.IMPROVED else detail, **known)

    def late_hosts(self, launches: Sequence[LaunchFacts]) -> str:
        """Return text on the launches that have no value because their host was late; empty without any."""
        late = [detail for launch in launches if (detail := not_profiled(self.metric, launch))]
        number = f"{len(late)} of {counted(len(launches), 'launch')}" if len(launches) > 1 else "the launch"
        return f"no value of {number}: {late[-1]}" if late else ""

    def unprofiled(self, launches: Sequence[LaunchFacts], others: Sequence[LaunchFacts]) -> Verdict | None:
        """Return the verdict for a metric that profiled steps of ``launches`` did not give, or None.

        The metric does not apply if no launch of ``others`` has it. If one has it, a new wait for the device and a
        trace that has become too large fail the test. Otherwise a change could avoid the comparison by either. After a
        late host, the next launch can have the metric.
        """
        metric = self.metric
        found = [(launch, detail) for launch in launches if (detail := not_profiled(metric, launch))]
        if not found:
            return None
        known = profiled(metric, [other for other in others if metric.measure(other) is not None])
        if not known:
            launch, detail = found[0]
            reason = NotApplicable.TRACE if launch.overlap_problem else NotApplicable.HEAD_START
            return self.not_applicable(reason, detail, value=None)
        lasting = [detail for launch, detail in found if is_not_profiled_again(launch)]
        if not lasting:
            return None
        return self.missing(Missing.CANDIDATE_VALUE, lasting[0], value=None, baseline=middle(metric, known))

    def incomparable(self) -> Verdict | None:
        """Return the verdict for a metric that one side lacks or that does not apply, or None if it can be compared."""
        metric, launches, others, side = self.metric, self.launches, self.others, str(self.reference)
        known, last = [metric.measure(other) for other in others], others[-1]
        if any(metric.measure(launch) is None for launch in launches):
            return self.missing(
                Missing.CANDIDATE_VALUE, f"the launch has no {metric.name}", value=None, baseline=known[-1]
            )
        is_ab, is_variant = self.reference.kind is ReferenceKind.AB, self.reference.is_variant
        is_elsewhere = is_variant or self.reference.kind is ReferenceKind.RESULTS
        # A test may compare a reproducible variant with a variant that is not.
        is_bitwise = metric.kind is MetricKind.NUMERIC and self.tolerance.is_exact and not is_variant
        device = None if is_elsewhere else _other_device(launches, last, side)
        if lost := device or (lost_reproducibility(launches, last, side) if is_bitwise else None):
            remedy = "" if is_ab else f"; if this is intended, record the baseline again with {RESET}"
            return self.missing(Missing.CANDIDATE_VALUE, lost + remedy, baseline=known[-1])
        if found := not_applicable(metric, self.tolerance, launches[0], last, side):
            return self.not_applicable(
                *found, baseline=None if metric.direction is Direction.EXACT else middle(metric, others)
            )
        if any(value is None for value in known):
            reason = not_profiled(metric, last)
            absent = f"the {side} has no {metric.name}" + (f": {reason}" if reason else "")
            return self.missing(Missing.BASELINE_VALUE, absent if is_ab else f"{absent}; record it again with {RESET}")
        if metric.by_step is not None:
            here, there = max(metric.by_step(launches[-1])), max(metric.by_step(last))
            if here != there:
                detail = f"the last hash is that of step {here}, the {side}'s that of step {there}"
                return self.missing(Missing.CANDIDATE_VALUE, detail, baseline=known[-1])
        return None

    def judge_exact(self) -> Verdict:
        """Return the verdict on values that must be equal: the last ones, and those of every earlier step."""
        metric = self.metric
        for launch in self.launches:
            value = metric.measure(launch)
            if unequal := [other for other in self.others if metric.measure(other) != value]:
                other = min(unequal, key=lambda other: str(metric.measure(other)))
                where = _first_difference(metric, launch, other)
                return self._other_bits(value, metric.measure(other), launch, self.others[-1], where)
        if metric.by_step is None:
            return self.verdict(Outcome.PASS, baseline=self.value)
        for launch, other in itertools.product(self.launches, self.others):
            here, there = metric.by_step(launch), metric.by_step(other)
            if different := _different_steps(here, there):
                first = different[0]
                where = first_other_weights(launch.series, other.series) or f"after step {first}"
                detail = f"{where}; after the last step, {max(here)}, the weights are equal"
                return self._other_bits(here[first], there[first], launch, other, detail)
        for launch in () if self.reference.is_variant else self.launches:  # variants of a test may hash different steps
            if lost := sorted(metric.by_step(self.others[-1]).keys() - metric.by_step(launch).keys()):
                steps = f"{counted(len(lost), 'step')} for which the {self.reference} has one"
                detail = f"the launch has no hash of {steps}: {brief(', '.join(map(str, lost)))}"
                return self.missing(Missing.CANDIDATE_VALUE, detail, baseline=self.value)
        return self.verdict(Outcome.PASS, baseline=self.value)

    def _other_bits(
        self, value: Value, expected: Value, launch: LaunchFacts, other: LaunchFacts, where: str
    ) -> Verdict:
        """Return the regression of other bits, with the numeric settings that the code changed."""
        settings = other_settings(launch, other) if self.metric.kind is MetricKind.NUMERIC else ""
        detail = "; ".join(filter(None, [where, settings]))
        return self.verdict(Outcome.REGRESSION, value=value, baseline=expected, detail=detail)

    def judge_ranges(self, max_launches: int) -> Verdict:
        """Return the verdict on the ranges of values, because values of zero or below have no logarithm.

        A change is reported if every launch lies beyond all launches of the other side, and the medians differ by more
        than the tolerance.
        """
        here, there = (
            [self.metric.worse * float(self.metric.measure(launch) or 0) for launch in side]
            for side in (self.launches, self.others)
        )
        by_chance = 1 / math.comb(len(here) + len(there), len(here))
        never_varies = len(set(here)) == len(set(there)) == 1
        are_separate = len(here) >= MIN_LAUNCHES_TO_FAIL and (never_varies or by_chance <= FALSE_ALARM_RATE)
        allowed = (self.tolerance.value or 0.0) * abs(median(there))
        if min(there) <= median(here) <= max(there) or abs(median(here) - median(there)) <= allowed:
            outcome: Outcome | None = Outcome.PASS
        elif are_separate and min(here) > max(there):
            outcome = Outcome.REGRESSION
        elif are_separate and max(here) < min(there):
            outcome = Outcome.IMPROVED
        else:
            outcome = None if len(here) < max_launches else Outcome.INCONCLUSIVE
        detail = "values are not positive, so their ranges are compared"
        return self.verdict(outcome, baseline=middle(self.metric, self.others), detail=detail)


def _other_device(launches: Sequence[LaunchFacts], other: LaunchFacts, side: str) -> str | None:
    """Return text if a launch computed on another kind of device than the other side on the same platform, or None.

    The code has left the devices of its world, e.g. because torch finds no GPU and a script then takes the CPU.
    """
    there = other.environment.get("device")
    for here in (launch.environment.get("device") for launch in launches):
        if None not in (here, there) and here != there:
            return f"the ranks computed on {here}, those of the {side} on {there}"
    return None


def _different_steps(here: Mapping[int, str], there: Mapping[int, str]) -> list[int]:
    """Return the steps, in order, for which both sides have a value and the values differ."""
    return [step for step in sorted(here.keys() & there.keys()) if here[step] != there[step]]


def _first_difference(metric: Metric, launch: LaunchFacts, other: LaunchFacts) -> str:
    """Return after which step two sides first differ; empty if both have a value for one step only, or for none."""
    if metric.by_step is None:
        return ""
    if found := first_other_weights(launch.series, other.series):
        return found
    here, there = metric.by_step(launch), metric.by_step(other)
    different, common = _different_steps(here, there), sorted(here.keys() & there.keys())
    if len(common) < 2 or not different:
        return ""
    position = common.index(different[0])
    before = f", and are equal after step {common[position - 1]}" if position else ""
    return f"the weights first differ after step {different[0]}{before}"
