"""Comparison of launches with a stored baseline or with an A/B reference, metric by metric."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, TypeAlias

from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.text import brief, counted
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.verdict.applicability import (
    is_not_profiled_again,
    lost_reproducibility,
    not_applicable,
    not_profiled,
    other_settings,
    other_setup,
    other_steps,
    under_profiler,
    widened,
)
from pytest_aorta.verdict.baseline import Baseline
from pytest_aorta.verdict.causes.explain import canary_notes, explanation, notes
from pytest_aorta.verdict.causes.split import split_note
from pytest_aorta.verdict.kernel_gate import judge_pairs, judge_stored
from pytest_aorta.verdict.metrics import (
    METRICS,
    Direction,
    Metric,
    MetricKind,
    Origin,
    Tolerance,
    Value,
    check_compared,
    middle,
)
from pytest_aorta.verdict.noise.priors import (
    metric_blocks,
    next_block,
    reference_step_ms,
    transformed_by_block,
    transformed_by_revision,
    transformed_values,
)
from pytest_aorta.verdict.noise.resolution import RESET, allowed_tolerance, too_noisy, unresolved
from pytest_aorta.verdict.statistics.decision import (
    FALSE_ALARM_RATE,
    MIN_LAUNCHES_TO_FAIL,
    Decision,
    Outcome,
    decide_pairs,
    decide_stored,
    last_look,
)
from pytest_aorta.verdict.statistics.scale import Scale
from pytest_aorta.verdict.statistics.variance import Estimate, VarianceComponents, baseline_estimate
from pytest_aorta.verdict.verdicts import Missing, NotApplicable, ReferenceKind, Verdict, VerdictReference, Verdicts

Priors: TypeAlias = Callable[[Metric], VarianceComponents]
# With fewer launches, most of a baseline's variance comes from the prior.
MIN_LAUNCHES = 5
_STALE = f"the baseline is stale; record the better value with {RESET}"


def choose_tolerances(marked: Mapping[str, Tolerance], *facts: LaunchFacts) -> dict[str, Tolerance]:
    """Return the tolerances of the metrics to compare.

    These are the metrics that a marker names, and the metrics with a default tolerance that any launch has. The launch
    under test is the first of ``facts``.

    Raises:
        SpecError: A marker names a metric that needs more steps than the launch under test has.
    """
    chosen = dict(marked)
    num_steps = facts[0].num_steps
    for name in marked:
        if num_steps < METRICS[name].min_steps:
            raise SpecError(
                f"tolerance of {name}: {num_steps} steps were measured, but {name} needs at least "
                f"{METRICS[name].min_steps}; measure more steps, or use step_time_tail5"
            )
    for name, metric in METRICS.items():
        has_it = any(metric.measure(launch) is not None or not_profiled(metric, launch) for launch in facts)
        if name not in chosen and metric.default is not None and has_it:
            chosen[name] = metric.default
    return {name: chosen[name] for name in METRICS if name in chosen}


@dataclass(frozen=True)
class StoredComparison:
    """A comparison of launches of one session block with a stored baseline, repeated as launches are added.

    Attributes:
        config: The candidate's config; a baseline of another config is not compared.
        marked: The tolerances set by markers.
        priors: Returns the prior of a metric's variance.
        max_launches: Number of the candidate's launches after which every verdict is final.
        file: Path of the baseline's file for reports, or the label of other results.
        kind: ``RESULTS`` if the baseline was built from other results.
    """

    case: str
    config: dict[str, Any]
    baseline: Baseline | None
    marked: Mapping[str, Tolerance]
    priors: Priors
    max_launches: int = 1
    file: str = ""
    kind: ReferenceKind = ReferenceKind.BASELINE

    def judge(self, launches: Sequence[LaunchFacts], decided: Mapping[str, Verdict] | None = None) -> Verdicts:
        """Return one verdict per metric. A metric that only one of the two sides has is *missing*.

        ``decided`` maps metrics to verdicts of fewer launches. These verdicts are kept.

        Raises:
            SpecError: As in :func:`choose_tolerances`.
        """
        present = () if self.baseline is None else self.baseline.center_launches[-1:]
        tolerances = choose_tolerances(self.marked, launches[0], *present)
        rows = [
            (decided or {}).get(name) or self._judge_one(METRICS[name], launches, tolerance)
            for name, tolerance in tolerances.items()
        ]
        center_launches = () if self.baseline is None else self.baseline.center_launches
        side = str(VerdictReference(self.kind, self.file))
        return Verdicts(self.case, tuple(rows), _notes(rows, launches, center_launches, side))

    def variance(self, metric: Metric) -> VarianceComponents:
        """Return the variance of a metric in the baseline, or the prior if a center launch lacks the metric."""
        center = () if self.baseline is None else self.baseline.center_launches
        if not center or None in transformed_values(metric, center, center):
            return self.priors(metric)
        return self.estimate(metric).variance

    def estimate(self, metric: Metric) -> Estimate:
        """Return the baseline estimate of a metric. The baseline must exist and contain the metric."""
        assert self.baseline is not None
        center_values = transformed_by_block(metric, self.baseline.center_launches, self.baseline.center_launches)
        return baseline_estimate(center_values, transformed_by_revision(metric, self.baseline), self.priors(metric))

    def _judge_one(self, metric: Metric, launches: Sequence[LaunchFacts], tolerance: Tolerance) -> Verdict:
        tolerance = widened(metric, launches[0], tolerance)
        revision = None
        if self.baseline is not None and self.kind is ReferenceKind.BASELINE:
            revision = self.baseline.revision
        reference = VerdictReference(self.kind, self.file, revision)
        blank = _blank(self.case, metric, launches, tolerance, reference)
        if detail := under_profiler(metric, launches):
            return blank.without_comparison(NotApplicable.PROFILER, detail)
        if self.baseline is None:
            if row := _not_profiled(blank, metric, launches, ()):
                return row
            if blank.value is None:
                return _missing(blank, Missing.CANDIDATE_VALUE, f"the launch has no {metric.name}")
            return _missing(replace(blank, is_unrecorded=True), Missing.BASELINE, "no baseline")
        center_launches = self.baseline.center_launches
        if detail := other_setup(self.baseline.config, center_launches[-1], self.config, launches):
            return _missing(replace(blank, is_unrecorded=True), Missing.BASELINE, detail)
        if row := _not_profiled(blank, metric, launches, center_launches):
            return row
        measured = _profiled(metric, launches)
        known = _profiled(metric, center_launches) or center_launches
        if not measured:
            row = replace(blank, outcome=Outcome.INCONCLUSIVE, baseline=middle(metric, known), is_open=True)
        else:
            row = self._judge_measured(replace(blank, value=middle(metric, measured)), metric, measured, known)
        return _after_late_hosts(row, metric, launches, last_look(self.max_launches))

    def _judge_measured(
        self, blank: Verdict, metric: Metric, launches: Sequence[LaunchFacts], center_launches: Sequence[LaunchFacts]
    ) -> Verdict:
        assert self.baseline is not None
        tolerance = blank.tolerance
        if problem := _incomparable(blank, metric, tolerance, launches, center_launches):
            return problem
        if tolerance.value is None or isinstance(blank.value, str):
            return _exact(blank, metric, launches, center_launches)
        if metric.by_family:
            row = judge_stored(blank, metric, launches, self.baseline, tolerance.value, self.max_launches)
            if row.outcome is Outcome.IMPROVED:
                row = replace(row, detail=f"{row.detail}; {_STALE}")
            return _with_throttling(row, metric, launches)
        values = [value for value in transformed_values(metric, launches, center_launches) if value is not None]
        if len(values) < len(launches) or None in transformed_values(metric, center_launches, center_launches):
            return _within_range(blank, metric, tolerance, launches, center_launches, self.max_launches)
        stored = self.estimate(metric)
        allowed = allowed_tolerance(metric, tolerance, stored)
        decision = decide_stored(
            values,
            metric_blocks(metric, [*center_launches, *launches])[-1],
            stored,
            allowed.value or 0.0,
            max_launches=self.max_launches,
            worse=metric.worse,
            relative=metric.scale is Scale.RELATIVE,
            may_pass=too_noisy(metric, tolerance, stored) is None,
        )
        center = metric.scale.from_transformed(stored.center, reference_step_ms(center_launches))
        row = _decided(replace(blank, tolerance=allowed), decision, metric, center)
        if detail := _explanation(row, launches, center_launches):
            row = replace(row, detail=detail)
        elif row.outcome is Outcome.INCONCLUSIVE and not row.is_open:
            row = replace(row, detail=self._undecided(row, metric, tolerance, center_launches))
        return _with_throttling(row, metric, launches)

    def undecidable(self, metric: Metric, tolerance: Tolerance) -> str | None:
        """Return why unchanged code may fail to pass, with the remedy; None if unchanged code mostly passes.

        ``tolerance`` is the tolerance before widening. The baseline must exist and contain the metric.
        """
        assert self.baseline is not None
        center_launches, stored = self.baseline.center_launches, self.estimate(metric)
        if problem := too_noisy(metric, tolerance, stored):
            return f"{problem}; record the baseline again with {RESET}, or set a tolerance"
        block = next_block(metric, center_launches)
        return unresolved(metric, allowed_tolerance(metric, tolerance, stored), stored, block, self.max_launches)

    def _undecided(
        self, row: Verdict, metric: Metric, tolerance: Tolerance, center_launches: Sequence[LaunchFacts]
    ) -> str:
        """Return why a final verdict is inconclusive, with the remedy."""
        remedy = self.undecidable(metric, tolerance)
        if remedy is None and len(center_launches) < MIN_LAUNCHES:
            remedy = f"only {counted(len(center_launches), 'launch')} in the center; record more with {RESET}"
        early = "further launches could not decide" if row.launches < last_look(self.max_launches) else ""
        return "; ".join(filter(None, [early, remedy]))


@dataclass(frozen=True)
class PairedComparison:
    """A comparison of launches of candidate and A/B reference that alternate in one session block.

    Attributes:
        variance: Returns the prior of a metric's variance.
        only: Names of the metrics to compare. Metrics without a tolerance, from a marker or by default, are compared
            bit for bit. None selects the metrics that a comparison with a stored baseline selects.
        max_pairs: Number of pairs after which every verdict is final.
        version: Name of the version that the reference ran; empty if both sides are variants of the test.
    """

    case: str
    marked: Mapping[str, Tolerance]
    variance: Priors
    only: Collection[str] | None = None
    max_pairs: int = 1
    version: str = ""

    def judge(
        self,
        candidates: Sequence[LaunchFacts],
        references: Sequence[LaunchFacts],
        decided: Mapping[str, Verdict] | None = None,
    ) -> Verdicts:
        """Return one verdict per metric. A metric that only one of the two sides has is *missing*.

        ``decided`` is as in :meth:`StoredComparison.judge`.

        Raises:
            SpecError: ``only`` is empty or names an unknown metric, or as in :func:`choose_tolerances`.
        """
        tolerances = choose_tolerances(self.marked, candidates[0], references[0])
        if self.only is not None:
            check_compared(self.only, METRICS)
            tolerances = {name: tolerances.get(name, Tolerance(None, origin=Origin.COMPARE)) for name in self.only}
        rows = [
            (decided or {}).get(name) or self._judge_one(METRICS[name], candidates, references, tolerance)
            for name, tolerance in tolerances.items()
        ]
        side = str(VerdictReference(ReferenceKind.AB, self.version))
        return Verdicts(self.case, tuple(rows), _notes(rows, candidates, references, side))

    def _judge_one(
        self,
        metric: Metric,
        candidates: Sequence[LaunchFacts],
        references: Sequence[LaunchFacts],
        tolerance: Tolerance,
    ) -> Verdict:
        blank = _blank(self.case, metric, candidates, tolerance, VerdictReference(ReferenceKind.AB, self.version))
        if detail := under_profiler(metric, [*candidates, *references]):
            return blank.without_comparison(NotApplicable.PROFILER, detail)
        if (found := other_steps(candidates, references[-1])) is not None:
            expected = counted(references[-1].num_steps, "measured step")
            return _missing(blank, Missing.BASELINE, f"the reference ran {expected}, the launch {found}")
        for side, other in ((candidates, references), (references, candidates)):
            if row := _not_profiled(blank, metric, side, other):
                return row
        pairs = [pair for pair in zip(candidates, references, strict=True) if len(_profiled(metric, pair)) == 2]
        if not pairs:
            row = replace(blank, outcome=Outcome.INCONCLUSIVE, is_open=True)
        else:
            measured, others = zip(*pairs, strict=True)
            row = self._judge_measured(replace(blank, value=middle(metric, measured)), metric, measured, others)
        return _after_late_hosts(row, metric, [*candidates, *references], 2 * self.max_pairs)

    def _judge_measured(
        self, blank: Verdict, metric: Metric, candidates: Sequence[LaunchFacts], references: Sequence[LaunchFacts]
    ) -> Verdict:
        tolerance = blank.tolerance
        if problem := _incomparable(blank, metric, tolerance, candidates, references):
            return problem
        if tolerance.value is None or isinstance(blank.value, str):
            return _exact(blank, metric, candidates, references)
        if metric.by_family:
            variance = self.variance(metric)
            row = judge_pairs(blank, metric, candidates, references, tolerance.value, variance, self.max_pairs)
            return _with_throttling(row, metric, candidates)
        values, others = (transformed_values(metric, side, references) for side in (candidates, references))
        differences = [a - b for a, b in zip(values, others, strict=True) if a is not None and b is not None]
        if len(differences) < len(candidates):
            return _within_range(blank, metric, tolerance, candidates, references, self.max_pairs)
        decision = decide_pairs(
            differences,
            self.variance(metric).within,
            tolerance.value,
            max_pairs=self.max_pairs,
            worse=metric.worse,
            relative=metric.scale is Scale.RELATIVE,
        )
        row = _decided(blank, decision, metric, middle(metric, references))
        row = replace(row, detail=_explanation(row, candidates, references) or row.detail)
        return _with_throttling(row, metric, candidates)


def _blank(
    case: str, metric: Metric, launches: Sequence[LaunchFacts], tolerance: Tolerance, reference: VerdictReference
) -> Verdict:
    value, count = middle(metric, launches), len(launches)
    return Verdict(case, metric.name, Outcome.MISSING, value, None, None, tolerance, reference, launches=count)


def _missing(blank: Verdict, part: Missing, detail: str) -> Verdict:
    # Without a value of the candidate, the state of the baseline does not matter.
    return replace(blank, missing=Missing.CANDIDATE_VALUE if blank.value is None else part, detail=detail)


def _not_profiled(
    blank: Verdict, metric: Metric, launches: Sequence[LaunchFacts], others: Sequence[LaunchFacts]
) -> Verdict | None:
    """Return the verdict for a metric that profiled steps of launches did not give, or None.

    The metric does not apply if no launch of the other side has it. If the other side has it, a new wait for the device
    and a trace that has become too large fail the test. Otherwise a change could avoid the comparison by either. After
    a late host, the next launch can have the metric.
    """
    found = [(launch, detail) for launch in launches if (detail := not_profiled(metric, launch))]
    if not found:
        return None
    known = _profiled(metric, [other for other in others if metric.measure(other) is not None])
    if not known:
        launch, detail = found[0]
        reason = NotApplicable.TRACE if launch.overlap_problem else NotApplicable.HEAD_START
        return replace(blank, value=None).without_comparison(reason, detail)
    lasting = [detail for launch, detail in found if is_not_profiled_again(launch)]
    if not lasting:
        return None
    return _missing(replace(blank, value=None, baseline=middle(metric, known)), Missing.CANDIDATE_VALUE, lasting[0])


def _profiled(metric: Metric, launches: Sequence[LaunchFacts]) -> list[LaunchFacts]:
    """Return the launches without those whose profiled steps gave no value of the metric."""
    return [launch for launch in launches if not_profiled(metric, launch) is None]


def _after_late_hosts(row: Verdict, metric: Metric, launches: Sequence[LaunchFacts], most: int) -> Verdict:
    """Return ``row``. If hosts were late and no further launch is allowed, an open verdict becomes final."""
    late = [detail for launch in launches if (detail := not_profiled(metric, launch))]
    if not late or not row.is_open or len(launches) < most:
        return row
    number = f"{len(late)} of {counted(len(launches), 'launch')}" if len(launches) > 1 else "the launch"
    return replace(row, is_open=False, detail=f"no value of {number}: {late[-1]}")


def _incomparable(
    blank: Verdict,
    metric: Metric,
    tolerance: Tolerance,
    launches: Sequence[LaunchFacts],
    others: Sequence[LaunchFacts],
) -> Verdict | None:
    """Return the verdict for a metric that one side lacks or that does not apply, or None if it can be compared."""
    known = [metric.measure(other) for other in others]
    if any(metric.measure(launch) is None for launch in launches):
        lost = replace(blank, value=None, baseline=known[-1])
        return _missing(lost, Missing.CANDIDATE_VALUE, f"the launch has no {metric.name}")
    remedy = "" if blank.is_by_ab else "; if this is intended, record the baseline again with " + RESET
    # A test may compare a reproducible variant with a variant that is not.
    is_bitwise = metric.kind is MetricKind.NUMERIC and tolerance.value is None and not _are_variants(blank)
    if is_bitwise and (detail := lost_reproducibility(launches, others[-1], str(blank.reference))):
        return _missing(replace(blank, baseline=known[-1]), Missing.CANDIDATE_VALUE, detail + remedy)
    if found := not_applicable(metric, tolerance, launches[0], others[-1], str(blank.reference)):
        shown = blank.baseline if metric.direction is Direction.EXACT else middle(metric, others)
        return replace(blank, baseline=shown).without_comparison(*found)
    if any(value is None for value in known):
        absent = f"the {blank.reference} has no {metric.name}"
        if reason := not_profiled(metric, others[-1]):
            absent = f"{absent}: {reason}"
        detail = absent if blank.is_by_ab else f"{absent}; record it again with {RESET}"
        return _missing(blank, Missing.BASELINE_VALUE, detail)
    if metric.by_step is not None:
        here, there = max(metric.by_step(launches[-1])), max(metric.by_step(others[-1]))
        if here != there:
            detail = f"the last hash is that of step {here}, the {blank.reference}'s that of step {there}"
            return _missing(replace(blank, baseline=known[-1]), Missing.CANDIDATE_VALUE, detail)
    return None


def _exact(blank: Verdict, metric: Metric, launches: Sequence[LaunchFacts], others: Sequence[LaunchFacts]) -> Verdict:
    expected = {metric.measure(other) for other in others}
    for launch in launches:
        value = metric.measure(launch)
        if different := sorted(expected - {value}, key=str):
            row = replace(blank, outcome=Outcome.REGRESSION, value=value, baseline=different[0])
            return _with_settings(row, metric, launch, others[-1])
    blank = replace(blank, baseline=blank.value)
    problem = _earlier_step(blank, metric, launches, others) or _lost_steps(blank, metric, launches, others[-1])
    return problem or replace(blank, outcome=Outcome.PASS)


def _with_settings(row: Verdict, metric: Metric, launch: LaunchFacts, other: LaunchFacts) -> Verdict:
    """Return a regression of bits with the numeric settings that the code changed, which may explain the regression."""
    settings = other_settings(launch, other) if metric.kind is MetricKind.NUMERIC else ""
    return replace(row, detail="; ".join(filter(None, [row.detail, settings])))


def _earlier_step(
    blank: Verdict, metric: Metric, launches: Sequence[LaunchFacts], others: Sequence[LaunchFacts]
) -> Verdict | None:
    """Return a regression if the sides differ after an earlier step for which both have a value, or None."""
    if metric.by_step is None:
        return None
    for launch, other in itertools.product(launches, others):
        here, there = metric.by_step(launch), metric.by_step(other)
        for step in sorted(here.keys() & there.keys()):
            if here[step] != there[step]:
                detail = f"after step {step}; after the last step, {max(here)}, the weights are equal"
                row = replace(blank, value=here[step], baseline=there[step], detail=detail)
                return _with_settings(replace(row, outcome=Outcome.REGRESSION), metric, launch, other)
    return None


def _lost_steps(blank: Verdict, metric: Metric, launches: Sequence[LaunchFacts], other: LaunchFacts) -> Verdict | None:
    """Return *missing* if a launch has no value for a step for which ``other`` has one, or None.

    Variants of a test may hash different steps.
    """
    if metric.by_step is None or _are_variants(blank):
        return None
    for launch in launches:
        if lost := sorted(metric.by_step(other).keys() - metric.by_step(launch).keys()):
            steps = f"{counted(len(lost), 'step')} for which the {blank.reference} has one"
            detail = f"the launch has no hash of {steps}: {brief(', '.join(map(str, lost)))}"
            return _missing(blank, Missing.CANDIDATE_VALUE, detail)
    return None


def _are_variants(row: Verdict) -> bool:
    """Return True if both sides are variants that the test itself chose."""
    return row.is_by_ab and not row.reference.name


def _within_range(
    blank: Verdict,
    metric: Metric,
    tolerance: Tolerance,
    launches: Sequence[LaunchFacts],
    others: Sequence[LaunchFacts],
    max_launches: int,
) -> Verdict:
    """Compare ranges, because values of zero or below have no logarithm.

    A change is reported if every launch lies beyond all ``others``, and the medians differ by more than the tolerance.
    """
    worse = metric.worse
    here = [worse * float(metric.measure(launch) or 0) for launch in launches]
    there = [worse * float(metric.measure(other) or 0) for other in others]
    row = replace(
        blank, baseline=middle(metric, others), detail="values are not positive, so their ranges are compared"
    )
    allowed = (tolerance.value or 0.0) * abs(median(there))
    if min(there) <= median(here) <= max(there) or abs(median(here) - median(there)) <= allowed:
        return replace(row, outcome=Outcome.PASS)
    if _are_separate(here, there) and min(here) > max(there):
        return replace(row, outcome=Outcome.REGRESSION)
    if _are_separate(here, there) and max(here) < min(there):
        return replace(row, outcome=Outcome.IMPROVED)
    return replace(row, outcome=Outcome.INCONCLUSIVE, is_open=len(here) < max_launches)


def _are_separate(here: Sequence[float], there: Sequence[float]) -> bool:
    """Return True if all of ``here`` are unlikely to lie on one side of all of ``there`` by chance."""
    by_chance = 1 / math.comb(len(here) + len(there), len(here))
    never_varies = len(set(here)) == len(set(there)) == 1
    return len(here) >= MIN_LAUNCHES_TO_FAIL and (never_varies or by_chance <= FALSE_ALARM_RATE)


def _decided(blank: Verdict, decision: Decision, metric: Metric, center: Value) -> Verdict:
    worse = metric.worse
    ends = sorted(metric.scale.change(worse * end) for end in (decision.low, decision.high))
    return replace(
        blank,
        outcome=decision.outcome or Outcome.INCONCLUSIVE,
        is_open=decision.outcome is None,
        baseline=center,
        delta=metric.scale.change(worse * decision.effect),
        low=ends[0],
        high=ends[1],
        launches=decision.launches,
        detail=_STALE if decision.outcome is Outcome.IMPROVED else "",
    )


def _with_throttling(row: Verdict, metric: Metric, launches: Sequence[LaunchFacts]) -> Verdict:
    """Return the verdict; if it is on a time that did not pass, its detail names throttled devices."""
    num_hot = sum(bool(launch.throttled) for launch in launches)
    if not num_hot or metric.kind is not MetricKind.TIMING or row.outcome is Outcome.PASS:
        return row
    of = f"{num_hot} of {len(launches)} launches" if len(launches) > 1 else "the launch"
    return replace(row, detail=", ".join(filter(None, [f"GPUs throttled in {of}", row.detail])))


def _notes(
    rows: Sequence[Verdict], launches: Sequence[LaunchFacts], others: Sequence[LaunchFacts], side: str
) -> tuple[str, ...]:
    """Return the notes on a comparison. A slow machine explains times, but no other metric."""
    undecided_or_failed = (Outcome.REGRESSION, Outcome.INCONCLUSIVE)
    are_times_in_question = any(
        row.outcome in undecided_or_failed and METRICS[row.metric].kind is MetricKind.TIMING for row in rows
    )
    found = split_note(rows, launches, others) + notes(launches, others, side)
    return tuple(found + (canary_notes(launches, others, side) if are_times_in_question else []))


def _explanation(row: Verdict, launches: Sequence[LaunchFacts], others: Sequence[LaunchFacts]) -> str:
    """Return text on the cause of a regression of time or overlap, or an empty text."""
    return explanation(row.metric, launches, others) if row.outcome is Outcome.REGRESSION else ""
