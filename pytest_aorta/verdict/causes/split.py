"""Splits a change of step time into parts that add up to it: what got slower, and on which rank. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, mode

from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.trace.breakdown import Part
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Verdict

# The first of these metrics that regressed is split. Profiled steps say nothing about the slow steps of the tail.
SPLIT = ("step_time_p50", "step_time_mean")
_NAMES = {
    Part.COMPUTE: "compute",
    Part.STRAGGLER: "straggler's extra compute",
    Part.EXPOSED: "exposed communication",
    Part.IDLE: "device idle (host)",
}
_REST = "rest"
_COPIES = "copies"


@dataclass(frozen=True)
class Split:
    """A change of step time and its parts, in milliseconds.

    Attributes:
        total_ms: The change.
        parts_ms: The change of each part. Copies, and all time that profiled steps do not show, belong to the rest.
        rank: The critical rank of most launches under test; None with one rank.
    """

    total_ms: float
    parts_ms: dict[Part, float]
    rank: int | None

    @property
    def rest_ms(self) -> float:
        """Return the change that is in no named part."""
        return self.total_ms - sum(self.parts_ms[part] for part in _NAMES)

    def __str__(self) -> str:
        """Return one line in which the parts add up to the change as printed.

        If profiled steps do not show most of the change, they do not show its rank either, so the rank is left out.
        """
        digits = _digits(self.total_ms)
        shown = {name: round(self.parts_ms[part], digits) for part, name in _NAMES.items()}
        total = round(self.total_ms, digits)
        rest = round(total - sum(shown.values()), digits)
        copies = round(self.parts_ms[Part.COPY], digits)
        parts = [f"{name} {value:+.{digits}f}" for name, value in shown.items() if value]
        parts.append(f"{_REST} {rest:+.{digits}f}" + (f" ({_COPIES} {copies:+.{digits}f})" if copies else ""))
        is_shown = abs(self.rest_ms - self.parts_ms[Part.COPY]) <= abs(self.total_ms) / 2
        where = "" if self.rank is None or not is_shown else f" on rank {self.rank}, the critical rank"
        return f"split of {total:+.{digits}f} ms{where}: {', '.join(parts)}"


def split(total_ms: float, launches: Sequence[LaunchFacts], others: Sequence[LaunchFacts]) -> Split | None:
    """Return the split of a change from ``others`` to ``launches``, or None if either side has no breakdown.

    Each part changes by the difference of its medians over launches; the rest is what remains of ``total_ms``.
    """
    here, there = _with_breakdown(launches), _with_breakdown(others)
    if not here or not there:
        return None
    parts = {part: _median_ms(here, part) - _median_ms(there, part) for part in Part}
    ranks = [launch.critical_rank for launch in here if launch.critical_rank is not None]
    return Split(total_ms, parts, mode(ranks) if ranks else None)


def split_note(rows: Sequence[Verdict], launches: Sequence[LaunchFacts], others: Sequence[LaunchFacts]) -> list[str]:
    """Return a line with the split of a regression of step time, or with the reason why it can't be split.

    The list is empty without such a regression, or if no launch was profiled.
    """
    row = next((row for name in SPLIT for row in rows if _regressed(row, name)), None)
    if row is None or not _with_breakdown([*launches, *others]):
        return []
    value, baseline = row.value, row.baseline
    assert isinstance(value, float)
    assert isinstance(baseline, float)
    if found := split(value - baseline, launches, others):
        return [f"{row.metric}: {found}"]
    if not _with_breakdown(launches):
        return [f"{row.metric}: the change can't be split, since the launches under test profiled no step"]
    again = "" if row.is_by_ab else "; record it again with --update-baselines --aorta-record=replace"
    return [f"{row.metric}: the change can't be split, since the {row.reference} has no breakdown of a step{again}"]


def _regressed(row: Verdict, name: str) -> bool:
    return row.metric == name and row.outcome is Outcome.REGRESSION and row.delta is not None


def _with_breakdown(launches: Sequence[LaunchFacts]) -> list[LaunchFacts]:
    return [launch for launch in launches if launch.breakdown_ms]


def _median_ms(launches: Sequence[LaunchFacts], part: Part) -> float:
    return median(launch.breakdown_ms.get(part, 0.0) for launch in launches)


def _digits(total_ms: float) -> int:
    """Return the number of decimals that show three digits of a change, at most three decimals."""
    return next((digits for digits, least in enumerate((100.0, 10.0, 1.0)) if abs(total_ms) >= least), 3)
