"""The outcome of a comparison, and the rule for one look at an effect. Pure functions: no file, no clock, no launch.

The unit of statistics is the launch, because the steps of a launch depend on each other and most of the variance is
between launches. A change is a difference of transformed values (logs, for most metrics), and is positive if the metric
got worse. A change is a regression only if it exceeds both the tolerance and the noise. It passes only if a change of
twice the tolerance can be ruled out. Otherwise another launch is needed. After the last launch, or if further launches
could not decide, the outcome is inconclusive.

A look is a number of launches after which a decision is possible. The error rates are divided over the looks, here for
pairs of adjacent launches, as in an A/B, and in :mod:`stored`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import lru_cache
from itertools import accumulate
from statistics import median

from pytest_aorta.verdict.statistics.variance import Variance

# Probability that a change of twice the tolerance passes.
MISS_RATE = 0.05
CONFIDENCE = 0.95
# With fewer launches, or pairs of launches, there is no regression.
MIN_LAUNCHES_TO_FAIL = 3


class Outcome(StrEnum):
    """The outcome of a comparison."""

    PASS = "pass"  # noqa: S105 - a verdict
    REGRESSION = "regression"
    IMPROVED = "improved"
    INCONCLUSIVE = "inconclusive"
    NOT_APPLICABLE = "not applicable"
    MISSING = "missing"


# A float can hold the exponential of this difference: a file may contain a value that is nearly 0.
_LARGEST_LOG = 700.0


class Scale(Enum):
    """The scale of a change. The enum's value is the unit that a user writes after the number.

    Times, rates and sizes differ by factors, so they are transformed by the logarithm. Fractions and exposed times can
    be zero, so they are compared on linear scales: fractions in points, exposed times as a fraction of the baseline's
    step time.
    """

    RELATIVE = "%"
    POINTS = " points"
    OF_STEP = "% of step"

    @property
    def unit(self) -> str:
        """Return the unit that follows the number."""
        return str(self.value)

    def transform(self, value: object, step_ms: float) -> float | None:
        """Return the transformed value, or None if the value can't be transformed.

        ``step_ms`` is the baseline's step time in ms.
        """
        if not isinstance(value, float | int):
            return None
        if self is Scale.RELATIVE:
            return math.log(value) if value > 0 else None
        return value / step_ms if self is Scale.OF_STEP else float(value)

    def from_transformed(self, transformed: float, step_ms: float) -> float:
        """Return the inverse of :meth:`transform`."""
        if self is Scale.RELATIVE:
            return math.exp(transformed)
        return transformed * step_ms if self is Scale.OF_STEP else transformed

    def difference(self, change: float) -> float:
        """Return the difference of transformed values for a change, e.g. 0.05 for 5%."""
        return math.log1p(change) if self is Scale.RELATIVE else change

    def change(self, difference: float) -> float:
        """Return the inverse of :meth:`difference`."""
        return math.expm1(min(difference, _LARGEST_LOG)) if self is Scale.RELATIVE else difference

    def parse(self, text: object) -> float | None:
        """Parse a change such as ``"5%"`` or ``"5 points"``; return None for any other text."""
        unit = self.unit.strip().replace(" ", r"\s+")
        match = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*{unit}", text) if isinstance(text, str) else None
        return None if match is None else float(match[1]) / 100

    def text(self, change: float) -> str:
        """Return the inverse of :meth:`parse`."""
        return f"{change * 100:g}{self.unit}"


@dataclass(frozen=True)
class Decision:
    """An outcome with the evidence for it.

    Attributes:
        outcome: The outcome, or None if more launches are needed.
        effect: The change as a difference of transformed values; positive is worse.
        low, high: The two-sided 95% interval of ``effect``.
        launches: Number of the candidate's launches, or of pairs in an A/B.
    """

    outcome: Outcome | None
    effect: float
    low: float
    high: float
    launches: int


@dataclass(frozen=True)
class Rule:
    """The rule for one look.

    Attributes:
        tolerance: The tolerance, a change on ``scale``.
        scale: The scale on which the values were transformed.
        alarm_rate, miss_rate: The look's part of both error rates.
        looks: Numbers of launches or pairs after which a decision is possible; after the last, every decision is final.
    """

    tolerance: float
    scale: Scale
    alarm_rate: float
    miss_rate: float
    looks: Sequence[int]

    @property
    def allowed(self) -> float:
        """Return the tolerance as a difference of transformed values."""
        return self.scale.difference(self.tolerance)

    def beyond(self, alarm: Variance) -> float:
        """Return the effect above which there is a regression, given the variance of the effect."""
        return max(self.allowed, quantile_t(1 - self.alarm_rate, alarm.df) * math.sqrt(alarm.value))

    def decide(
        self,
        effect: float,
        alarm: Variance,
        miss: Variance,
        count: int,
        *,
        is_slower: bool,
        is_faster: bool,
        is_last: bool = False,
    ) -> Decision:
        """Return the decision about an effect.

        Args:
            effect: The change, positive if the metric got worse.
            alarm, miss: Variance of the effect, for a regression and for a pass.
            count: Number of launches or pairs.
            is_slower, is_faster: Whether each launch or pair, beside the effect, shows that the metric got worse or
                better.
            is_last: Whether the decision is final, although more looks are left.
        """
        last = is_last or count >= self.looks[-1]
        looked = last or count in self.looks
        may_fail = looked and count >= MIN_LAUNCHES_TO_FAIL
        allowed, beyond = self.allowed, self.beyond(alarm)
        doubled = self.scale.difference(2 * self.tolerance)
        bound = effect + quantile_t(1 - self.miss_rate, miss.df) * math.sqrt(miss.value)
        outcome: Outcome | None = None
        if may_fail and is_slower and effect > beyond:
            outcome = Outcome.REGRESSION
        elif may_fail and is_faster and -effect > beyond:
            outcome = Outcome.IMPROVED
        elif looked and effect <= allowed and bound < doubled and (last or effect >= -allowed):
            outcome = Outcome.PASS
        elif last:
            outcome = Outcome.INCONCLUSIVE
        side = (1 + CONFIDENCE) / 2
        below = quantile_t(side, alarm.df) * math.sqrt(alarm.value)
        above = quantile_t(side, miss.df) * math.sqrt(miss.value)
        return Decision(outcome, effect, effect - below, effect + above, count)


def own_variance(values: Sequence[float]) -> Variance:
    """Return the sample variance of launches or of pair differences, with 0 degrees of freedom for a single value."""
    count = len(values)
    if count < 2:
        return Variance(0, 0)
    mean = sum(values) / count
    return Variance(sum((value - mean) ** 2 for value in values) / (count - 1), count - 1)


@lru_cache(maxsize=4096)
def _quantile_t(fraction: float, df: float) -> float:
    from scipy.special import stdtrit  # importing scipy.stats takes more than twice as long

    if fraction in (0.0, 1.0):  # stdtrit returns NaN
        return math.inf if fraction else -math.inf
    return float(stdtrit(df, fraction))


def quantile_t(fraction: float, df: float) -> float:
    """Return a quantile of Student's t. Degrees of freedom are rounded down to tenths, which is conservative."""
    return _quantile_t(fraction, max(0.5, math.floor(df * 10) / 10))


# Probability that unchanged code is called a regression, over all looks.
PAIR_FALSE_ALARM_RATE = 1e-4
PAIR_LOOKS = (2, 3, 4, 6, 8, 12)
# The most degrees of freedom of a prior variance, because the A/B's block may have another noise regime.
PAIR_PRIOR_DF = 8.0
# From this number of pairs on, the pairs alone decide, by the ranks of their launches.
PAIRS_WITHOUT_PRIOR = 12
# A rate whose quantile is 0: the ranks have shown that a change exceeds the noise.
_BY_RANKS = 0.5
# A variance of the pairs above this multiple of the prior variance shows another noise regime.
OTHER_REGIME = 2.0
# A pair difference that is this many scales away from the median is an outlier.
OUTLIER_SCALES = 3.0
# Standard deviation of normal values, divided by their median absolute deviation.
_MAD_TO_DEVIATION = 1.4826
# Among fewer values, two that agree would make the third an outlier.
_ENOUGH_FOR_OUTLIERS = 5


def decide_pairs(
    pairs: Sequence[tuple[float, float]],
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
    slightly. With fewer than :data:`PAIRS_WITHOUT_PRIOR` pairs, a regression has to exceed the noise of the prior and
    of the pairs. With more, it has to be significant by :func:`num_not_worse`, which assumes no distribution: other
    jobs on a machine make the noise heavy-tailed or bimodal. Each of the two ways has half of the false-alarm rate.

    Args:
        pairs: Transformed values of candidate and reference, for at least one pair.
        variance: The prior of a single launch's variance.
        max_pairs: The most pairs.
        tolerance, worse, scale, false_alarm_rate: As in :func:`stored.decide_stored`.
    """
    count = len(pairs)
    looks = [look for look in PAIR_LOOKS if look <= max_pairs] or [PAIR_LOOKS[0]]
    prior = Variance(2 * variance.value, min(variance.df, PAIR_PRIOR_DF))
    values = _winsorized([worse * (here - there) for here, there in pairs], math.sqrt(prior.value))
    own, is_slower, is_faster = own_variance(values), True, True
    num_alarms = sum(MIN_LAUNCHES_TO_FAIL <= look < PAIRS_WITHOUT_PRIOR for look in looks)
    alarm_rate = false_alarm_rate / 2 / max(1, num_alarms)
    if count < PAIRS_WITHOUT_PRIOR:
        single = _pair_variance(prior, own)
    else:
        single, alarm_rate = own, _BY_RANKS
        most = most_not_worse(count, false_alarm_rate / 2)
        is_slower, is_faster = (
            num_not_worse([(sign * here, sign * there) for here, there in pairs]) <= most for sign in (worse, -worse)
        )
    error = Variance(single.value / count, single.df)
    rule = Rule(tolerance, scale, alarm_rate, MISS_RATE / len(looks), looks)
    return rule.decide(sum(values) / count, error, error, count, is_slower=is_slower, is_faster=is_faster)


def num_not_worse(pairs: Sequence[tuple[float, float]]) -> int:
    """Return how often a first value of any pair is not larger than a second value of any pair.

    This is the statistic of the Mann-Whitney test (Annals of Mathematical Statistics 18, 1947).
    """
    first, second = zip(*pairs, strict=True)
    # An equal value counts against the change, which keeps the probability of an error below that without ties.
    return sum(here <= there for here in first for there in second)


@lru_cache(maxsize=64)
def most_not_worse(count: int, rate: float) -> int:
    """Return the largest :func:`num_not_worse` of ``count`` equal pairs at or below which ``rate`` is not exceeded.

    The result is -1 if the rate is too small. The counts are the coefficients of a Gaussian binomial.
    """
    ways = [1] + [0] * count**2
    for factor in range(1, count + 1):
        for place in range(count**2, count + factor - 1, -1):
            ways[place] -= ways[place - count - factor]
        for place in range(factor, count**2 + 1):
            ways[place] += ways[place - factor]
    below = accumulate(ways)
    return sum(1 for total in below if total <= rate * math.comb(2 * count, count)) - 1


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
