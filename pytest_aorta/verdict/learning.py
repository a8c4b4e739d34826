"""How a baseline is learned: what is appended, what starts a new epoch, and what is refused. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from pytest_aorta.common.errors import BaselineError
from pytest_aorta.common.text import counted
from pytest_aorta.result.facts import LaunchFacts, growth
from pytest_aorta.verdict.applicability import not_applicable, other_environment, widened
from pytest_aorta.verdict.baseline import MAX_LAUNCHES, Baseline, StoredLaunch
from pytest_aorta.verdict.comparison import MIN_LAUNCHES, Priors, StoredComparison, choose_tolerances
from pytest_aorta.verdict.explain import MEMORY_GROWTH, STEP_GROWTH
from pytest_aorta.verdict.metrics import METRICS, Direction, MetricKind, Origin, Tolerance
from pytest_aorta.verdict.priors import blocks, transformed_values
from pytest_aorta.verdict.statistics.decision import LOOKS, MIN_LAUNCHES_TO_FAIL, RESOLVED_BY, Outcome, detectable
from pytest_aorta.verdict.statistics.scale import Scale
from pytest_aorta.verdict.statistics.variance import observed
from pytest_aorta.verdict.verdicts import format_change

CENTER_LAUNCHES = 10
# Of the launches' standard deviation, told robustly.
_OUTLIER = 6.0


def launches_to_learn(marked: Mapping[str, Tolerance], facts: LaunchFacts, wanted: int) -> int:
    """``wanted`` where any compared metric has noise, else one: what is exact needs no second launch."""
    for name, tolerance in choose_tolerances(marked, facts).items():
        metric = METRICS[name]
        if metric.direction is Direction.EXACT or tolerance.value is None:
            continue
        if not_applicable(metric, tolerance, facts, facts) is None:
            return wanted
    return 1


def merged(
    old: Baseline | None, new: Baseline, marked: Mapping[str, Tolerance], priors: Priors, fresh: bool
) -> Baseline:
    """The baseline to store: ``new``'s launches appended to ``old``'s, or in a new epoch that keeps the old launches.

    ``fresh`` asks for a new epoch. A baseline of another config can't be appended to, and gets one too.

    Raises:
        BaselineError: what was measured differs from the stored baseline, so that appending would blur it.
    """
    if old is None:
        return new
    if fresh or old.config != new.config:
        past = [replace(stored, center=False) for stored in old.launches]
        present = [replace(stored, revision=old.revision + 1) for stored in new.launches]
        forced = old.forced | {str(old.revision + 1): reason for reason in new.forced.values()}
        return _fitted(replace(new, launches=(*past, *present), forced=forced))
    facts = [stored.facts for stored in new.launches]
    if found := _other_setting(old.center_launches[-1], facts) or _differences(old, new, marked, priors):
        lines = [
            f"{new.case}: not added to the stored baseline, from which it differs:",
            *(f"  {row}" for row in found),
        ]
        remedy = "  if that is intended, replace the baseline: --update-baselines --aorta-reset-baselines"
        raise BaselineError("\n".join([*lines, remedy]))
    room = max(0, CENTER_LAUNCHES - len(old.center_launches))
    added = [StoredLaunch(launch, old.revision, number < room) for number, launch in enumerate(facts)]
    forced = old.forced | {str(old.revision): reason for reason in new.forced.values()}
    return _fitted(replace(old, launches=(*old.launches, *added), forced=forced))


def _other_setting(recorded: LaunchFacts, launches: Sequence[LaunchFacts]) -> list[str]:
    """What else than the code makes another time or another number, whichever metrics are compared."""
    for launch in launches:
        if launch.launcher != recorded.launcher:
            return [f"launcher is {launch.launcher!r}, the baseline's {recorded.launcher!r}"]
        if difference := other_environment(launch, recorded):
            return [difference]
    return []


def _differences(old: Baseline, new: Baseline, marked: Mapping[str, Tolerance], priors: Priors) -> list[str]:
    facts = [stored.facts for stored in new.launches]
    comparison = StoredComparison(new.case, new.config, old, marked, priors, max_launches=len(facts))
    fine = {Outcome.PASS, Outcome.INCONCLUSIVE}
    tolerances = choose_tolerances(marked, facts[0], old.center_launches[-1])
    return [
        str(row)
        for row in comparison.judge(facts).rows
        # What can't be compared even with itself is no difference.
        if row.outcome not in fine
        and not not_applicable(METRICS[row.metric], tolerances[row.metric], facts[0], facts[0])
    ]


def _fitted(baseline: Baseline) -> Baseline:
    """Without the oldest launches that are no anchor, where there are too many."""
    surplus = len(baseline.launches) - MAX_LAUNCHES
    kept = list(baseline.launches)
    for stored in baseline.launches:
        if surplus > 0 and not stored.center:
            kept.remove(stored)
            surplus -= 1
    revisions = {str(stored.revision) for stored in kept}
    # Reasons belong to epochs that are there.
    forced = {revision: reason for revision, reason in baseline.forced.items() if revision in revisions}
    return replace(baseline, launches=tuple(kept), forced=forced)


def objections(launches: Sequence[LaunchFacts], marked: Mapping[str, Tolerance]) -> list[str]:
    """Why launches make a bad baseline: spread over what the tolerance can bear, outliers, growth, throttling."""
    found, times_count = [], False
    for name, given in choose_tolerances(marked, launches[0]).items():
        metric, tolerance = METRICS[name], widened(METRICS[name], launches[0], given)
        if tolerance.value is None or not_applicable(metric, given, launches[0], launches[0]):
            continue
        times_count = times_count or metric.kind is MetricKind.TIMING
        values = [value for value in transformed_values(metric, launches, launches) if value is not None]
        # A tolerance of the table's own is widened to what the launches can bear.
        if len(values) >= MIN_LAUNCHES and name in marked:
            found += [f"{name}: {problem}" for problem in _noise_problems(values, tolerance.value, metric.scale)]
    hot = [f"launch {number}: {launch.throttled}" for number, launch in enumerate(launches, 1) if launch.throttled]
    return found + _growing(launches) + (hot if times_count else [])


def _noise_problems(values: Sequence[float], tolerance: float, scale: Scale) -> list[str]:
    allowed, center = scale.difference(tolerance), median(values)
    deviation = math.sqrt(observed([[list(values)]]).within.value)
    found = []
    if deviation * RESOLVED_BY > allowed:
        changes = (scale.change(deviation), tolerance, scale.change(RESOLVED_BY * deviation))
        deviation_text, allowed_text, needed = (format_change(change, scale).lstrip("+") for change in changes)
        found.append(
            f"launches vary by {deviation_text} (standard deviation), too much for a tolerance of {allowed_text}; "
            f"measure more steps, or allow {needed}"
        )
    for number, value in enumerate(values, 1):
        if abs(value - center) > max(_OUTLIER * deviation, allowed):
            off = format_change(scale.change(value - center), scale)
            found.append(f"launch {number} is an outlier, {off} off the median")
    # Of shares and parts, which may be 0, growth is that of 1 beside them.
    drift = growth([math.exp(value) for value in values])
    if abs(drift) > tolerance / 2:
        found.append(f"it drifts from launch to launch, by {format_change(drift, scale)} in all")
    return found


def _growing(launches: Sequence[LaunchFacts]) -> list[str]:
    device = launches[0].device
    steps = median(launch.step_time_growth for launch in launches)
    memory = median(launch.memory_growth for launch in launches)
    found = []
    if abs(steps) > STEP_GROWTH[device]:
        found.append(f"step times change within a launch, by {format_change(steps)} or more; warm up for longer")
    if memory > MEMORY_GROWTH:
        found.append(f"memory grows within a launch, by {format_change(memory)} or more")
    return found


def detection_lines(
    baseline: Baseline, marked: Mapping[str, Tolerance], priors: Priors, max_launches: int
) -> list[str]:
    """From which slowdown on a baseline fails a test, a line for each metric that has noise."""
    looks = [look for look in LOOKS if MIN_LAUNCHES_TO_FAIL <= look <= max_launches]
    if not looks:
        return [f"  fewer than {MIN_LAUNCHES_TO_FAIL} launches never fail a test for a metric that has noise"]
    comparison = StoredComparison(baseline.case, baseline.config, baseline, marked, priors, max_launches)
    center_launches, lines = baseline.center_launches, []
    if len(center_launches) < MIN_LAUNCHES:
        return [
            f"  {counted(len(center_launches), 'launch')} in the center: detectable changes are reported from "
            f"{MIN_LAUNCHES} on"
        ]
    for name, given in choose_tolerances(marked, center_launches[-1]).items():
        metric = METRICS[name]
        if given.value is None or not_applicable(metric, given, center_launches[-1], center_launches[-1]):
            continue
        if None in transformed_values(metric, center_launches, center_launches):
            continue
        stored = comparison.estimate(metric)
        allowed = comparison.allowed(metric, widened(metric, center_launches[-1], given), stored)
        # CPU ranks' timing is compared within a sitting only.
        block = blocks(center_launches)[-1] if center_launches[-1].device == "cpu" else "another"
        least = [
            detectable(
                stored,
                block,
                look,
                tolerance=allowed.value or 0.0,
                max_launches=max_launches,
                relative=metric.scale is Scale.RELATIVE,
            )
            for look in looks
        ]
        scale = metric.scale
        parts = [
            f"{format_change(scale.change(metric.worse * scale.difference(change)), scale)} with {look}"
            for look, change in zip(looks, least, strict=True)
        ]
        wide = "" if allowed.origin is not Origin.WIDENED else f"; the tolerance is widened to {allowed}"
        lines.append(f"  {name}: detects from {', '.join(parts)} launches{wide}")
    return lines
