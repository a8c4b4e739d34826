"""Comparison of launches with a stored baseline, metric by metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytest_aorta.common.text import counted
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.verdict.applicability import choose_tolerances, other_setup, under_profiler, widened
from pytest_aorta.verdict.baseline import Baseline
from pytest_aorta.verdict.comparison.exact import judge_exact
from pytest_aorta.verdict.comparison.explained import cause_of, notes_on, with_throttling
from pytest_aorta.verdict.comparison.kernel_gate import judge_stored
from pytest_aorta.verdict.comparison.presence import after_late_hosts, incomparable_row, profiled, unprofiled_row
from pytest_aorta.verdict.comparison.ranges import judge_ranges
from pytest_aorta.verdict.comparison.rows import STALE, blank_row, decided_row, missing_row
from pytest_aorta.verdict.metrics import METRICS, Metric, Tolerance, middle
from pytest_aorta.verdict.noise.priors import (
    Priors,
    metric_blocks,
    next_block,
    reference_step_ms,
    transformed_by_block,
    transformed_by_revision,
    transformed_values,
)
from pytest_aorta.verdict.noise.resolution import RESET, allowed_tolerance, too_noisy, unresolved
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.statistics.scale import Scale
from pytest_aorta.verdict.statistics.stored import decide_stored, last_look
from pytest_aorta.verdict.statistics.variance import Estimate, VarianceComponents, baseline_estimate
from pytest_aorta.verdict.verdicts import Missing, NotApplicable, ReferenceKind, Verdict, VerdictReference, Verdicts

# With fewer launches, most of a baseline's variance comes from the prior.
MIN_LAUNCHES = 5


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
        workload: The candidate's workload or script; a baseline of another one is not compared. Empty if it is known to
            be that of the baseline.
    """

    case: str
    config: dict[str, Any]
    baseline: Baseline | None
    marked: Mapping[str, Tolerance]
    priors: Priors
    max_launches: int = 1
    file: str = ""
    kind: ReferenceKind = ReferenceKind.BASELINE
    workload: str = ""

    def judge(self, launches: Sequence[LaunchFacts], decided: Mapping[str, Verdict] | None = None) -> Verdicts:
        """Return one verdict per metric. A metric that only one of the two sides has is *missing*.

        ``decided`` maps metrics to verdicts of fewer launches. These verdicts are kept.

        Raises:
            SpecError: As in :func:`~pytest_aorta.verdict.applicability.choose_tolerances`.
        """
        present = () if self.baseline is None else self.baseline.center_launches[-1:]
        tolerances = choose_tolerances(self.marked, launches[0], *present)
        rows = [
            (decided or {}).get(name) or self._judge_one(METRICS[name], launches, tolerance)
            for name, tolerance in tolerances.items()
        ]
        center_launches = () if self.baseline is None else self.baseline.center_launches
        side = str(VerdictReference(self.kind, self.file))
        return Verdicts(self.case, tuple(rows), notes_on(rows, launches, center_launches, side))

    def variance(self, metric: Metric) -> VarianceComponents:
        """Return the variance of a metric in the baseline, or the prior if the baseline has no estimate."""
        return self.estimate(metric).variance if self.has_estimate(metric) else self.priors(metric)

    def has_estimate(self, metric: Metric) -> bool:
        """Return True if all center launches but those with a late host have a value on the metric's scale."""
        center_launches = () if self.baseline is None else self.baseline.center_launches
        known = profiled(metric, center_launches)
        return bool(known) and None not in transformed_values(metric, known, center_launches)

    def estimate(self, metric: Metric) -> Estimate:
        """Return the baseline estimate of a metric, which the baseline must have (:meth:`has_estimate`)."""
        assert self.baseline is not None
        center_values = transformed_by_block(metric, self.baseline.center_launches, self.baseline.center_launches)
        return baseline_estimate(center_values, transformed_by_revision(metric, self.baseline), self.priors(metric))

    def _judge_one(self, metric: Metric, launches: Sequence[LaunchFacts], tolerance: Tolerance) -> Verdict:
        tolerance = widened(metric, launches[0], tolerance)
        revision = None
        if self.baseline is not None and self.kind is ReferenceKind.BASELINE:
            revision = self.baseline.revision
        reference = VerdictReference(self.kind, self.file, revision)
        blank = blank_row(self.case, metric, launches, tolerance, reference)
        if detail := under_profiler(metric, launches):
            return blank.without_comparison(NotApplicable.PROFILER, detail)
        if self.baseline is None:
            if row := unprofiled_row(blank, metric, launches, ()):
                return row
            if blank.value is None:
                return missing_row(blank, Missing.CANDIDATE_VALUE, f"the launch has no {metric.name}")
            return missing_row(replace(blank, is_unrecorded=True), Missing.BASELINE, "no baseline")
        center_launches = self.baseline.center_launches
        if detail := other_setup(self.baseline, self.workload or self.baseline.workload, self.config, launches):
            return missing_row(replace(blank, is_unrecorded=True), Missing.BASELINE, detail)
        if row := unprofiled_row(blank, metric, launches, center_launches):
            return row
        measured = profiled(metric, launches)
        known = profiled(metric, center_launches) or center_launches
        if not measured:
            row = replace(blank, outcome=Outcome.INCONCLUSIVE, baseline=middle(metric, known), is_open=True)
        else:
            row = self._judge_measured(replace(blank, value=middle(metric, measured)), metric, measured, known)
        return after_late_hosts(row, metric, launches, last_look(self.max_launches))

    def _judge_measured(
        self, blank: Verdict, metric: Metric, launches: Sequence[LaunchFacts], center_launches: Sequence[LaunchFacts]
    ) -> Verdict:
        assert self.baseline is not None
        tolerance = blank.tolerance
        if problem := incomparable_row(blank, metric, launches, center_launches):
            return problem
        if tolerance.value is None or isinstance(blank.value, str):
            return judge_exact(blank, metric, launches, center_launches)
        if metric.by_family:
            row = judge_stored(blank, metric, launches, self.baseline, tolerance.value, self.max_launches)
            if row.outcome is Outcome.IMPROVED:
                row = replace(row, detail=f"{row.detail}; {STALE}")
            return with_throttling(row, metric, launches)
        values = [value for value in transformed_values(metric, launches, center_launches) if value is not None]
        if len(values) < len(launches) or not self.has_estimate(metric):
            return judge_ranges(blank, metric, launches, center_launches, self.max_launches)
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
        row = decided_row(replace(blank, tolerance=allowed), decision, metric, center)
        if detail := cause_of(row, launches, center_launches):
            row = replace(row, detail=detail)
        elif row.outcome is Outcome.INCONCLUSIVE and not row.is_open:
            row = replace(row, detail=self._undecided(row, metric, tolerance, center_launches))
        return with_throttling(row, metric, launches)

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
