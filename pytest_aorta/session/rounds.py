"""Launches again and again until every verdict is there, or no more launches are allowed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.verdict.comparison import PairedComparison, StoredComparison
from pytest_aorta.verdict.metrics import METRICS
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import BY_AB, Verdict, Verdicts

Again: TypeAlias = Callable[[], LaunchFacts]


def settle(comparison: StoredComparison, launches: list[LaunchFacts], again: Again) -> Verdicts:
    """Compare with the stored baseline; ``launches`` has the first one, and gets the others."""
    verdicts = comparison.judge(launches)
    while verdicts.need_launches:
        launches.append(again())
        verdicts = comparison.judge(launches, verdicts.decided)
    return verdicts


def settle_pairs(
    comparison: PairedComparison,
    candidates: list[LaunchFacts],
    references: list[LaunchFacts],
    again: Again,
    reference_again: Again,
) -> Verdicts:
    """Compare with a reference, in pairs of adjacent launches whose order alternates; the lists may be empty."""
    verdicts: Verdicts | None = None
    while verdicts is None or verdicts.need_launches:
        if verdicts is not None or not candidates:
            # In turn, so that what drifts meets both alike.
            first_is_candidate = len(candidates) % 2 == 0
            turns = [(candidates, again), (references, reference_again)]
            for launches, launch in turns if first_is_candidate else turns[::-1]:
                launches.append(launch())
        verdicts = comparison.judge(candidates, references, verdicts.decided if verdicts else None)
    return verdicts


def unsettled(verdicts: Verdicts, comparison: StoredComparison) -> list[str]:
    """The metrics that an A/B could tell more about than the stored baseline does."""
    return [row.metric for row in verdicts.rows if row.is_open or _is_elsewhere(row, comparison)]


def _is_elsewhere(row: Verdict, comparison: StoredComparison) -> bool:
    # A marker asks for it, and the baseline's times were those of another machine, hour or launcher.
    is_timing = METRICS[row.metric].kind == "timing" and row.metric in comparison.marked
    return is_timing and row.outcome is Outcome.NOT_APPLICABLE


def joined(stored: Verdicts, paired: Verdicts, reference: str) -> Verdicts:
    """The stored verdicts with those of the A/B in the place of what it settled."""
    by_metric = {
        row.metric: replace(row, reason=", ".join(filter(None, [f"{BY_AB} {reference}", row.reason])))
        for row in paired.rows
    }
    rows = tuple(by_metric.get(row.metric, row) for row in stored.rows)
    return Verdicts(stored.case, rows, tuple(dict.fromkeys([*stored.notes, *paired.notes])))
