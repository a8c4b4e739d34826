"""Comparison of launches with those of an A/B reference, metric by metric."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_aorta.common.text import counted
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.verdict.applicability import choose_tolerances, other_steps, under_profiler
from pytest_aorta.verdict.comparison.exact import judge_exact
from pytest_aorta.verdict.comparison.explained import cause_of, notes_on, with_throttling
from pytest_aorta.verdict.comparison.kernel_gate import judge_pairs
from pytest_aorta.verdict.comparison.presence import after_late_hosts, incomparable_row, profiled, unprofiled_row
from pytest_aorta.verdict.comparison.ranges import judge_ranges
from pytest_aorta.verdict.comparison.rows import blank_row, decided_row, missing_row
from pytest_aorta.verdict.metrics import METRICS, Metric, Origin, Tolerance, check_compared, middle
from pytest_aorta.verdict.noise.priors import Priors, transformed_values
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.statistics.pairs import decide_pairs
from pytest_aorta.verdict.statistics.scale import Scale
from pytest_aorta.verdict.verdicts import Missing, NotApplicable, ReferenceKind, Verdict, VerdictReference, Verdicts


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

        ``decided`` is as in :meth:`~pytest_aorta.verdict.comparison.stored.StoredComparison.judge`.

        Raises:
            SpecError: ``only`` is empty or names an unknown metric, or as in
                :func:`~pytest_aorta.verdict.applicability.choose_tolerances`.
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
        return Verdicts(self.case, tuple(rows), notes_on(rows, candidates, references, side))

    def _judge_one(
        self,
        metric: Metric,
        candidates: Sequence[LaunchFacts],
        references: Sequence[LaunchFacts],
        tolerance: Tolerance,
    ) -> Verdict:
        blank = blank_row(self.case, metric, candidates, tolerance, VerdictReference(ReferenceKind.AB, self.version))
        if detail := under_profiler(metric, [*candidates, *references]):
            return blank.without_comparison(NotApplicable.PROFILER, detail)
        if (found := other_steps(candidates, references[-1])) is not None:
            expected = counted(references[-1].num_steps, "measured step")
            return missing_row(blank, Missing.BASELINE, f"the reference ran {expected}, the launch {found}")
        for side, other in ((candidates, references), (references, candidates)):
            if row := unprofiled_row(blank, metric, side, other):
                return row
        pairs = [pair for pair in zip(candidates, references, strict=True) if len(profiled(metric, pair)) == 2]
        if not pairs:
            row = replace(blank, outcome=Outcome.INCONCLUSIVE, is_open=True)
        else:
            measured, others = zip(*pairs, strict=True)
            row = self._judge_measured(replace(blank, value=middle(metric, measured)), metric, measured, others)
        return after_late_hosts(row, metric, [*candidates, *references], 2 * self.max_pairs)

    def _judge_measured(
        self, blank: Verdict, metric: Metric, candidates: Sequence[LaunchFacts], references: Sequence[LaunchFacts]
    ) -> Verdict:
        tolerance = blank.tolerance
        if problem := incomparable_row(blank, metric, candidates, references):
            return problem
        if tolerance.value is None or isinstance(blank.value, str):
            return judge_exact(blank, metric, candidates, references)
        if metric.by_family:
            variance = self.variance(metric)
            row = judge_pairs(blank, metric, candidates, references, tolerance.value, variance, self.max_pairs)
            return with_throttling(row, metric, candidates)
        values, others = (transformed_values(metric, side, references) for side in (candidates, references))
        differences = [a - b for a, b in zip(values, others, strict=True) if a is not None and b is not None]
        if len(differences) < len(candidates):
            return judge_ranges(blank, metric, candidates, references, self.max_pairs)
        decision = decide_pairs(
            differences,
            self.variance(metric).within,
            tolerance.value,
            max_pairs=self.max_pairs,
            worse=metric.worse,
            relative=metric.scale is Scale.RELATIVE,
        )
        row = decided_row(blank, decision, metric, middle(metric, references))
        row = replace(row, detail=cause_of(row, candidates, references) or row.detail)
        return with_throttling(row, metric, candidates)
