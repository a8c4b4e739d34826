"""Repeated launches until every verdict is final or the limit of launches is reached."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.verdict.comparison import PairedComparison, StoredComparison
from pytest_aorta.verdict.metrics import METRICS, MetricKind
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Verdict, Verdicts

Again: TypeAlias = Callable[[], LaunchFacts]


def settle(comparison: StoredComparison, launches: list[LaunchFacts], again: Again) -> Verdicts:
    """Compare with the stored baseline until every verdict is final.

    ``launches`` contains the first launch; further launches are appended to it.
    """
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
    *,
    reference_first: bool = False,
) -> Verdicts:
    """Compare with an A/B reference, in pairs of adjacent launches whose order alternates.

    The lists may be empty; launches are appended to them. ``reference_first`` is the order of the first pair.
    """
    verdicts: Verdicts | None = None
    while verdicts is None or verdicts.need_launches:
        if verdicts is not None or not candidates:
            # Alternate the order, so that a drift of the machine affects both sides equally.
            first_is_candidate = (len(candidates) % 2 == 0) is not reference_first
            turns = [(candidates, again), (references, reference_again)]
            for launches, launch in turns if first_is_candidate else turns[::-1]:
                launches.append(launch())
        verdicts = comparison.judge(candidates, references, verdicts.decided if verdicts else None)
    return verdicts


def unsettled(verdicts: Verdicts, comparison: StoredComparison) -> list[str]:
    """Return the metrics that an A/B comparison can decide and the stored baseline can't."""
    return [row.metric for row in verdicts.rows if _is_undecided(row, comparison) or _is_elsewhere(row, comparison)]


def _is_undecided(row: Verdict, comparison: StoredComparison) -> bool:
    # Pairs have less noise, so an A/B can decide what further launches against the stored baseline could not.
    return row.outcome is Outcome.INCONCLUSIVE and comparison.max_launches > 1


def _is_elsewhere(row: Verdict, comparison: StoredComparison) -> bool:
    # A marker requests the comparison, but the baseline comes from another machine, hour or launcher.
    is_timing = METRICS[row.metric].kind is MetricKind.TIMING and row.metric in comparison.marked
    return is_timing and row.outcome is Outcome.NOT_APPLICABLE


def joined(stored: Verdicts, paired: Verdicts) -> Verdicts:
    """Return the stored verdicts, but the A/B's verdicts for the metrics that the A/B compared."""
    by_metric = {row.metric: row for row in paired.rows}
    rows = tuple(by_metric.get(row.metric, row) for row in stored.rows)
    return Verdicts(stored.case, rows, tuple(dict.fromkeys([*stored.notes, *paired.notes])))
