"""Adds what explains a verdict: the cause of a regression, throttled devices, and notes on the comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.verdict.causes.explain import canary_notes, explanation, notes
from pytest_aorta.verdict.causes.split import split_note
from pytest_aorta.verdict.metrics import METRICS, Metric, MetricKind
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Verdict


def with_throttling(row: Verdict, metric: Metric, launches: Sequence[LaunchFacts]) -> Verdict:
    """Return the verdict; if it is on a time that did not pass, its detail names throttled devices."""
    num_hot = sum(bool(launch.throttled) for launch in launches)
    if not num_hot or metric.kind is not MetricKind.TIMING or row.outcome is Outcome.PASS:
        return row
    of = f"{num_hot} of {len(launches)} launches" if len(launches) > 1 else "the launch"
    return replace(row, detail=", ".join(filter(None, [f"GPUs throttled in {of}", row.detail])))


def notes_on(
    rows: Sequence[Verdict], launches: Sequence[LaunchFacts], others: Sequence[LaunchFacts], side: str
) -> tuple[str, ...]:
    """Return the notes on a comparison. A slow machine explains times, but no other metric."""
    undecided_or_failed = (Outcome.REGRESSION, Outcome.INCONCLUSIVE)
    are_times_in_question = any(
        row.outcome in undecided_or_failed and METRICS[row.metric].kind is MetricKind.TIMING for row in rows
    )
    found = split_note(rows, launches, others) + notes(launches, others, side)
    return tuple(found + (canary_notes(launches, others, side) if are_times_in_question else []))


def cause_of(row: Verdict, launches: Sequence[LaunchFacts], others: Sequence[LaunchFacts]) -> str:
    """Return text on the cause of a regression of time or overlap, or an empty text."""
    return explanation(row.metric, launches, others) if row.outcome is Outcome.REGRESSION else ""
