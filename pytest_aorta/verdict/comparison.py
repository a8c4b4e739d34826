"""Comparison of launches with a stored baseline or with an A/B reference, metric by metric."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pytest_aorta.common.text import counted
from pytest_aorta.result.facts import Launches, LaunchFacts
from pytest_aorta.verdict.applicability import choose_tolerances, not_applicable, profiled
from pytest_aorta.verdict.baseline import Baseline
from pytest_aorta.verdict.by_rank import judge_costs, judge_curves, judge_growth
from pytest_aorta.verdict.causes import cause_of, notes_on, throttled
from pytest_aorta.verdict.edits import edits
from pytest_aorta.verdict.environment import other_setup, other_steps
from pytest_aorta.verdict.metrics import Metric, MetricKind, Origin, Tolerance, Tolerances, Value, metric_of, middle
from pytest_aorta.verdict.noise import (
    default_variance,
    median_step_ms,
    metric_blocks,
    next_block,
    transformed_by_block,
    transformed_by_revision,
    transformed_values,
    unresolved,
)
from pytest_aorta.verdict.rows import Row
from pytest_aorta.verdict.schedules import judge_schedules
from pytest_aorta.verdict.statistics.decision import Decision, Outcome, Scale, StoredRule, allowed_looks, decide_pairs
from pytest_aorta.verdict.statistics.variance import Estimate, VarianceComponents, baseline_estimate
from pytest_aorta.verdict.verdicts import (
    Decided,
    MissingPart,
    Note,
    NoteKind,
    Reason,
    ReferenceKind,
    Unrecorded,
    Verdict,
    VerdictReference,
    Verdicts,
)


class _Comparison(ABC):
    """Base of both kinds of comparison: the way from a metric that can be compared to its verdict."""

    case: str

    def _verdicts(
        self,
        tolerances: Tolerances,
        launches: Launches,
        others: Launches,
        reference: VerdictReference,
        most: int,
        decided: Mapping[str, Verdict] | None,
    ) -> Verdicts:
        """Return one verdict per metric, final after ``most`` launches; verdicts in ``decided`` are kept."""
        rows = []
        for name, tolerance in tolerances.items():
            metric = metric_of(name, tolerance.direction)
            row = Row(self.case, metric, tolerance, reference, launches, others, len(launches), most)
            rows.append((decided or {}).get(name) or self._judge(row))
        if any(row.outcome is Outcome.REGRESSION for row in rows):
            changed = Decided(Outcome.CHANGED)
            rows = [row.replace(state=changed) if row.outcome is Outcome.IMPROVED else row for row in rows]
        notes, suspect = notes_on(rows, launches, others, str(reference))
        edited = edits(launches, others) if any(row.is_finding for row in rows) else []
        edited += [row.detail for row in rows if row.definition.grows and row.outcome is Outcome.REGRESSION]
        return Verdicts(self.case, tuple(rows), (*(Note(text, NoteKind.EDIT) for text in edited), *notes), suspect)

    def _judge_measured(self, row: Row) -> Verdict:
        """Return the verdict on those launches of a row that have a value unless the code lost it."""
        launches, others = row.launches, row.others
        if not launches:
            return row.decided(None, None, middle(row.metric, others))
        if problem := row.incomparable():
            return problem
        if row.metric.cost is not None:
            return judge_costs(row, row.metric.cost)
        if row.metric.curve is not None:
            return judge_curves(row, row.metric.curve)
        if row.metric.grows:
            return judge_growth(row)
        if row.metric.scheduled is not None:
            return judge_schedules(row, row.metric.scheduled)
        if row.tolerance.value is None or isinstance(row.value, str):
            return row.judge_exact()
        if (found := self._decide(row)) is None:
            return row.judge_ranges()
        decision, center = found
        if row.tolerance.origin is Origin.GROSS:
            return _gross(row, decision, center)
        is_questioned = row.metric.kind is MetricKind.TIMING and decision.outcome is not Outcome.PASS
        details = [throttled(launches)] if is_questioned else []
        match decision.outcome:
            case Outcome.REGRESSION:
                details.append(cause_of(row.metric.name, launches, others))
            case Outcome.INCONCLUSIVE:
                details.append(self._undecided(row, decision.launches))
        return row.by_decision(decision, center, "; ".join(filter(None, details)))

    def _judge_equal_steps(self, row: Row, detail: str) -> Verdict:
        """Return the verdict if the numbers of measured steps differ, which ``detail`` says.

        A change of what a step costs, or of a step that both sides have, can be the cause of the other number.
        """
        metric = row.metric
        if metric.kind is MetricKind.COUNT or metric.curve or metric.hashed:
            found = self._judge_measured(row)
            if found.outcome is Outcome.REGRESSION:
                return found
        return self._unrecorded(row, detail, Unrecorded.STEPS)

    def _unrecorded(self, row: Row, detail: str, what: Unrecorded = Unrecorded.CASE) -> Verdict:
        """Return the verdict without a baseline of these launches, which can be recorded unless both were launched."""
        is_stored = row.reference.kind is ReferenceKind.BASELINE
        return row.missing(MissingPart.BASELINE, detail, what if is_stored else None)

    @abstractmethod
    def _judge(self, row: Row) -> Verdict:
        """Return the verdict on a metric, given all launches."""

    @abstractmethod
    def _decide(self, row: Row) -> tuple[Decision, Value] | None:
        """Return the decision with the value of the other side; None where ranges have to be compared instead."""

    def _undecided(self, row: Row, num_launches: int) -> str:
        """Return why the final verdict of ``num_launches`` launches is inconclusive, with the remedy; may be empty."""
        del row, num_launches
        return ""


# Of a step that waits for this part of its time, the rest is half of it.
_DOUBLING_WAIT = 0.5


def _gross(row: Row, decision: Decision, center: Value) -> Verdict:
    """Return the verdict on a time of CPU ranks that no marker names: only what noise can't explain is a finding.

    Other work on the machine slows steps of a launch. So if steps are slower, the fast ones have to be slower than the
    slow ones of the other side, also without the time for which ranks waited for a CPU. More launches are of no use
    where these waits alone could double a step.
    """
    is_time = row.metric.scale is Scale.RELATIVE
    slow_ms = max(launch.step_time_ms["p99"] for launch in row.others) if is_time else 0.0
    waits = [launch.cpu_wait for launch in row.launches]
    wait = max(1.0 if wait is None else wait for wait in waits)
    is_left = isinstance(row.value, float) and row.value * (1 - wait) > slow_ms
    match decision.outcome:
        case Outcome.REGRESSION if is_left:
            return row.by_decision(decision, center, cause_of(row.metric.name, row.launches, row.others))
        case Outcome.PASS | Outcome.IMPROVED:
            return row.by_decision(replace(decision, outcome=Outcome.PASS), center, "")
        case None if is_left or wait < _DOUBLING_WAIT:
            return row.by_decision(decision, center, "")
    hidden = f"the noise of {counted(decision.launches, 'launch')} hides a change of {row.tolerance}"
    if None in waits:
        hidden = "it is not known for how long ranks waited for a CPU"
    elif wait >= _DOUBLING_WAIT:
        hidden = f"ranks waited for a CPU for {wait:.0%} of the steps' time, added up"
    return row.not_applicable(Reason.UNMARKED_CPU_TIMES, hidden, row.value, center)


@dataclass(frozen=True)
class StoredComparison(_Comparison):
    """A comparison of launches of one session block with a stored baseline, repeated as launches are added.

    Attributes:
        config: The candidate's config; a baseline of another config is not compared.
        marked: The tolerances set by markers.
        max_launches: Number of the candidate's launches after which every verdict is final.
        file: Path of the baseline's file for reports.
        workload: The candidate's workload or script; a baseline of another one is not compared. Empty if it is known to
            be that of the baseline.
    """

    case: str
    config: dict[str, Any]
    baseline: Baseline | None
    marked: Tolerances
    max_launches: int = 1
    file: str = ""
    workload: str = ""

    def judge(self, launches: Launches, decided: Mapping[str, Verdict] | None = None) -> Verdicts:
        """Return one verdict per metric. A metric that only one of the two sides has is *missing*.

        ``decided`` maps metrics to verdicts of fewer launches. These verdicts are kept.

        Raises:
            SpecError: As in :func:`~pytest_aorta.verdict.applicability.choose_tolerances`.
        """
        tolerances = choose_tolerances(self.marked, launches[0], *self._center[-1:])
        revision = None if self.baseline is None else self.baseline.revision
        reference = VerdictReference(ReferenceKind.BASELINE, self.file, revision)
        return self._verdicts(tolerances, launches, self._center, reference, self.max_launches, decided)

    @property
    def _center(self) -> tuple[LaunchFacts, ...]:
        return () if self.baseline is None else self.baseline.center_launches

    def variance(self, metric: Metric) -> VarianceComponents | None:
        """Return the variance of a metric in the baseline; None if the baseline has no estimate to go by."""
        stored = self.estimate(metric)
        is_noisy = self.baseline is not None and metric.name in self.baseline.left_out
        return None if stored is None or is_noisy else stored.variance

    def estimate(self, metric: Metric) -> Estimate | None:
        """Return the baseline estimate of a metric.

        It is None unless all center launches but those with a late host have a value on the metric's scale.
        """
        known = profiled(metric, self._center)
        if self.baseline is None or not known or None in transformed_values(metric, known, self._center):
            return None
        center_values = transformed_by_block(metric, self._center, self._center)
        prior = default_variance(metric, self._center[-1].device)
        return baseline_estimate(center_values, transformed_by_revision(metric, self.baseline), prior)

    def rule(self, metric: Metric, tolerance: float | None, block: Hashable = None) -> StoredRule | None:
        """Return the rule for launches of ``block``, or of the next one that is expected; None without an estimate."""
        if (stored := self.estimate(metric)) is None:
            return None
        block = block or next_block(metric, self._center)
        return StoredRule(stored, block, tolerance or 0.0, self.max_launches, metric.worse, metric.scale)

    def _judge(self, row: Row) -> Verdict:
        metric, launches, center = row.metric, row.launches, row.others
        if found := row.under_profiler(launches):
            return found
        if self.baseline is None:
            if found := row.unprofiled(launches, ()):
                return found
            if row.value is None:
                return row.lost(f"the launch has no {metric.name}", None)
            if never := not_applicable(metric, row.tolerance, launches[0], launches[0]):
                return row.not_applicable(*never, row.value)
            return self._unrecorded(row, "no baseline")
        if detail := other_setup(self.baseline, self.workload or self.baseline.workload, self.config, launches):
            return self._unrecorded(row, detail)
        if detail := other_steps(launches, center[-1]):
            return self._judge_equal_steps(row, detail)
        is_asked = row.tolerance.is_exact and row.tolerance.origin is not Origin.DEFAULT
        if (noise := self.baseline.left_out.get(metric.name)) and not is_asked:
            return row.not_applicable(Reason.NOISY, f"left out when recorded: {noise}", row.value)
        if found := row.unprofiled(launches, center):
            return found
        late = row.late_hosts(launches) if len(launches) >= allowed_looks(self.max_launches)[-1] else ""
        known = profiled(metric, center) or center
        return self._judge_measured(replace(row, launches=profiled(metric, launches), others=known, late=late))

    def _decide(self, row: Row) -> tuple[Decision, Value] | None:
        metric = row.metric
        values = [value for value in transformed_values(metric, row.launches, row.others) if value is not None]
        rule = self.rule(metric, row.tolerance.value, metric_blocks(metric, [*row.others, *row.launches])[-1])
        if len(values) < len(row.launches) or rule is None:
            return None
        center = metric.scale.from_transformed(rule.baseline.center, median_step_ms(row.others))
        return rule.decide(values), center

    def _undecided(self, row: Row, num_launches: int) -> str:
        rule = self.rule(row.metric, row.tolerance.value)
        early = "further launches could not decide" if num_launches < allowed_looks(self.max_launches)[-1] else ""
        return "; ".join(filter(None, [early, unresolved(rule, row.tolerance) if rule else ""]))


@dataclass(frozen=True)
class PairedComparison(_Comparison):
    """A comparison of launches of candidate and A/B reference that alternate in one session block.

    Attributes:
        only: Names of the metrics to compare. Metrics without a tolerance, from a marker or by default, are compared
            bit for bit. None selects the metrics that a comparison with a stored baseline selects.
        max_pairs: Number of pairs after which every verdict is final.
        version: Name of the version that the reference ran; empty if both sides are variants of the test.
        variance: Returns the prior of a metric's variance; None: that of the device.
    """

    case: str
    marked: Tolerances
    only: Collection[str] | None = None
    max_pairs: int = 1
    version: str = ""
    variance: Callable[[Metric], VarianceComponents | None] = lambda _: None

    def judge(
        self,
        candidates: Launches,
        references: Launches,
        decided: Mapping[str, Verdict] | None = None,
    ) -> Verdicts:
        """Return one verdict per metric. A metric that only one of the two sides has is *missing*.

        ``decided`` is as in :meth:`StoredComparison.judge`.

        Raises:
            SpecError: As in :func:`~pytest_aorta.verdict.applicability.choose_tolerances`.
        """
        asked, is_variant = self.only or (), not self.version
        tolerances = choose_tolerances(self.marked, candidates[0], references[0], asked=asked, is_variant=is_variant)
        if self.only is None:
            tolerances = {name: found for name, found in tolerances.items() if found.origin is not Origin.GROSS}
        else:
            tolerances = {name: tolerances.get(name, Tolerance(None, origin=Origin.COMPARE)) for name in self.only}
        reference = VerdictReference(ReferenceKind.AB, self.version)
        return self._verdicts(tolerances, candidates, references, reference, self.max_pairs, decided)

    def _judge(self, row: Row) -> Verdict:
        metric, candidates, references = row.metric, row.launches, row.others
        both = [*candidates, *references]
        if found := row.under_profiler(both):
            return found
        if detail := other_steps(candidates, references[-1], is_ab=True):
            return self._judge_equal_steps(row, detail)
        if found := row.unprofiled(candidates, references) or row.unprofiled(references, candidates):
            return found
        late = row.late_hosts(both) if len(both) >= 2 * self.max_pairs else ""
        pairs = [pair for pair in zip(candidates, references, strict=True) if len(profiled(metric, pair)) == 2]
        measured, others = zip(*pairs, strict=True) if pairs else ((), ())
        return self._judge_measured(replace(row, launches=measured, others=others, late=late))

    def _decide(self, row: Row) -> tuple[Decision, Value] | None:
        metric = row.metric
        sides = (transformed_values(metric, side, row.others) for side in (row.launches, row.others))
        pairs = [(here, there) for here, there in zip(*sides, strict=True) if here is not None and there is not None]
        if len(pairs) < len(row.launches):
            return None
        prior = self.variance(metric) or default_variance(metric, row.launches[0].device)
        allowed, most = row.tolerance.value or 0.0, self.max_pairs
        decision = decide_pairs(pairs, prior.within, allowed, max_pairs=most, worse=metric.worse, scale=metric.scale)
        return decision, middle(metric, row.others)
