"""Computes the drawing of a change: its confidence interval on a scale of tolerances, the same in every row.

Changes range from a hundredth of a tolerance to a hundred tolerances, so the scale is linear within the tolerance
and logarithmic beyond it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pytest_aorta.verdict.verdicts import Verdict

# Range of the drawing to either side, in tolerances. An interval that extends beyond the range ends in an arrow.
REACH = 30.0
WIDTH = 100.0


@dataclass(frozen=True)
class IntervalMarks:
    """Positions from 0 to :data:`WIDTH`; ``left`` and ``right`` say whether an end lies beyond the drawing.

    ``times_allowed`` is the size of the change as text, in tolerances.
    """

    low: float
    middle: float
    high: float
    lower_limit: float
    zero: float
    upper_limit: float
    left: bool
    right: bool
    times_allowed: str


def interval_marks(verdict: Verdict) -> IntervalMarks | None:
    """Return the positions to draw; None where a verdict has no change or no tolerance."""
    tolerance = verdict.tolerance.value
    if verdict.delta is None or not tolerance:
        return None
    low = verdict.delta if verdict.low is None else verdict.low
    high = verdict.delta if verdict.high is None else verdict.high
    low_at, middle, high_at = (_position(end / tolerance) for end in (low, verdict.delta, high))
    return IntervalMarks(
        low_at,
        middle,
        high_at,
        lower_limit=_position(-1.0),
        zero=_position(0.0),
        upper_limit=_position(1.0),
        left=low < -REACH * tolerance,
        right=high > REACH * tolerance,
        times_allowed=_times(abs(verdict.delta) / tolerance),
    )


def _position(tolerances: float) -> float:
    """Return the position of a change; the scale has no kink where it becomes logarithmic."""
    return round((_scaled(tolerances) / _scaled(REACH) + 1) / 2 * WIDTH, 1)


def _scaled(tolerances: float) -> float:
    size = min(abs(tolerances), REACH)
    return math.copysign(size if size <= 1 else 1 + math.log(size), tolerances)


def _times(tolerances: float) -> str:
    return (
        f"{tolerances:,.1f}\N{MULTIPLICATION SIGN}"
        if tolerances < 9.95
        else f"{tolerances:,.0f}\N{MULTIPLICATION SIGN}"
    )
