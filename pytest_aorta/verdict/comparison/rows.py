"""Rows of a comparison, one per metric: not judged yet, with a part that is missing, or decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.verdict.metrics import Metric, Tolerance, Value, middle
from pytest_aorta.verdict.noise.resolution import RESET
from pytest_aorta.verdict.statistics.decision import Decision, Outcome
from pytest_aorta.verdict.verdicts import Missing, Verdict, VerdictReference

STALE = f"the baseline is stale; record the better value with {RESET}"


def blank_row(
    case: str, metric: Metric, launches: Sequence[LaunchFacts], tolerance: Tolerance, reference: VerdictReference
) -> Verdict:
    """Return the row of a metric before it is judged, with the value of ``launches``."""
    value, count = middle(metric, launches), len(launches)
    return Verdict(case, metric.name, Outcome.MISSING, value, None, None, tolerance, reference, launches=count)


def missing_row(blank: Verdict, part: Missing, detail: str) -> Verdict:
    """Return the row of a metric of whose comparison ``part`` is missing.

    Without a value of the candidate, the state of the baseline does not matter.
    """
    return replace(blank, missing=Missing.CANDIDATE_VALUE if blank.value is None else part, detail=detail)


def are_variants(row: Verdict) -> bool:
    """Return True if both sides are variants that the test itself chose."""
    return row.is_by_ab and not row.reference.name


def decided_row(blank: Verdict, decision: Decision, metric: Metric, center: Value) -> Verdict:
    """Return the row of a statistical decision; ``center`` is the value of the other side."""
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
        detail=STALE if decision.outcome is Outcome.IMPROVED else "",
    )
