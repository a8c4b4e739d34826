"""A metric that is compared: its verdicts without statistics."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from statistics import median

from pytest_aorta.common.text import brief, counted
from pytest_aorta.result.facts import Launches, LaunchFacts
from pytest_aorta.result.series import came_or_went, first_other_weights
from pytest_aorta.verdict.applicability import is_not_profiled_again, not_applicable, not_profiled, profiled
from pytest_aorta.verdict.environment import changes, lost_reproducibility, other_device, other_versions
from pytest_aorta.verdict.metrics import Direction, Metric, MetricKind, Origin, Tolerance, Value, middle
from pytest_aorta.verdict.noise import RESET
from pytest_aorta.verdict.statistics.decision import FALSE_ALARM_RATE, MIN_LAUNCHES_TO_FAIL, Decision, Outcome
from pytest_aorta.verdict.verdicts import (
    DIFFERS,
    Decided,
    Missing,
    MissingPart,
    NotApplicable,
    Open,
    Reason,
    State,
    Unrecorded,
    Verdict,
    VerdictReference,
)


@dataclass(frozen=True)
class Row:
    """A metric that is judged, with the launches of both sides. Each method builds the verdict, once.

    Attributes:
        reference: The other side of the comparison.
        launches, others: The launches under test and those of the other side.
        count: Number of launches under test, with those that have no value of the metric because their host was late.
        most: Number of launches under test after which every verdict is final.
        late: The explanation if hosts were late and no further launch is allowed, so that an open verdict is final.
    """

    case: str
    metric: Metric
    tolerance: Tolerance
    reference: VerdictReference
    launches: Launches
    others: Launches
    count: int
    most: int
    late: str = ""

    @property
    def value(self) -> Value:
        """Return the value of the launches under test."""
        return middle(self.metric, self.launches)

    def decided(
        self, outcome: Outcome | None, value: Value, baseline: Value, detail: str = "", delta: float | None = None
    ) -> Verdict:
        """Return the verdict of a comparison; it is open if ``outcome`` is None and further launches are allowed."""
        if outcome is None and self.late:
            outcome, detail = Outcome.INCONCLUSIVE, self.late
        return self._verdict(Open() if outcome is None else Decided(outcome), value, baseline, detail, delta)

    def lost(self, detail: str, value: Value, baseline: Value = None) -> Verdict:
        """Return the verdict on launches without the metric, or without a fact that its comparison needs."""
        return self._verdict(Missing(MissingPart.CANDIDATE_VALUE), value, baseline, detail)

    def missing(self, part: MissingPart, detail: str, unrecorded: Unrecorded | None = None) -> Verdict:
        """Return the verdict without a part of the other side; the launches without a value are lost anyhow."""
        lacking = Missing(MissingPart.CANDIDATE_VALUE if self.value is None else part, unrecorded)
        return self._verdict(lacking, self.value, None, detail)

    def not_applicable(self, reason: Reason, detail: str, value: Value, baseline: Value = None) -> Verdict:
        """Return the verdict *not applicable*."""
        return self._verdict(NotApplicable(reason), value, baseline, detail)

    def _verdict(self, state: State, value: Value, baseline: Value, detail: str, delta: float | None = None) -> Verdict:
        name, tolerance, reference, count = self.metric.name, self.tolerance, self.reference, self.count
        return Verdict(self.case, name, state, value, baseline, delta, tolerance, reference, detail, launches=count)

    def by_decision(self, decision: Decision, center: Value, detail: str) -> Verdict:
        """Return the verdict of a decision; ``center`` is the value of the other side."""
        change, worse = self.metric.scale.change, self.metric.worse
        low, high = sorted(change(worse * end) for end in (decision.low, decision.high))
        found = self.decided(decision.outcome, self.value, center, detail, change(worse * decision.effect))
        return found.replace(low=low, high=high, launches=decision.launches)

    def under_profiler(self, launches: Launches) -> Verdict | None:
        """Return the verdict for a time if a profiler slowed the ranks of one of the launches, or None."""
        found = next((launch.profiler for launch in launches if launch.profiler), None)
        if found is None or self.metric.kind is not MetricKind.TIMING:
            return None
        return self.not_applicable(Reason.PROFILER, f"ranks ran under {found}, which slows them", self.value)

    def other_versions(self) -> str | None:
        """Return the first library of another version than the other side's that chooses operators and kernels."""
        return other_versions(self.launches[0], self.others[-1], str(self.reference))

    def late_hosts(self, launches: Launches) -> str:
        """Return text on the launches that have no value because their host was late; empty without any."""
        late = [detail for launch in launches if (detail := not_profiled(self.metric, launch))]
        number = f"{len(late)} of {counted(len(launches), 'launch')}" if len(launches) > 1 else "the launch"
        return f"no value of {number}: {late[-1]}" if late else ""

    def unprofiled(self, launches: Launches, others: Launches) -> Verdict | None:
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
            reason = Reason.TRACE if launch.description.overlap_problem else Reason.HEAD_START
            return self.not_applicable(reason, detail, None)
        lasting = next((detail for launch, detail in found if is_not_profiled_again(launch)), None)
        return None if lasting is None else self.lost(lasting, None, middle(metric, known))

    def incomparable(self) -> Verdict | None:
        """Return the verdict for a metric that one side lacks or that does not apply, or None if it can be compared."""
        metric, launches, others, reference, value = self.metric, self.launches, self.others, self.reference, self.value
        known, last, is_variant = [metric.measure(other) for other in others], others[-1], reference.is_variant
        if any(metric.measure(launch) is None for launch in launches):
            problem = launches[-1].description.graph_problem if metric.scheduled else ""
            return self.lost(f"the launch has no {metric.name}" + (f": {problem}" if problem else ""), None, known[-1])
        lost = None if is_variant else other_device(launches, last, str(reference))
        # A test may compare a reproducible variant with a variant that is not.
        if metric.kind is MetricKind.NUMERIC and self.tolerance.is_exact and not is_variant:
            lost = lost or lost_reproducibility(launches, last, str(reference))
        if lost:
            remedy = "" if reference.is_ab else f"; if this is intended, record the baseline again with {RESET}"
            return self.lost(lost + remedy, value, known[-1])
        # Who names an exact metric in an A/B of two environments asks whether it is the same there.
        is_asked = reference.is_ab and self.tolerance.is_exact and self.tolerance.origin is not Origin.DEFAULT
        found = not_applicable(metric, self.tolerance, launches[0], last, str(reference))
        if found and not (is_asked and found[0] in DIFFERS):
            baseline = None if metric.direction is Direction.EXACT else middle(metric, others)
            return self.not_applicable(*found, value, baseline)
        if None in known:
            reason = not_profiled(metric, last)
            again = "" if reference.is_ab else f"; record it again with {RESET}"
            absent = f"the {reference} has no {metric.name}" + (f": {reason}" if reason else "")
            return self.missing(MissingPart.BASELINE_VALUE, absent + again)
        ends = [max(metric.by_step(side[-1]), default=None) for side in (launches, others)]
        if ends[0] != ends[1]:
            detail = f"the last hash is that of step {ends[0]}, the {reference}'s that of step {ends[1]}"
            return self._other_hash(launches[-1], last, detail) or self.lost(detail, value, known[-1])
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
        for launch, other in product(self.launches, self.others):
            # With several optimizers, the last step is that of the one with most steps.
            last = max(metric.by_step(launch), default=0) if len(launch.series) < 2 else 0
            equal = f"after the last step, {last}, the {metric.hashed} are equal" if last else ""
            if found := self._other_hash(launch, other, equal):
                return found
        for launch in () if self.reference.is_variant else self.launches:  # variants of a test may hash different steps
            if lost := sorted(metric.by_step(self.others[-1]).keys() - metric.by_step(launch).keys()):
                steps = f"{counted(len(lost), 'step')} for which the {self.reference} has one"
                detail = f"the launch has no hash of {steps}: {brief(', '.join(map(str, lost)))}"
                return self.lost(detail, self.value, self.value)
        return self.decided(Outcome.PASS, self.value, self.value)

    def _other_hash(self, launch: LaunchFacts, other: LaunchFacts, further: str) -> Verdict | None:
        """Return the regression of the first hash that differs in a step which both sides have, or None."""
        here, there = self.metric.by_step(launch), self.metric.by_step(other)
        different = _different_steps(here, there)
        if launch.num_steps != other.num_steps:
            # The hash of a last step has what followed it, which that of a longer run has not.
            different = [step for step in different if step < min(max(here), max(there))]
        if not different:
            return None
        where = first_other(self.metric, launch, other) or f"after step {different[0]}"
        return self._other_bits(here[different[0]], there[different[0]], launch, other, where, further)

    def _other_bits(
        self, value: Value, expected: Value, launch: LaunchFacts, other: LaunchFacts, *where: str
    ) -> Verdict:
        """Return the regression of other bits, with the numeric settings that the code changed."""
        settings = changes(launch, other).settings if self.metric.kind is MetricKind.NUMERIC else ""
        return self.decided(Outcome.REGRESSION, value, expected, "; ".join(filter(None, (*where, settings))))

    def judge_ranges(self) -> Verdict:
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
            outcome = None if len(here) < self.most else Outcome.INCONCLUSIVE
        detail = "values are not positive, so their ranges are compared"
        return self.decided(outcome, self.value, middle(self.metric, self.others), detail)


def _different_steps(here: Mapping[int, str], there: Mapping[int, str]) -> list[int]:
    """Return the steps, in order, for which both sides have a value and the values differ."""
    return [step for step in sorted(here.keys() & there.keys()) if here[step] != there[step]]


def first_other(metric: Metric, launch: LaunchFacts, other: LaunchFacts) -> str:
    """Return which optimizer's weights differ first, or the first optimizer that only one side has; or empty."""
    found = first_other_weights(launch.series, other.series, metric.hashed)
    # A workload has no hashes by optimizer.
    names = ([one.name for one in side.series if one.weights] for side in (launch, other))
    return found or next(iter(came_or_went(*names)), "")


def _first_difference(metric: Metric, launch: LaunchFacts, other: LaunchFacts) -> str:
    """Return after which step two sides first differ; empty if both have a value for one step only, or for none."""
    if found := metric.hashed and first_other(metric, launch, other):
        return found
    here, there = metric.by_step(launch), metric.by_step(other)
    different, common = _different_steps(here, there), sorted(here.keys() & there.keys())
    if len(common) < 2 or not different:
        return ""
    position = common.index(different[0])
    before = f", and are equal after step {common[position - 1]}" if position else ""
    return f"the {metric.hashed} first differ after step {different[0]}{before}"
