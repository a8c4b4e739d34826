"""Growth of a series within a launch, such as step times or memory, that its noise does not explain."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import combinations, pairwise
from statistics import NormalDist, median

# Medians of at most 16 groups of values; fewer values or groups show no growth.
_MAX_GROUPS = 16
_MIN_VALUES = 10
_MIN_GROUPS = 7
# Neighboring steps are correlated, often with a lag-1 autocorrelation of 0.6, so a group has at least this many steps.
DEPENDENT_STEPS = 5
_CONFIDENCE = 0.99


def growth(values: Sequence[float], dependent: int = 1) -> float:
    """Return the relative growth from the first value to the last that is certain at 99% confidence, else 0.

    The slope is estimated from the medians of up to 16 groups of consecutive values, each of at least ``dependent``
    values because neighboring values are correlated. The bound of its confidence interval that is closer to 0 counts. A
    decline is negative. Fewer than 10 values or 7 groups show no growth.
    """
    groups = min(_MAX_GROUPS, len(values) // dependent)
    if len(values) < _MIN_VALUES or groups < _MIN_GROUPS or min(values) <= 0:
        return 0.0
    bounds = [len(values) * number // groups for number in range(groups + 1)]
    medians = [median(values[begin:end]) for begin, end in pairwise(bounds)]
    low, high = slope_bounds(medians, _CONFIDENCE)
    certain = low if low > 0 else high if high < 0 else 0.0
    return certain * (groups - 1) / median(medians)


def slope_bounds(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Return the confidence interval of the Theil-Sen slope per value (Sen, J. Am. Stat. Assoc. 63, 1968, eq. 2.6).

    ``scipy.stats.theilslopes`` computes the same bits, and importing it takes longer than a warm launch.
    """
    numbered = combinations(enumerate(values), 2)
    slopes = sorted((later - earlier) / (after - before) for (before, earlier), (after, later) in numbered)
    size, ties = len(values), Counter(values).values()
    pairs = size * (size - 1) * (2 * size + 5) - sum(count * (count - 1) * (2 * count + 5) for count in ties)
    reach = NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(pairs / 18)
    low, high = round((len(slopes) - reach) / 2) - 1, round((len(slopes) + reach) / 2)
    return slopes[max(low, 0)], slopes[min(high, len(slopes) - 1)]
