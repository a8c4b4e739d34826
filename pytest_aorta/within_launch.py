"""What one launch's steps show besides their quantiles: a rank that the others wait for, and growth over time. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

_BLOCKS = 16
_MIN_VALUES = 10
_MIN_BLOCKS = 7
# Steps, each of which resembles those before it: a lag-1 autocorrelation of 0.6 is usual.
DEPENDENT_STEPS = 5
_GROWTH_CONFIDENCE = 0.99


def rank_lags_ms(wait_ms: Sequence[Sequence[float]]) -> list[float]:
    """How much less each rank waits in collectives than the others, in milliseconds a step.

    ``wait_ms[rank][step]`` becomes, for each rank, the median over steps of the others' median wait less its own.
    The rank that arrives last waits least, so that its lag is the work that it alone has. Empty without waits, or
    with one rank.
    """
    if len(wait_ms) < 2 or not wait_ms[0]:
        return []
    import numpy as np  # costs collection 0.1 s otherwise

    waits = np.asarray(wait_ms)
    num_ranks = len(waits)
    # Of a step's sorted waits, a rank's others are all but one: what was behind its place moves up.
    order = np.argsort(waits, axis=0)
    place = np.argsort(order, axis=0)
    in_order = np.take_along_axis(waits, order, axis=0)
    low, high = (num_ranks - 2) // 2, (num_ranks - 1) // 2
    others = [np.where(place <= middle, in_order[middle + 1], in_order[middle]) for middle in (low, high)]
    lags: list[float] = np.median((others[0] + others[1]) / 2 - waits, axis=1).tolist()
    return lags


def growth(values: Sequence[float], dependent: int = 1) -> float:
    """The relative growth from the first value to the last that 99% confidence leaves, 0 where it could be none.

    The slope is Theil's and Sen's (J. Am. Stat. Assoc. 63, 1968) over medians of up to 16 blocks, of ``dependent``
    values or more, since neighbouring steps are alike. Negative for a decline. Too few values show none.
    """
    blocks = min(_BLOCKS, len(values) // dependent)
    if len(values) < _MIN_VALUES or blocks < _MIN_BLOCKS or min(values) <= 0:
        return 0.0
    from scipy.stats import theilslopes  # costs collection half a second otherwise

    bounds = [len(values) * number // blocks for number in range(blocks + 1)]
    medians = [median(values[begin:end]) for begin, end in pairwise(bounds)]
    slopes = theilslopes(medians, alpha=_GROWTH_CONFIDENCE)
    low, high = float(slopes.low_slope), float(slopes.high_slope)
    sure = low if low > 0 else high if high < 0 else 0.0
    return sure * (blocks - 1) / median(medians)
