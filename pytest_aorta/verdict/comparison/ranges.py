"""Comparison of the ranges of values that have no logarithm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.verdict.metrics import Metric, middle
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.statistics.stored import FALSE_ALARM_RATE, MIN_LAUNCHES_TO_FAIL
from pytest_aorta.verdict.verdicts import Verdict


def judge_ranges(
    blank: Verdict,
    metric: Metric,
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
    allowed = (blank.tolerance.value or 0.0) * abs(median(there))
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
