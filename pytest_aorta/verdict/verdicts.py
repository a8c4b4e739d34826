"""What a comparison has come to, metric by metric, as plain values that travel."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pytest_aorta.verdict.metrics import EXACT, METRICS, Value, format_value
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.statistics.scale import Scale

# Begins the reason of a verdict that launches of a reference version decided.
BY_AB = "A/B with"


@dataclass(frozen=True)
class Verdict:
    """One metric's outcome.

    Attributes:
        value: the median over the candidate's launches.
        baseline: the centre it was compared with; the reference's median in an A/B.
        delta: change on the metric's scale, positive where the value is larger; ``low`` and ``high`` its 95% interval.
        launches: of the candidate that were used.
        is_open: whether more launches could decide it.
        against: what ``baseline`` is the value of.
    """

    case: str
    metric: str
    outcome: Outcome
    value: Value
    baseline: Value
    delta: float | None
    tolerance: str
    reason: str = ""
    low: float | None = None
    high: float | None = None
    launches: int = 1
    is_open: bool = False
    against: str = "baseline"

    @property
    def is_lost(self) -> bool:
        """Whether the launch lacks what there is to compare."""
        return self.outcome is Outcome.MISSING and self.value is None

    @property
    def is_by_ab(self) -> bool:
        """Whether launches of a reference version decided it, not the stored baseline."""
        return self.reason.startswith(BY_AB)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, to travel between xdist's processes."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Verdict:
        """The inverse of :meth:`to_json`."""
        return replace(cls(**data), outcome=Outcome(data["outcome"]))

    def cells(self) -> tuple[str, ...]:
        """Metric, value, baseline, change, tolerance, launches, outcome: a row of the summary."""
        # What is compared step by step is no metric of a launch, and has no unit.
        unit = METRICS[self.metric].unit if self.metric in METRICS else ""
        exact = self.tolerance == str(EXACT)
        value, baseline = (format_value(shown, unit, exact=exact) for shown in (self.value, self.baseline))
        return self.metric, value, baseline, self.change, self.tolerance, str(self.launches), self.outcome.value

    @property
    def change(self) -> str:
        """The change with its interval, as far as they are known."""
        if self.delta is None:
            return "-"
        scale = METRICS[self.metric].scale if self.metric in METRICS else Scale.RELATIVE
        text = format_change(self.delta, scale)
        if self.low is None or self.high is None:
            return text
        return f"{text} [{format_change(self.low, scale)}, {format_change(self.high, scale)}]"

    def __str__(self) -> str:
        """One line for a failure's text."""
        metric, value, baseline, change, tolerance, launches, outcome = self.cells()
        used = f", {launches} launches" if self.launches > 1 else ""
        against = "reference" if self.is_by_ab else self.against
        moved = "" if self.delta is None and against == "reference" else f", change {change}"
        text = f"{metric}: {outcome}: {value}, {against} {baseline}{moved}, tolerance {tolerance}{used}"
        return f"{text} ({self.reason})" if self.reason else text


@dataclass(frozen=True)
class Verdicts:
    """All verdicts of one comparison, and what else its launches showed."""

    case: str
    rows: tuple[Verdict, ...]
    notes: tuple[str, ...] = ()

    def __getitem__(self, metric: str) -> Verdict:
        """The verdict of one metric."""
        rows = {row.metric: row for row in self.rows}
        if metric not in rows:
            raise KeyError(f"{metric} was not compared; there are {sorted(rows)}")
        return rows[metric]

    @property
    def need_launches(self) -> bool:
        """Whether another launch could change what comes out: none can undo a verdict that is there."""
        return any(row.is_open for row in self.rows) and not any(
            row.outcome is Outcome.REGRESSION or row.is_lost for row in self.rows
        )

    @property
    def decided(self) -> dict[str, Verdict]:
        """The rows that further launches leave as they are."""
        return {row.metric: row for row in self.rows if not row.is_open}

    def failing(self, fail_on: Collection[Outcome] = ()) -> list[Verdict]:
        """Return the verdicts that fail the test: regressions, lost metrics, and the outcomes in ``fail_on``."""
        # A metric that the launch itself lost fails the test also where missing baselines do not.
        return [row for row in self.rows if row.outcome in {Outcome.REGRESSION, *fail_on} or row.is_lost]


def format_change(change: float, scale: Scale = Scale.RELATIVE) -> str:
    """A change in percent, or what its scale is in, with a decimal more where it is small."""
    percent = 100 * change
    digits = 2 if abs(percent) < 9.995 else 1 if abs(percent) < 999.5 else 0
    return f"{percent:+.{digits}f}{scale.unit}"
