"""Compares launches' facts with a baseline or with a reference, metric by metric."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, TypeAlias

from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.text import counted
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.verdict.applicability import not_applicable, other_config, under_profiler, widened
from pytest_aorta.verdict.baseline import Baseline
from pytest_aorta.verdict.explain import EXPLAINED, exposure, notes
from pytest_aorta.verdict.metrics import EXACT, METRICS, Metric, Tolerance, Value, middle
from pytest_aorta.verdict.priors import (
    blocks,
    reference_step_ms,
    transformed_by_block,
    transformed_by_revision,
    transformed_values,
)
from pytest_aorta.verdict.statistics.decision import (
    FALSE_ALARM_RATE,
    MIN_LAUNCHES_TO_FAIL,
    RESOLVED_BY,
    Decision,
    Outcome,
    decide_pairs,
    decide_stored,
)
from pytest_aorta.verdict.statistics.scale import Scale
from pytest_aorta.verdict.statistics.variance import Estimate, VarianceComponents, baseline_estimate
from pytest_aorta.verdict.verdicts import Verdict, Verdicts

Priors: TypeAlias = Callable[[Metric], VarianceComponents]
# Below these a baseline's spread is hardly its own.
MIN_LAUNCHES = 5
_STALE = "baseline stale: record the better value with --update-baselines --aorta-reset-baselines"


def choose_tolerances(marked: Mapping[str, Tolerance], *facts: LaunchFacts) -> dict[str, Tolerance]:
    """The metrics to compare: those a marker names, and the table's defaults that any of the launches has.

    Raises:
        SpecError: a marker names a metric that means nothing with so few steps.
    """
    chosen = dict(marked)
    num_steps = min(launch.num_steps for launch in facts)
    for name in marked:
        if num_steps < METRICS[name].min_steps:
            raise SpecError(
                f"tolerance of {name}: {num_steps} steps were measured and it takes at least "
                f"{METRICS[name].min_steps}; measure more steps, or use step_time_tail5"
            )
    for name, metric in METRICS.items():
        has_it = any(metric.measure(launch) is not None for launch in facts) and num_steps >= metric.min_steps
        if name not in chosen and metric.default is not None and has_it:
            chosen[name] = metric.default
    return {name: chosen[name] for name in METRICS if name in chosen}


@dataclass(frozen=True)
class StoredComparison:
    """Compares a growing number of launches of one sitting with a stored baseline.

    Attributes:
        config: the candidate's; a baseline of another one is none.
        marked: the tolerances that markers name.
        priors: what is taken for a metric's spread before the baseline shows its own.
        max_launches: of the candidate, after which every verdict is final.
    """

    case: str
    config: dict[str, Any]
    baseline: Baseline | None
    marked: Mapping[str, Tolerance]
    priors: Priors
    max_launches: int = 1

    def judge(self, launches: Sequence[LaunchFacts], decided: Mapping[str, Verdict] | None = None) -> Verdicts:
        """One verdict a metric; one that the baseline has and the launch lost is *missing*, as is the reverse.

        ``decided`` are verdicts of fewer launches that stay as they are.
        """
        present = () if self.baseline is None else self.baseline.center_launches[-1:]
        tolerances = choose_tolerances(self.marked, launches[0], *present)
        rows = [
            (decided or {}).get(name) or self._judge_one(METRICS[name], launches, tolerance)
            for name, tolerance in tolerances.items()
        ]
        center_launches = () if self.baseline is None else self.baseline.center_launches
        return Verdicts(self.case, tuple(rows), tuple(notes(launches, center_launches)))

    def variance(self, metric: Metric) -> VarianceComponents:
        """What the baseline tells of a metric's spread, or else the prior."""
        if self.baseline is None or None in transformed_values(
            metric, self.baseline.center_launches, self.baseline.center_launches
        ):
            return self.priors(metric)
        return self.estimate(metric).variance

    def estimate(self, metric: Metric) -> Estimate:
        """The stored centre of a metric and its spread. There has to be a baseline that has the metric."""
        assert self.baseline is not None
        center_launches = transformed_by_block(metric, self.baseline.center_launches, self.baseline.center_launches)
        return baseline_estimate(center_launches, transformed_by_revision(metric, self.baseline), self.priors(metric))

    def allowed(self, metric: Metric, tolerance: Tolerance, stored: Estimate) -> Tolerance:
        """The tolerance, one of the table's own widened to what the stored launches can bear."""
        if metric.name in self.marked or tolerance.relative is None:
            return tolerance
        bearable = metric.scale.change(RESOLVED_BY * math.sqrt(stored.variance.within.value))
        if bearable <= tolerance.relative:
            return tolerance
        return Tolerance(math.ceil(bearable * 100) / 100, metric.scale)

    def _judge_one(self, metric: Metric, launches: Sequence[LaunchFacts], tolerance: Tolerance) -> Verdict:
        tolerance = widened(metric, launches[0], tolerance)
        blank = _blank(self.case, metric, launches, tolerance)
        if reason := under_profiler(metric, launches):
            return replace(blank, outcome=Outcome.NOT_APPLICABLE, reason=reason)
        if self.baseline is None:
            return replace(blank, reason="no baseline; record one with --update-baselines")
        if reason := other_config(self.baseline.config, self.config):
            return replace(blank, reason=reason)
        center_launches = self.baseline.center_launches
        if problem := _incomparable(blank, metric, tolerance, launches, center_launches):
            return problem
        if tolerance.relative is None or isinstance(blank.value, str):
            return _exact(blank, metric, launches, center_launches)
        values = [value for value in transformed_values(metric, launches, center_launches) if value is not None]
        if len(values) < len(launches) or None in transformed_values(metric, center_launches, center_launches):
            return _within_range(blank, metric, tolerance, launches, center_launches, self.max_launches)
        stored = self.estimate(metric)
        tolerance = self.allowed(metric, tolerance, stored)
        blank = replace(blank, tolerance=str(tolerance))
        decision = decide_stored(
            values,
            blocks([*center_launches, *launches])[-1],
            stored,
            tolerance.relative or 0.0,
            max_launches=self.max_launches,
            worse=metric.worse,
            relative=metric.scale is Scale.RELATIVE,
        )
        row = _decided(
            blank, decision, metric, metric.scale.from_transformed(stored.center, reference_step_ms(center_launches))
        )
        if reason := _exposure(row, launches, center_launches):
            row = replace(row, reason=reason)
        elif row.outcome is Outcome.INCONCLUSIVE and len(center_launches) < MIN_LAUNCHES:
            few = f"only {counted(len(center_launches), 'launch')} in the baseline; record more with --update-baselines"
            row = replace(row, reason=few)
        return _with_throttling(row, metric, launches)


@dataclass(frozen=True)
class PairedComparison:
    """Compares launches of candidate and reference, made in turn in one sitting.

    Attributes:
        spread: what is known of a metric's spread beforehand.
        only: the metrics to compare, at exactness where neither marker nor table has a tolerance; None: as stored.
        max_pairs: after which every verdict is final.
    """

    case: str
    marked: Mapping[str, Tolerance]
    variance: Priors
    only: Collection[str] | None = None
    max_pairs: int = 1

    def judge(
        self,
        candidates: Sequence[LaunchFacts],
        references: Sequence[LaunchFacts],
        decided: Mapping[str, Verdict] | None = None,
    ) -> Verdicts:
        """One verdict a metric; what one of the two lacks is missing, not left out.

        Raises:
            SpecError: ``only`` names a metric that there is not.
        """
        tolerances = choose_tolerances(self.marked, candidates[0], references[0])
        if self.only is not None:
            if unknown := sorted(set(self.only) - set(METRICS)):
                raise SpecError(f"compare: no such metrics {unknown}; there are {sorted(METRICS)}")
            tolerances = {name: tolerances.get(name, EXACT) for name in self.only}
        rows = [
            (decided or {}).get(name) or self._judge_one(METRICS[name], candidates, references, tolerance)
            for name, tolerance in tolerances.items()
        ]
        return Verdicts(self.case, tuple(rows), tuple(notes(candidates, references)))

    def _judge_one(
        self,
        metric: Metric,
        candidates: Sequence[LaunchFacts],
        references: Sequence[LaunchFacts],
        tolerance: Tolerance,
    ) -> Verdict:
        blank = _blank(self.case, metric, candidates, tolerance)
        if reason := under_profiler(metric, [*candidates, *references]):
            return replace(blank, outcome=Outcome.NOT_APPLICABLE, reason=reason)
        if problem := _incomparable(blank, metric, tolerance, candidates, references):
            return problem
        if tolerance.relative is None or isinstance(blank.value, str):
            return _exact(blank, metric, candidates, references)
        values, others = (transformed_values(metric, side, references) for side in (candidates, references))
        differences = [a - b for a, b in zip(values, others, strict=True) if a is not None and b is not None]
        if len(differences) < len(candidates):
            return _within_range(blank, metric, tolerance, candidates, references, self.max_pairs)
        decision = decide_pairs(
            differences,
            self.variance(metric).within,
            tolerance.relative,
            max_pairs=self.max_pairs,
            worse=metric.worse,
            relative=metric.scale is Scale.RELATIVE,
        )
        row = _decided(blank, decision, metric, middle(metric, references))
        row = replace(row, reason=_exposure(row, candidates, references) or row.reason)
        return _with_throttling(row, metric, candidates)


def _blank(case: str, metric: Metric, launches: Sequence[LaunchFacts], tolerance: Tolerance) -> Verdict:
    value = middle(metric, launches)
    return Verdict(case, metric.name, Outcome.MISSING, value, None, None, str(tolerance), launches=len(launches))


def _incomparable(
    blank: Verdict,
    metric: Metric,
    tolerance: Tolerance,
    launches: Sequence[LaunchFacts],
    others: Sequence[LaunchFacts],
) -> Verdict | None:
    """The verdict where there are not two things to compare."""
    known = [metric.measure(other) for other in others]
    if any(metric.measure(launch) is None for launch in launches):
        return replace(blank, value=None, baseline=known[-1], reason=f"the launch has no {metric.name}")
    if reason := not_applicable(metric, tolerance, launches[0], others[-1]):
        shown = blank.baseline if metric.direction == "exact" else middle(metric, others)
        return replace(blank, outcome=Outcome.NOT_APPLICABLE, baseline=shown, reason=reason)
    if any(value is None for value in known):
        return replace(
            blank,
            reason=f"the baseline has no {metric.name}; record it again with --update-baselines "
            "--aorta-reset-baselines",
        )
    return None


def _exact(blank: Verdict, metric: Metric, launches: Sequence[LaunchFacts], others: Sequence[LaunchFacts]) -> Verdict:
    expected = {metric.measure(other) for other in others}
    for launch in launches:
        value = metric.measure(launch)
        if odd := sorted(expected - {value}, key=str):
            return replace(blank, outcome=Outcome.REGRESSION, value=value, baseline=odd[0])
    return replace(blank, outcome=Outcome.PASS, baseline=blank.value)


def _within_range(
    blank: Verdict,
    metric: Metric,
    tolerance: Tolerance,
    launches: Sequence[LaunchFacts],
    others: Sequence[LaunchFacts],
    max_launches: int,
) -> Verdict:
    """Where some values are zero or below, there are no logs: whether all launches lie beyond all others."""
    worse = metric.worse
    here = [worse * float(metric.measure(launch) or 0) for launch in launches]
    there = [worse * float(metric.measure(other) or 0) for other in others]
    row = replace(blank, baseline=middle(metric, others), reason="not positive: compared by range")
    allowed = (tolerance.relative or 0.0) * abs(median(there))
    if min(there) <= median(here) <= max(there) or abs(median(here) - median(there)) <= allowed:
        return replace(row, outcome=Outcome.PASS)
    if _are_apart(here, there) and min(here) > max(there):
        return replace(row, outcome=Outcome.REGRESSION)
    if _are_apart(here, there) and max(here) < min(there):
        return replace(row, outcome=Outcome.IMPROVED)
    return replace(row, outcome=Outcome.INCONCLUSIVE, is_open=len(here) < max_launches)


def _are_apart(here: Sequence[float], there: Sequence[float]) -> bool:
    """Whether it is no chance that all of ``here`` lie on one side of all of ``there``."""
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
        reason=_STALE if decision.outcome is Outcome.IMPROVED else "",
    )


def _with_throttling(row: Verdict, metric: Metric, launches: Sequence[LaunchFacts]) -> Verdict:
    """Where a time is not what it was, say so of launches whose devices were throttled."""
    num_hot = sum(bool(launch.throttled) for launch in launches)
    if not num_hot or metric.kind != "timing" or row.outcome is Outcome.PASS:
        return row
    of = f"{num_hot} of {len(launches)} launches" if len(launches) > 1 else "the launch"
    return replace(row, reason=", ".join(filter(None, [f"GPUs throttled in {of}", row.reason])))


def _exposure(row: Verdict, launches: Sequence[LaunchFacts], others: Sequence[LaunchFacts]) -> str:
    """What explains a regression of overlap."""
    is_explained = row.metric in EXPLAINED and row.outcome is Outcome.REGRESSION
    return exposure(launches, others) if is_explained else ""
