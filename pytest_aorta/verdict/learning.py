"""Recording of baselines: launches that are appended, start a new revision, or are refused."""

import math
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from statistics import median

from pytest_aorta.common.errors import BaselineError
from pytest_aorta.common.model import Model
from pytest_aorta.plan.options import Options
from pytest_aorta.result.facts import Launches, LaunchFacts, growth
from pytest_aorta.result.series import BUFFERS, first_other_weights
from pytest_aorta.verdict.applicability import applicable, is_not_profiled_again, not_profiled, profiled
from pytest_aorta.verdict.baseline import MAX_LAUNCHES, Baseline, StoredLaunch
from pytest_aorta.verdict.causes import MEMORY_GROWTH, STEP_GROWTH, launch_notes
from pytest_aorta.verdict.comparison import StoredComparison
from pytest_aorta.verdict.environment import other_setting, other_setup, other_steps
from pytest_aorta.verdict.metrics import Metric, MetricKind, Tolerances, metric_of
from pytest_aorta.verdict.noise import transformed_values, wider_or_paired
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


def needs_another(baseline: Baseline, marked: Tolerances, options: Options) -> bool:
    """Return whether a baseline that is being recorded needs one more launch, of at most ``--aorta-launches``.

    A metric with noise needs launches until it is settled (:meth:`StoredRule.is_settled`), three at least. Costs need a
    second launch, which shows the parts that depend on the data. Other exact metrics need one.
    """
    launches, most = baseline.center_launches, options.launches
    asked = applicable(marked, launches[0])
    inexact = [(metric_of(name, one.direction), one.value) for name, one in asked.items() if one.value]
    noisy = [(metric, allowed) for metric, allowed in inexact if metric.has_noise]
    least = MIN_LAUNCHES_TO_FAIL if noisy else 2 if any(metric_of(name).cost is not None for name in asked) else 1
    if len(launches) < min(least, most) or not noisy:
        return len(launches) < min(least, most)
    return len(launches) < most and not all(
        _is_settled_by(baseline, metric, allowed, options) for metric, allowed in noisy
    )


def _is_settled_by(baseline: Baseline, metric: Metric, allowed: float, options: Options) -> bool:
    """Return whether the launches of a baseline settle a metric; one without a value on its scale takes five."""
    case, config, launches = baseline.case, baseline.config, baseline.center_launches
    rule = StoredComparison(case, config, baseline, {}, options.max_launches).rule(metric, allowed)
    if rule is None or len(profiled(metric, launches)) < len(launches):
        return len(launches) >= MIN_LAUNCHES
    return rule.is_settled(options.launches)


def refusal_of_left_out(baseline: Baseline, marked: Tolerances) -> str:
    """Return why a baseline can't hold what markers name, with the remedies; empty if it holds all.

    The next comparison would fail for such a metric, although nothing has changed.
    """
    return "\n".join(
        f"  {name}: {why}\n  next: take {name} out of the marker; or give --aorta-record=replace,noisy:REASON"
        for name, why in baseline.left_out.items()
        if name in marked and not marked[name].is_exact
    )


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


def are_undecided(old: Baseline, new: Baseline, marked: Tolerances) -> bool:
    """Return whether launches are not shown to equal those of a stored baseline, and more could show it."""
    if other_setup(old, new.workload, new.config, [*new.center_launches]):
        return False
    rows = _differences(old, new, marked)
    return bool(rows) and not any(map(_is_settled, rows))


def with_every_step(new: Baseline, hashed: LaunchFacts, marked: Collection[str]) -> Baseline:
    """Return a baseline whose first launch has the hashes of a launch that hashed every step."""
    first, *others = new.launches
    if len(first.facts.series) != len(hashed.series):
        return new
    series = [one.with_every_step(same) for one, same in zip(first.facts.series, hashed.series, strict=True)]
    return new.replace(
        launches=(first.replace(facts=first.facts.replace(series=series)), *others),
        left_out=_varying_buffers([hashed, first.facts], marked) | new.left_out,
    )


def merged(old: Baseline | None, new: Baseline, marked: Tolerances, fresh: bool) -> Baseline:
    """Return the baseline to store: the launches of ``new`` appended to those of ``old``, or in a new revision.

    A new revision keeps the old launches for the variance. It starts if ``fresh`` is set, or if the workload, the
    config or a choice of setup() changed. Appended launches never count for the center.

    Raises:
        BaselineError: The new launches are not shown to equal the center, so appending them could hide a change.
    """
    if old is None:
        return new
    facts = [stored.facts for stored in new.launches]
    if fresh or other_setup(old, new.workload, new.config, facts):
        past = [stored.replace(center=False) for stored in old.launches]
        present = [stored.replace(revision=old.revision + 1) for stored in new.launches]
        forced = old.forced | {str(old.revision + 1): reason for reason in new.forced.values()}
        return _fitted(new.replace(launches=(*past, *present), forced=forced))
    recorded = old.center_launches[-1]
    if different := other_setting(recorded, facts) or other_steps(facts, recorded):
        raise BaselineError(_refusal(new.case, [different], can_settle=False))
    if rows := _differences(old, new, marked):
        can_settle = len(facts) < _MANY and not any(map(_is_settled, rows))
        raise BaselineError(_refusal(new.case, rows, can_settle=can_settle))
    added = [StoredLaunch(launch, old.revision, center=False) for launch in facts]
    forced = old.forced | {str(old.revision): reason for reason in new.forced.values()}
    return _fitted(old.replace(launches=(*old.launches, *added), forced=forced))


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


def _differences(old: Baseline, new: Baseline, marked: Tolerances) -> list[Verdict]:
    facts = [stored.facts for stored in new.launches]
    comparison = StoredComparison(new.case, new.config, old, marked, max_launches=len(facts))
    # A metric that can't be compared even with itself is not a difference.
    compared = applicable(marked, facts[0], old.center_launches[-1]).keys() - old.left_out.keys()
    rows = comparison.judge(facts).rows
    rows = tuple(row for row in rows if row.not_applicable is not Reason.UNMARKED_CPU_TIMES)
    return [row for row in rows if row.metric in compared and not _is_unchanged(row)]


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


def left_out(launches: Launches, marked: Tolerances) -> dict[str, str]:
    """Return the metrics that launches are too noisy for -> why: noise, a late host, outliers, growth or throttling."""
    return _varying_buffers(launches, marked) | {
        name: "; ".join(problems)
        for name, tolerance in applicable(marked, launches[0]).items()
        if tolerance.value is not None
        and (metric := metric_of(name, tolerance.direction)).has_noise
        and (problems := _problems(metric, tolerance.value, launches))
    }


def _varying_buffers(launches: Iterable[LaunchFacts], marked: Collection[str]) -> dict[str, str]:
    """Return that ``buffer_hash`` can't be compared, as buffers that are never given a value, -> why; or empty.

    Weights can still be compared.
    """
    pairs = () if _BUFFER_HASH in marked else pairwise(launches)
    varying = (first_other_weights(one.series, other.series, BUFFERS) for one, other in pairs)
    where = next(filter(None, varying), "")
    return {_BUFFER_HASH: f"in two launches {where}"} if where else {}


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
        steps = median(launch.description.step_time_growth for launch in launches)
        if abs(steps) > STEP_GROWTH[launches[0].device]:
            found.append(f"step times change within a launch by {format_change(steps)} or more; use more warmup steps")
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


def detection_lines(baseline: Baseline, marked: Tolerances, max_launches: int) -> list[str]:
    """Return lines on metrics that are left out, on what the others detect, and on what they leave undecided."""
    center = baseline.center_launches
    lines = [f"  {name}: left out: {why}; compare it with --aorta-ab=REF" for name, why in baseline.left_out.items()]
    looks = [look for look in LOOKS if MIN_LAUNCHES_TO_FAIL <= look <= max_launches]
    if not looks:
        return [*lines, f"  fewer than {MIN_LAUNCHES_TO_FAIL} launches never fail a test for a metric with noise"]
    comparison = StoredComparison(baseline.case, baseline.config, baseline, marked, max_launches)
    for name, tolerance in applicable(marked, center[-1]).items():
        metric = metric_of(name, tolerance.direction)
        rule = comparison.rule(metric, tolerance.value) if metric.has_noise else None
        if tolerance.value is None or rule is None or name in baseline.left_out:
            continue
        if problem := comparison.undecidable(metric, tolerance):
            lines.append(f"  {name}: unchanged code may be inconclusive: {problem}")
        if len(center) >= MIN_LAUNCHES_TO_FAIL:
            parts = [f"{_detected(rule, look)} with {look}" for look in looks]
            lines.append(f"  {name}: detects from {', '.join(parts)} launches")
    return lines


def _detected(rule: StoredRule, num_launches: int) -> str:
    """Return the smallest change that a number of launches detects, as text."""
    scale, worse = rule.scale, rule.worse
    return format_change(scale.change(worse * scale.difference(rule.detectable(num_launches))), scale)
