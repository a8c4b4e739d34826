"""Computes the drawing of a change: its confidence interval on a scale of tolerances, the same in every row."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_aorta.verdict.verdicts import Verdict

# Range of the drawing to either side, in tolerances. An interval that extends beyond the range ends in an arrow.
REACH = 3.0
WIDTH = 100.0


@dataclass(frozen=True)
class IntervalMarks:
    """Positions from 0 to :data:`WIDTH`; ``left`` and ``right`` say whether an end lies beyond the drawing."""

    low: float
    middle: float
    high: float
    lower_limit: float
    zero: float
    upper_limit: float
    left: bool
    right: bool


def interval_marks(verdict: Verdict) -> IntervalMarks | None:
    """Return the positions to draw; None where a verdict has no change or no tolerance."""
    tolerance = verdict.tolerance.value
    if verdict.delta is None or not tolerance:
        return None
    low = verdict.delta if verdict.low is None else verdict.low
    high = verdict.delta if verdict.high is None else verdict.high
    ends = (low, verdict.delta, high)
    low_at, middle, high_at = (_position(max(-REACH, min(REACH, end / tolerance))) for end in ends)
    return IntervalMarks(
        low_at,
        middle,
        high_at,
        lower_limit=_position(-1.0),
        zero=_position(0.0),
        upper_limit=_position(1.0),
        left=low < -REACH * tolerance,
        right=high > REACH * tolerance,
    )


def _position(tolerances: float) -> float:
    return round((tolerances + REACH) / (2 * REACH) * WIDTH, 1)
