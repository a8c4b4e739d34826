"""Compares one launch's facts with its baseline, metric by metric."""

from __future__ import annotations

import calendar
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pytest_aorta.baseline import Baseline
from pytest_aorta.decision import Outcome, decide
from pytest_aorta.errors import SpecError
from pytest_aorta.facts import RECORDED_AT_FORMAT, LaunchFacts
from pytest_aorta.metrics import EXACT, METRICS, Metric, Tolerance, Value, format_value

# Timing on shared CPUs means something only next to a baseline of the same machine and hour.
CPU_SITTING_S = 3600.0
# Between launches on shared CPUs step times vary by tens of percent: less than a doubling is noise.
CPU_TIMING_TOLERANCE = 1.0
# The config key of test-only hooks: what is planted there has to show against the undisturbed baseline.
TEST_HOOK_KEY = "fault"


@dataclass(frozen=True)
class Verdict:
    """One metric's outcome; ``delta`` is relative to the baseline, positive where the value is larger."""

    case: str
    metric: str
    outcome: Outcome
    value: Value
    baseline: Value
    delta: float | None
    tolerance: str
    reason: str = ""

    @property
    def is_lost(self) -> bool:
        """Whether the launch lacks what there is to compare."""
        return self.outcome is Outcome.MISSING and self.value is None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, to travel between xdist's processes."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Verdict:
        """The inverse of :meth:`to_json`."""
        return replace(cls(**data), outcome=Outcome(data["outcome"]))

    def cells(self) -> tuple[str, str, str, str, str, str]:
        """Metric, value, baseline, delta, tolerance, outcome: a row of the summary."""
        unit = METRICS[self.metric].unit
        delta = "-" if self.delta is None else f"{self.delta:+.1%}"
        exact = self.tolerance == str(EXACT)
        value, baseline = (format_value(shown, unit, exact=exact) for shown in (self.value, self.baseline))
        return self.metric, value, baseline, delta, self.tolerance, self.outcome.value

    def __str__(self) -> str:
        """One line for a failure's text."""
        metric, value, baseline, delta, tolerance, outcome = self.cells()
        text = f"{metric}: {outcome}: {value}, baseline {baseline}, change {delta}, tolerance {tolerance}"
        return f"{text} ({self.reason})" if self.reason else text


@dataclass(frozen=True)
class Verdicts:
    """All verdicts of one comparison."""

    case: str
    rows: tuple[Verdict, ...]

    def __getitem__(self, metric: str) -> Verdict:
        """The verdict of one metric."""
        rows = {row.metric: row for row in self.rows}
        if metric not in rows:
            raise KeyError(f"{metric} was not compared; there are {sorted(rows)}")
        return rows[metric]

    def failing(self, *, strict: bool, missing_fails: bool) -> list[Verdict]:
        """The verdicts that fail the test."""
        red = {Outcome.REGRESSION}
        red |= {Outcome.MISSING} if missing_fails else set()
        red |= {Outcome.NOT_APPLICABLE, Outcome.INCONCLUSIVE, Outcome.MISSING} if strict else set()
        # What the launch itself lost is no missing baseline.
        return [row for row in self.rows if row.outcome in red or row.is_lost]


def identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a config that a baseline belongs to: all but the test-only hook."""
    return {key: value for key, value in config.items() if key != TEST_HOOK_KEY}


def choose_tolerances(marked: Mapping[str, Tolerance], facts: LaunchFacts) -> dict[str, Tolerance]:
    """The metrics to compare: those a marker names, and the table's defaults that the launch has.

    Raises:
        SpecError: a marker names a metric that means nothing with so few steps.
    """
    chosen = dict(marked)
    for name in marked:
        if facts.num_steps < METRICS[name].min_steps:
            raise SpecError(
                f"tolerance of {name}: {facts.num_steps} steps were measured and it takes at least "
                f"{METRICS[name].min_steps}; measure more steps, or use step_time_tail5"
            )
    for name, metric in METRICS.items():
        has_it = metric.measure(facts) is not None and facts.num_steps >= metric.min_steps
        if name not in chosen and metric.default is not None and has_it:
            chosen[name] = metric.default
    return chosen


def compare_with_baseline(
    case: str,
    facts: LaunchFacts,
    config: dict[str, Any],
    baseline: Baseline | None,
    marked: Mapping[str, Tolerance],
) -> Verdicts:
    """One verdict a metric; a metric that the baseline has and the launch lost is *missing*, as is the reverse."""
    tolerances = choose_tolerances(marked, facts)
    if baseline is not None:
        had = {name for name, metric in METRICS.items() if metric.default and metric.measure(baseline.launches[-1])}
        few = {name for name in had if facts.num_steps < METRICS[name].min_steps}
        tolerances |= {name: METRICS[name].default for name in had - few - set(tolerances)}  # type: ignore[misc]
    rows = tuple(
        _compare_one(case, METRICS[name], facts, config, baseline, tolerances[name])
        for name in METRICS
        if name in tolerances
    )
    return Verdicts(case, rows)


def compare_launches(
    case: str,
    candidate: LaunchFacts,
    reference: LaunchFacts,
    marked: Mapping[str, Tolerance],
    only: Collection[str] | None = None,
) -> Verdicts:
    """The A/B inside one run: ``reference`` takes the baseline's place, with the same sitting and environment.

    ``only`` limits it to some metrics, at exactness where neither marker nor table has a tolerance.

    Raises:
        SpecError: ``only`` names a metric that there is not.
    """
    # Either side's metrics count: what one of them lacks is missing, not left out.
    tolerances = choose_tolerances({}, reference) | choose_tolerances(marked, candidate)
    if only is not None:
        if unknown := sorted(set(only) - set(METRICS)):
            raise SpecError(f"compare: no such metrics {unknown}; there are {sorted(METRICS)}")
        tolerances = {name: tolerances.get(name, EXACT) for name in only}
    rows = []
    for name, tolerance in tolerances.items():
        value, other = METRICS[name].measure(candidate), METRICS[name].measure(reference)
        tolerance = widened(METRICS[name], candidate, tolerance)
        blank = Verdict(case, name, Outcome.MISSING, value, other, None, str(tolerance))
        rows.append(_judge(blank, METRICS[name], candidate, [reference], tolerance))
    return Verdicts(case, tuple(rows))


def _compare_one(
    case: str,
    metric: Metric,
    facts: LaunchFacts,
    config: dict[str, Any],
    baseline: Baseline | None,
    tolerance: Tolerance,
) -> Verdict:
    value = metric.measure(facts)
    tolerance = widened(metric, facts, tolerance)
    blank = Verdict(case, metric.name, Outcome.MISSING, value, None, None, str(tolerance))
    if baseline is None:
        return replace(blank, reason="no baseline; record one with --update-baselines")
    if reason := _other_config(baseline.config, config):
        return replace(blank, reason=reason)
    return _judge(blank, metric, facts, baseline.launches, tolerance)


def _judge(
    blank: Verdict, metric: Metric, facts: LaunchFacts, recorded: Sequence[LaunchFacts], tolerance: Tolerance
) -> Verdict:
    value, others = blank.value, [metric.measure(launch) for launch in recorded]
    if value is None:
        return replace(blank, baseline=others[-1], reason=f"the launch has no {metric.name}")
    known = [other for other in others if other is not None]
    if len(known) < len(others):
        return replace(blank, reason=f"the baseline has no {metric.name}; record it with --update-baselines")
    if reason := not_applicable(metric, tolerance, facts, recorded[-1]):
        return replace(blank, outcome=Outcome.NOT_APPLICABLE, baseline=others[-1], reason=reason)
    decision = decide(metric, value, known, tolerance)
    reason = "baseline stale: record the better value with --update-baselines"
    return replace(
        blank,
        outcome=decision.outcome,
        baseline=decision.baseline,
        delta=decision.delta,
        reason=reason if decision.outcome is Outcome.IMPROVED else "",
    )


def widened(metric: Metric, facts: LaunchFacts, tolerance: Tolerance) -> Tolerance:
    """The tolerance that the device can hold: timing on CPU ranks is judged no finer than a doubling."""
    if metric.kind != "timing" or facts.environment.get("device") != "cpu" or tolerance is metric.default:
        return tolerance
    return Tolerance(max(tolerance.relative or 0.0, CPU_TIMING_TOLERANCE))


def not_applicable(metric: Metric, tolerance: Tolerance, facts: LaunchFacts, recorded: LaunchFacts) -> str | None:
    """Why a metric can't be compared between two launches, or None where it can."""
    if metric.kind == "timing" and recorded.launcher != facts.launcher:
        return f"ranks were started by {facts.launcher}, the baseline's by {recorded.launcher}"
    if metric.kind == "timing" and facts.environment.get("device") == "cpu":
        # The table's own tolerance, not one of a marker: such a test does not have the host alone.
        if tolerance is metric.default:
            return "timing of CPU ranks is compared only where a tolerance marker names it"
        age_s = time.time() - calendar.timegm(time.strptime(recorded.recorded_at, RECORDED_AT_FORMAT))
        if recorded.sitting != facts.sitting or age_s > CPU_SITTING_S:
            return "timing of CPU ranks is compared only within an hour on one machine"
    if metric.kind != "numeric" or tolerance.relative is not None:
        return None
    if not (_reproducible(facts) and _reproducible(recorded)):
        return "this workload is not bitwise reproducible here; run it in its deterministic mode"
    for key in sorted(recorded.environment.keys() | facts.environment.keys()):
        here, there = facts.environment.get(key), recorded.environment.get(key)
        if here != there:
            return f"{key} is {here!r}, the baseline's {there!r}"
    return None


def _reproducible(facts: LaunchFacts) -> bool:
    return bool(facts.environment.get("bitwise_reproducible", True))


def _other_config(recorded: dict[str, Any], config: dict[str, Any]) -> str | None:
    nothing = "no such key"
    for key in sorted(recorded.keys() | config.keys()):
        there, here = recorded.get(key, nothing), config.get(key, nothing)
        if here != there:
            remedy = "record it again with --update-baselines"
            return f"the baseline was recorded with {key}={there!r}, the test has {here!r}; {remedy}"
    return None
