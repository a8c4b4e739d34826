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
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from functools import lru_cache
from statistics import median

from pytest_aorta.verdict.statistics.variance import Variance

# Probability that a change of twice the tolerance passes.
MISS_RATE = 0.05
CONFIDENCE = 0.95


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
        allowed, doubled: The tolerance and twice the tolerance, as differences of transformed values.
        alarm_rate, miss_rate: The look's part of both error rates.
    """

    allowed: float
    doubled: float
    alarm_rate: float
    miss_rate: float

    def decide(
        self,
        effect: float,
        alarm: Variance,
        miss: Variance,
        count: int,
        *,
        can_fail: bool,
        can_improve: bool,
        can_pass: bool,
        last: bool,
    ) -> Decision:
        """Return the decision about an effect.

        Args:
            effect: The change, positive if the metric got worse.
            alarm, miss: Variance of the effect, for a regression and for a pass.
            count: Number of launches or pairs.
            can_fail, can_improve, can_pass: Outcomes that are possible at this look.
            last: Whether the decision is final.
        """
        allowed, doubled = self.allowed, self.doubled
        beyond = max(allowed, quantile_t(1 - self.alarm_rate, alarm.df) * math.sqrt(alarm.value))
        bound = effect + quantile_t(1 - self.miss_rate, miss.df) * math.sqrt(miss.value)
        outcome: Outcome | None = None
        if can_fail and effect > beyond:
            outcome = Outcome.REGRESSION
        elif can_improve and -effect > beyond:
            outcome = Outcome.IMPROVED
        elif can_pass and effect <= allowed and bound < doubled and (last or effect >= -allowed):
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


# Probability that unchanged code is called a regression, over all looks. It is above the rate of stored comparisons,
# because an A/B is used only for comparisons that a stored baseline could not decide.
PAIR_FALSE_ALARM_RATE = 5e-3
PAIR_LOOKS = (2, 3, 4, 6, 8, 12)
MIN_PAIRS_TO_FAIL = 3
# The most degrees of freedom of a prior variance, because the A/B's block may have another noise regime.
PAIR_PRIOR_DF = 8.0
# From this number of pairs on, their own variance decides what the prior leaves undecided, by Student's paired t, at
# this further probability of a false alarm.
PAIRS_WITHOUT_PRIOR = 12
PAIRED_ALARM_RATE = 1e-4
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
    may = {"can_fail": may_fail, "can_improve": may_fail, "can_pass": looked, "last": last}
    decision = rule.decide(effect, error, error, count, **may)
    if decision.outcome is not Outcome.INCONCLUSIVE or count < PAIRS_WITHOUT_PRIOR:
        return decision
    plain = [worse * value for value in differences]
    own = own_variance(plain)
    error = Variance(own.value / count, own.df)
    return replace(rule, alarm_rate=PAIRED_ALARM_RATE).decide(sum(plain) / count, error, error, count, **may)


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
