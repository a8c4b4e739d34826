"""Recording of baselines: launches that are appended, start a new revision, or are refused."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import median

from pytest_aorta.common.errors import BaselineError
from pytest_aorta.common.model import Model
from pytest_aorta.plan.options import Options
from pytest_aorta.result.facts import Launches, LaunchFacts, growth
from pytest_aorta.result.series import BUFFERS, first_other_weights
from pytest_aorta.verdict.applicability import applicable, is_not_profiled_again, not_profiled, profiled
from pytest_aorta.verdict.baseline import MAX_LAUNCHES, Baseline, StoredLaunch
from pytest_aorta.verdict.causes import MEMORY_GROWTH, launch_notes, step_growth
from pytest_aorta.verdict.comparison import StoredComparison
from pytest_aorta.verdict.environment import other_setting, other_setup, other_steps
from pytest_aorta.verdict.metrics import Metric, MetricKind, Tolerance
from pytest_aorta.verdict.noise import transformed_values, unresolved, wider_or_paired
from pytest_aorta.verdict.statistics.decision import (
    LOOKS,
    MIN_LAUNCHES,
    MIN_LAUNCHES_TO_FAIL,
    RESOLVED_BY,
    Outcome,
    StoredRule,
)
from pytest_aorta.verdict.statistics.variance import observed
from pytest_aorta.verdict.verdicts import Reason, Verdict, format_change

# An outlier is this many robust standard deviations away from the median.
_OUTLIER = 6.0
# Fewer launches show no drift: a few may rise one after another by chance.
_LAUNCHES_THAT_DRIFT = 10
_BUFFER_HASH = "buffer_hash"
# Launches that a refusal advises to add at once.
_MANY = 10


# Outcomes of a comparison with the stored baseline after which further launches are not asked to show the contrary.
_SETTLED = (Outcome.NOT_APPLICABLE, Outcome.REGRESSION, Outcome.IMPROVED)


class NewBaseline(Model, frozen=True):
    """A baseline to store if its test passes.

    Attributes:
        baseline: The launches of the test, merged with those that were stored.
        before: Digest of the stored baseline that they were merged with.
        detection: Lines on the changes that the baseline detects.
    """

    baseline: Baseline
    before: str
    detection: tuple[str, ...] = ()


@dataclass(frozen=True)
class BaselineRecording:
    """The recording of launches as a baseline. The first launch decides once which metrics it is for.

    Attributes:
        stored: The comparison with the stored baseline.
        first: The first launch.
        options: How many launches are recorded, and whether they replace the stored baseline.
    """

    stored: StoredComparison
    first: LaunchFacts
    options: Options

    @cached_property
    def compared(self) -> dict[Metric, Tolerance]:
        """The metrics that can be compared with the new baseline, with their tolerances."""
        return applicable(self.stored.marked, self.first)

    @cached_property
    def noisy(self) -> dict[Metric, Tolerance]:
        """Those that have noise, and need not be equal bit for bit."""
        return {metric: found for metric, found in self.compared.items() if metric.has_noise and not found.is_exact}

    def needs_another(self, new: Baseline) -> bool:
        """Return whether a baseline that is being recorded needs one more launch, of at most ``--aorta-launches``.

        A metric with noise needs launches until it is settled (:meth:`StoredRule.is_settled`), three at least. Costs
        need a second launch, which shows the parts that depend on the data. Other exact metrics need one. Launches that
        are not shown to equal those of the stored baseline need others, if these could show it.
        """
        count, most = len(new.center_launches), self.options.launches
        least = MIN_LAUNCHES_TO_FAIL if self.noisy else 2 if any(metric.cost for metric in self.compared) else 1
        if count < least or count >= most:
            return count < most
        if not all(self._settles(new, metric) for metric in self.noisy):
            return True
        old = self.stored.baseline
        if old is None or self._replaces(old, new):
            return False
        rows = self._differences(old, new)
        return bool(rows) and not any(map(_is_settled, rows))

    def _settles(self, new: Baseline, metric: Metric) -> bool:
        """Return whether the launches of a baseline settle a metric; one without a value on its scale takes five."""
        rule, launches = replace(self.stored, baseline=new).rule(metric, self.noisy[metric].value), new.center_launches
        if rule is None or len(profiled(metric, launches)) < len(launches):
            return len(launches) >= MIN_LAUNCHES
        return rule.is_settled(self.options.launches)

    def left_out(self, launches: Launches) -> dict[str, str]:
        """Return the metrics that launches are too noisy for -> why: noise, a late host, outliers, growth, throttling.

        Buffers are among them if they vary, as those that are never given a value; weights can still be compared.
        """
        return self._varying_buffers(launches) | {
            metric.name: "; ".join(problems)
            for metric, tolerance in self.noisy.items()
            if (problems := _problems(metric, tolerance.value or 0.0, launches))
        }

    def _varying_buffers(self, launches: Iterable[LaunchFacts]) -> dict[str, str]:
        pairs = () if _BUFFER_HASH in self.stored.marked else pairwise(launches)
        varying = (first_other_weights(one.series, other.series, BUFFERS) for one, other in pairs)
        where = next(filter(None, varying), "")
        return {_BUFFER_HASH: f"in two launches {where}"} if where else {}

    def with_every_step(self, new: Baseline, hashed: LaunchFacts) -> Baseline:
        """Return a baseline whose first launch has the hashes of a launch that hashed every step."""
        first, *others = new.launches
        if len(first.facts.series) != len(hashed.series):
            return new
        series = [one.with_every_step(same) for one, same in zip(first.facts.series, hashed.series, strict=True)]
        return new.replace(
            launches=(first.replace(facts=first.facts.replace(series=series)), *others),
            left_out=self._varying_buffers([hashed, first.facts]) | new.left_out,
        )

    def learned(self, new: Baseline, before: str) -> NewBaseline:
        """Return the baseline to store: the launches of ``new`` appended to the stored ones, or in a new revision.

        A new revision keeps the old launches for the variance. It starts if the options ask for it, or if the workload,
        the config or a choice of setup() changed. Appended launches never count for the center. ``before`` is the
        digest of the stored baseline.

        Raises:
            BaselineError: The new launches are not shown to equal the center, so appending them could hide a change; or
                they are too noisy for a metric that a marker names, for which the next comparison would then fail.
        """
        old, marked = self.stored.baseline, self.stored.marked
        baseline = (new if old is None else self._merged(old, new)).condensed()
        refused = [
            f"  {name}: {why}\n  next: take {name} out of the marker; or give --aorta-record=replace,noisy:REASON"
            for name, why in baseline.left_out.items()
            if name in marked and not marked[name].is_exact
        ]
        if refused:
            reason = "not recorded, because the launches can't hold what a marker names:"
            raise BaselineError("\n".join([f"{new.case}: {reason}", *refused]))
        return NewBaseline(baseline, before, tuple(self._detection_lines(baseline)))

    def _merged(self, old: Baseline, new: Baseline) -> Baseline:
        facts, recorded, is_fresh = new.center_launches, old.center_launches[-1], self._replaces(old, new)
        revision = old.revision + is_fresh
        forced = old.forced | {str(revision): reason for reason in new.forced.values()}
        added = [StoredLaunch(launch, revision, center=is_fresh) for launch in facts]
        if is_fresh:
            past = [stored.replace(center=False) for stored in old.launches]
            return _fitted(new.replace(launches=(*past, *added), forced=forced))
        if different := other_setting(recorded, facts) or other_steps(facts, recorded):
            raise BaselineError(_refusal(new.case, [different], can_settle=False))
        if rows := self._differences(old, new):
            can_settle = len(facts) < _MANY and not any(map(_is_settled, rows))
            raise BaselineError(_refusal(new.case, rows, can_settle=can_settle))
        return _fitted(old.replace(launches=(*old.launches, *added), forced=forced))

    def _replaces(self, old: Baseline, new: Baseline) -> bool:
        """Return whether the launches start a new revision."""
        is_other = other_setup(old, new.workload, new.config, new.center_launches)
        return self.options.record.replaces or bool(is_other)

    def _differences(self, old: Baseline, new: Baseline) -> list[Verdict]:
        """Return the verdicts that do not show that the launches equal those of the stored baseline."""
        launches = new.center_launches
        verdicts = replace(self.stored, max_launches=len(launches)).judge(launches)
        # A metric that can't be compared even with itself is not a difference.
        known = {metric.name for metric in applicable(self.stored.marked, launches[0], old.center_launches[-1])}
        rows = [row for row in verdicts.rows if row.metric in known and row.metric not in old.left_out]
        return [row for row in rows if row.not_applicable is not Reason.UNMARKED_CPU_TIMES and not _is_unchanged(row)]

    def _detection_lines(self, baseline: Baseline) -> Iterator[str]:
        """Yield lines on metrics that are left out, on what the others detect, and on what they leave undecided."""
        for name, why in baseline.left_out.items():
            yield f"  {name}: left out: {why}; compare it with --aorta-ab=REF"
        comparison, count = replace(self.stored, baseline=baseline), len(baseline.center_launches)
        looks = [look for look in LOOKS if MIN_LAUNCHES_TO_FAIL <= look <= comparison.max_launches]
        if not looks:
            yield f"  fewer than {MIN_LAUNCHES_TO_FAIL} launches never fail a test for a metric with noise"
            return
        for metric, tolerance in self.noisy.items():
            rule = comparison.rule(metric, tolerance.value)
            if rule is None or metric.name in baseline.left_out:
                continue
            if problem := unresolved(rule, tolerance):
                yield f"  {metric.name}: unchanged code may be inconclusive: {problem}"
            if count >= MIN_LAUNCHES_TO_FAIL:
                parts = [f"{_detected(rule, look)} with {look}" for look in looks]
                yield f"  {metric.name}: detects from {', '.join(parts)} launches"


def _refusal(case: str, found: Sequence[object], *, can_settle: bool) -> str:
    """Return why launches are not added; ``can_settle`` is True if more launches could show that nothing changed."""
    more = f"  next: if the code is unchanged, add more launches at once (--aorta-launches={_MANY})"
    lines = [
        f"{case}: not added to the stored baseline, because it is not shown to be unchanged:",
        *(f"  {row}" for row in found),
        *([more] if can_settle else []),
        "  next: if the change is intended, replace the baseline with --update-baselines --aorta-record=replace",
    ]
    return "\n".join(lines)


def _is_settled(row: Verdict) -> bool:
    """Return True if no further launch can show that the metric is unchanged."""
    return not row.definition.has_noise or row.outcome in _SETTLED


def _is_unchanged(row: Verdict) -> bool:
    """Return True if a verdict shows no change. A single launch is never called improved, so the change is checked."""
    if row.outcome is not Outcome.PASS or row.tolerance.value is None:
        return row.outcome is Outcome.PASS
    if row.delta is None:  # the ranges of the values were compared
        return True
    return abs(row.tolerance.scale.difference(row.delta)) <= row.tolerance.scale.difference(row.tolerance.value)


def _fitted(baseline: Baseline) -> Baseline:
    """Drop the oldest launches outside the center from a baseline with more than ``MAX_LAUNCHES`` launches."""
    surplus = max(0, len(baseline.launches) - MAX_LAUNCHES)
    dropped = [number for number, stored in enumerate(baseline.launches) if not stored.center][:surplus]
    kept = tuple(stored for number, stored in enumerate(baseline.launches) if number not in dropped)
    # A reason is kept as long as its revision has a launch.
    revisions = {str(stored.revision) for stored in kept}
    forced = {revision: reason for revision, reason in baseline.forced.items() if revision in revisions}
    return baseline.replace(launches=kept, forced=forced)


def _problems(metric: Metric, tolerance: float, launches: Launches) -> list[str]:
    """Return why launches make a bad baseline of a metric with a tolerance."""
    # A host that was late in this launch may not be late in another.
    found = [
        f"launch {number} has no value: {detail}"
        for number, launch in enumerate(launches, 1)
        if (detail := not_profiled(metric, launch)) and not is_not_profiled_again(launch)
    ]
    values = [value for value in transformed_values(metric, launches, launches) if value is not None]
    if len(values) >= MIN_LAUNCHES:
        found += _noise_problems(metric, values, tolerance)
    if metric.kind is MetricKind.TIMING:
        found += [f"{text}; use more warmup steps" for text in step_growth(launches)]
        found += launch_notes([launch.description.throttled for launch in launches])
    memory = median(max(launch.growth_of("memory"), default=0.0) for launch in launches)
    if metric.kind is MetricKind.MEMORY and memory > MEMORY_GROWTH:
        found.append(f"memory grows within a launch by {format_change(memory)} or more")
    return found


def _noise_problems(metric: Metric, values: Sequence[float], tolerance: float) -> list[str]:
    """Return why values are too noisy for ``tolerance``."""
    scale, center = metric.scale, median(values)
    allowed = scale.difference(tolerance)
    deviation = math.sqrt(observed([[list(values)]]).within.value)
    found = []
    if deviation * RESOLVED_BY > allowed:
        shown = format_change(scale.change(deviation), scale).lstrip("+")
        advice = wider_or_paired(scale.change(RESOLVED_BY * deviation), scale)
        found.append(
            f"standard deviation of launches is {shown}, too large for a tolerance of {scale.text(tolerance)}; "
            f"measure more steps, {advice}"
        )
    for number, value in enumerate(values, 1):
        if abs(value - center) > max(_OUTLIER * deviation, allowed):
            off = format_change(scale.change(value - center), scale)
            found.append(f"launch {number} is an outlier, {off} from the median")
    # Values on linear scales may be 0, so their growth is computed from exponentials, as for logs.
    drift = growth([math.exp(value) for value in values])
    if len(values) >= _LAUNCHES_THAT_DRIFT and abs(drift) > tolerance / 2:
        found.append(f"drifts over the launches by {format_change(drift, scale)} in total")
    return found


def _detected(rule: StoredRule, num_launches: int) -> str:
    """Return the smallest change that a number of launches detects, as text."""
    scale, worse = rule.scale, rule.worse
    return format_change(scale.change(worse * scale.difference(rule.detectable(num_launches))), scale)
