"""Comparison of values that must be equal, step by step where a metric has values of steps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from pytest_aorta.common.text import brief, counted
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.verdict.applicability import other_settings
from pytest_aorta.verdict.comparison.rows import are_variants, missing_row
from pytest_aorta.verdict.metrics import Metric, MetricKind
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Missing, Verdict


def judge_exact(
    blank: Verdict, metric: Metric, launches: Sequence[LaunchFacts], others: Sequence[LaunchFacts]
) -> Verdict:
    """Return the row of a metric whose values must be equal: the last ones, and those of every earlier step."""
    expected = {metric.measure(other) for other in others}
    for launch in launches:
        value = metric.measure(launch)
        if different := sorted(expected - {value}, key=str):
            other = next(other for other in others if metric.measure(other) == different[0])
            row = replace(blank, outcome=Outcome.REGRESSION, value=value, baseline=different[0])
            row = replace(row, detail=_first_difference(metric, launch, other))
            return _with_settings(row, metric, launch, others[-1])
    blank = replace(blank, baseline=blank.value)
    problem = _earlier_step(blank, metric, launches, others) or _lost_steps(blank, metric, launches, others[-1])
    return problem or replace(blank, outcome=Outcome.PASS)


def _with_settings(row: Verdict, metric: Metric, launch: LaunchFacts, other: LaunchFacts) -> Verdict:
    """Return a regression of bits with the numeric settings that the code changed, which may explain the regression."""
    settings = other_settings(launch, other) if metric.kind is MetricKind.NUMERIC else ""
    return replace(row, detail="; ".join(filter(None, [row.detail, settings])))


def _first_difference(metric: Metric, launch: LaunchFacts, other: LaunchFacts) -> str:
    """Return after which step two sides first differ; empty if both have a value for one step only, or for none."""
    if metric.by_step is None:
        return ""
    here, there = metric.by_step(launch), metric.by_step(other)
    common = sorted(here.keys() & there.keys())
    first = next((step for step in common if here[step] != there[step]), None)
    if len(common) < 2 or first is None:
        return ""
    equal = max((step for step in common if step < first), default=None)
    before = "" if equal is None else f", and are equal after step {equal}"
    return f"the weights first differ after step {first}{before}"


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
    if metric.by_step is None or are_variants(blank):
        return None
    for launch in launches:
        if lost := sorted(metric.by_step(other).keys() - metric.by_step(launch).keys()):
            steps = f"{counted(len(lost), 'step')} for which the {blank.reference} has one"
            detail = f"the launch has no hash of {steps}: {brief(', '.join(map(str, lost)))}"
            return missing_row(blank, Missing.CANDIDATE_VALUE, detail)
    return None
