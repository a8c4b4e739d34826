"""Comparison of pairs of adjacent launches, as in an A/B.

The false-alarm rate is divided over the looks by the spending function of Lan and DeMets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import median

from pytest_aorta.verdict.statistics.decision import MISS_RATE, Decision, Rule, Scale, own_variance
from pytest_aorta.verdict.statistics.variance import Variance

# Probability that unchanged code is called a regression, over all looks. It is above the rate of stored comparisons,
# because an A/B is used only for comparisons that a stored baseline could not decide.
PAIR_FALSE_ALARM_RATE = 5e-3
PAIR_LOOKS = (2, 3, 4, 6, 8, 12)
MIN_PAIRS_TO_FAIL = 3
# The most degrees of freedom of a prior variance, because the A/B's block may have another noise regime.
PAIR_PRIOR_DF = 8.0
# A variance of the pairs above this multiple of the prior variance shows another noise regime.
OTHER_REGIME = 2.0
# A pair difference that is this many scales away from the median is an outlier.
OUTLIER_SCALES = 3.0
# Standard deviation of normal values, divided by their median absolute deviation.
_MAD_TO_DEVIATION = 1.4826
# Among fewer values, two that agree would make the third an outlier.
_ENOUGH_FOR_OUTLIERS = 5


def decide_pairs(
    differences: Sequence[float],
    variance: Variance,
    tolerance: float,
    *,
    max_pairs: int,
    worse: int,
    scale: Scale = Scale.RELATIVE,
    false_alarm_rate: float = PAIR_FALSE_ALARM_RATE,
) -> Decision:
    """Compare adjacent launches of candidate and reference, pair by pair.

    Outliers are winsorized (Huber, Robust Statistics, 1981), so that a single launch of either side moves the mean only
    slightly.

    Args:
        differences: Transformed value of the candidate minus that of the reference, for at least one pair.
        variance: The prior of a single launch's variance.
        max_pairs: The most pairs.
        tolerance, worse, scale, false_alarm_rate: As in :func:`stored.decide_stored`.
    """
    count = len(differences)
    looks = [look for look in PAIR_LOOKS if look <= max_pairs] or [PAIR_LOOKS[0]]
    prior = Variance(2 * variance.value, min(variance.df, PAIR_PRIOR_DF))
    values = _winsorized([worse * value for value in differences], math.sqrt(prior.value))
    effect = sum(values) / count
    single = _pair_variance(prior, own_variance(values))
    error = Variance(single.value / count, single.df)
    allowed, doubled = (scale.difference(times * tolerance) for times in (1, 2))
    rule = Rule(allowed, doubled, _spent(false_alarm_rate, count, tuple(looks)), MISS_RATE / len(looks))
    last = count >= looks[-1]
    looked = last or count in looks
    may_fail = looked and count >= MIN_PAIRS_TO_FAIL
    return rule.decide(
        effect,
        error,
        error,
        count,
        can_fail=may_fail,
        can_improve=may_fail,
        can_pass=looked,
        last=last,
    )


@lru_cache(maxsize=512)
def _spent(rate: float, count: int, looks: tuple[int, ...]) -> float:
    """Return the part of ``rate`` that is spent at ``count`` pairs: little early, nearly all at the last look.

    This is the spending function of Lan and DeMets (Biometrika 70, 1983) that resembles O'Brien and Fleming's boundary.
    Each look spends the increase since the previous look.
    """
    from scipy.special import ndtr, ndtri  # imported here, because it would add 0.2 s to collection

    failing = [look for look in looks if look >= MIN_PAIRS_TO_FAIL] or [count]
    earlier = max((look for look in failing if look < count), default=0)
    bound = float(ndtri(1 - rate / 2))

    def total(pairs: int) -> float:
        information = min(1.0, pairs / failing[-1])
        return 2 * float(ndtr(-bound / math.sqrt(information))) if information else 0.0

    return total(count) - (0.0 if count > failing[-1] else total(earlier))


def _winsorized(values: Sequence[float], known: float) -> list[float]:
    """Return the values; among five or more, outliers are moved to the edge. ``known`` is the expected deviation.

    At most a fifth of the values are moved on either side: more would be a second mode, not outliers.
    """
    if len(values) < _ENOUGH_FOR_OUTLIERS:
        return list(values)
    ascending, most = sorted(values), max(1, len(values) // 5)
    middle = median(ascending)
    scale = max(known, _MAD_TO_DEVIATION * median(abs(value - middle) for value in values))
    low = min(middle - OUTLIER_SCALES * scale, ascending[most])
    high = max(middle + OUTLIER_SCALES * scale, ascending[-1 - most])
    return [min(max(value, low), high) for value in values]


def _pair_variance(prior: Variance, own: Variance) -> Variance:
    """Return the variance of one pair difference. A few pairs can raise the prior but not lower it."""
    if own.df and own.value > OTHER_REGIME * prior.value:
        return own
    pooled = prior.pooled(own)
    return Variance(max(pooled.value, own.value), pooled.df)
