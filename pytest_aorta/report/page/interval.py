"""The small picture of a change: its interval beside the tolerance, which is as wide in every row."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pytest_aorta.verdict.verdicts import Verdict

# In tolerances, to either side; what is beyond is drawn as an arrow.
REACH = 3.0
WIDTH = 100.0


@dataclass(frozen=True)
class IntervalMarks:
    """Places on a scale of :data:`WIDTH`; ``left`` and ``right`` say whether an end lies beyond it."""

    low: float
    middle: float
    high: float
    lower_limit: float
    zero: float
    upper_limit: float
    left: bool
    right: bool


def interval_marks(verdict: Verdict) -> IntervalMarks | None:
    """Where to draw; None where there is no change, or no tolerance beside which to draw it."""
    tolerance = tolerated(verdict)
    if verdict.delta is None or not tolerance:
        return None
    low = verdict.delta if verdict.low is None else verdict.low
    high = verdict.delta if verdict.high is None else verdict.high
    ends = (low, verdict.delta, high)
    low_at, middle, high_at = (_place(max(-REACH, min(REACH, end / tolerance))) for end in ends)
    return IntervalMarks(
        low_at,
        middle,
        high_at,
        lower_limit=_place(-1.0),
        zero=_place(0.0),
        upper_limit=_place(1.0),
        left=low < -REACH * tolerance,
        right=high > REACH * tolerance,
    )


def tolerated(verdict: Verdict) -> float | None:
    """The tolerance as a number in the change's unit, whatever its scale; None where that is exactness."""
    number = re.match(r"\d+(\.\d+)?", verdict.tolerance)
    return float(number[0]) / 100 if number else None


def _place(tolerances: float) -> float:
    return round((tolerances + REACH) / (2 * REACH) * WIDTH, 1)
