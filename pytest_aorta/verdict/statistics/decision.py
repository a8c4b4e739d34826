"""The rules that turn launches and a tolerance into an outcome. Pure: no file, no clock, no launch.

The unit is the launch: steps within one depend on each other, and most of the scatter lies between launches. A change
is a difference of places on the metric's scale, on most of logs, positive where the metric got worse. It is a
regression only where it is beyond both the tolerance and the noise, and it passes only where twice the tolerance can be
ruled out; whatever is left asks for another launch, and in the end is inconclusive. Both errors are shared out over the
looks (Bonferroni), so that their totals stay below ``FALSE_ALARM_RATE`` and ``MISS_RATE`` however much the looks depend
on each other.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from statistics import median

from pytest_aorta.verdict.statistics.scale import difference
from pytest_aorta.verdict.statistics.variance import Estimate, Variance

# Of unchanged code to be called a regression in a comparison, over all its looks.
FALSE_ALARM_RATE = 5e-4
# The same in an A/B, to which only those come that a stored baseline could not settle.
PAIR_FALSE_ALARM_RATE = 5e-3
# Of a change of twice the tolerance to be passed.
MISS_RATE = 0.05
CONFIDENCE = 0.95
LOOKS = (1, 3, 5, 7, 9, 11, 13)
MIN_LAUNCHES_TO_FAIL = 3
PAIR_LOOKS = (2, 3, 4, 6, 8, 12)
MIN_PAIRS_TO_FAIL = 3
# A tolerance below so many standard deviations of launches leaves most comparisons undecided.
RESOLVED_BY = 2.5
# What a baseline's spread counts for in an A/B, whose own sitting may be another kind of weather,
PAIR_PRIOR_DF = 8.0
# and from which multiple of it on the pairs' own variance shows that it is.
OTHER_WEATHER = 2.0
# A difference of pairs further from their median than so many scales is an outlier.
OUTLIER_SCALES = 3.0
_MAD_TO_DEVIATION = 1.4826
# Of fewer, two that agree would outvote the third.
_ENOUGH_FOR_OUTLIERS = 5


class Outcome(StrEnum):
    """What a comparison can come to."""

    PASS = "pass"  # noqa: S105 - a verdict
    REGRESSION = "regression"
    IMPROVED = "improved"
    INCONCLUSIVE = "inconclusive"
    NOT_APPLICABLE = "not applicable"
    MISSING = "missing"


@dataclass(frozen=True)
class Decision:
    """An outcome with the evidence for it.

    Attributes:
        outcome: None asks for more launches.
        effect: the change as a difference on the scale, positive: worse.
        low, high: its two-sided 95% interval.
        launches: of the candidate; pairs in an A/B.
    """

    outcome: Outcome | None
    effect: float
    low: float
    high: float
    launches: int


def decide_stored(
    candidate: Sequence[float],
    block: Hashable,
    baseline: Estimate,
    tolerance: float,
    *,
    max_launches: int,
    worse: int,
    relative: bool = True,
) -> Decision:
    """Compare launches of one sitting with a stored baseline.

    ``candidate`` holds the metric's places on its scale, of at least one launch; ``worse`` is 1 where a larger metric
    is worse, else -1. ``tolerance`` is ``relative`` where the scale is one of logs, else a difference. A number of
    launches between two looks decides nothing; from the last look that ``max_launches`` allows the outcome is final.
    """
    count = len(candidate)
    looks = [look for look in LOOKS if look <= max_launches] or [1]
    effect = worse * (median(candidate) - baseline.center)
    slower, faster = baseline.variance.slower, baseline.variance.faster
    up, down = (slower, faster) if worse > 0 else (faster, slower)
    own, within = _own_variance(candidate), baseline.variance.within
    both = within.pooled(own)
    # The larger of several estimates, which leaves it the degrees of freedom of both sides.
    noisy = replace(both, value=max(both.value, replace(within, value=up.value).pooled(own).value, own.value))
    alarm = baseline.error(block, count, noisy)
    miss = baseline.error(block, count, replace(within, value=down.value).pooled(own))
    failing = [look for look in looks if look >= MIN_LAUNCHES_TO_FAIL]
    allowed = difference(tolerance, relative=relative)
    # One launch that a neighbour has disturbed must not tip the rest: each has to be slow.
    all_worse = min(worse * (value - baseline.center) for value in candidate) > allowed / 2
    all_better = max(worse * (value - baseline.center) for value in candidate) < -allowed / 2
    rule = _Rule(
        allowed,
        difference(2 * tolerance, relative=relative),
        _fraction(FALSE_ALARM_RATE, failing),
        _miss_fraction(count, looks),
    )
    last = count >= looks[-1]
    looked = last or count in looks
    may_fail = looked and count >= MIN_LAUNCHES_TO_FAIL
    return rule.decide(
        effect,
        alarm,
        miss,
        count,
        can_fail=may_fail and all_worse,
        can_improve=may_fail and all_better,
        can_pass=looked,
        last=last,
    )


def decide_pairs(
    differences: Sequence[float],
    variance: Variance,
    tolerance: float,
    *,
    max_pairs: int,
    worse: int,
    relative: bool = True,
) -> Decision:
    """Compare adjacent launches of candidate and reference, pair by pair.

    ``differences`` are those of the metric's places, candidate less reference, of at least one pair; ``scatter`` is
    what is known beforehand of a single launch's variance; ``relative`` is as in :func:`decide_stored`. Outliers are
    drawn in (Huber's winsorizing, Robust Statistics, 1981), so that one launch of either side moves the mean by little.
    """
    count = len(differences)
    looks = [look for look in PAIR_LOOKS if look <= max_pairs] or [PAIR_LOOKS[0]]
    prior = Variance(2 * variance.value, min(variance.df, PAIR_PRIOR_DF))
    values = _drawn_in([worse * value for value in differences], math.sqrt(prior.value))
    effect = sum(values) / count
    single = _pair_variance(prior, _own_variance(values))
    error = Variance(single.value / count, single.df)
    allowed, doubled = (difference(times * tolerance, relative=relative) for times in (1, 2))
    rule = _Rule(allowed, doubled, _spent(PAIR_FALSE_ALARM_RATE, count, tuple(looks)), MISS_RATE / len(looks))
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


def detectable(
    baseline: Estimate,
    block: Hashable,
    num_launches: int,
    *,
    tolerance: float = 0.0,
    max_launches: int = 1,
    power: float = 0.95,
    relative: bool = True,
) -> float:
    """The smallest slowdown, ``relative`` or a difference, that ``num_launches`` of a sitting tell from the tolerance.

    That is with probability ``power`` and looks up to ``max_launches``. Since fewer than three launches never fail a
    test, it is for them the slowdown that they refuse to pass.
    """
    error = baseline.error(block, num_launches, baseline.variance.within)
    looks = [look for look in LOOKS if look <= max(num_launches, max_launches)]
    failing = [look for look in looks if look >= MIN_LAUNCHES_TO_FAIL]
    may_fail = num_launches >= MIN_LAUNCHES_TO_FAIL
    alarm = _fraction(FALSE_ALARM_RATE, failing) if may_fail else _fraction(MISS_RATE, looks)
    deviation = math.sqrt(error.value)
    beyond = max(difference(tolerance, relative=relative), quantile_t(1 - alarm, error.df) * deviation)
    least = beyond + quantile_t(power, error.df) * deviation
    return math.expm1(least) if relative else least


@dataclass(frozen=True)
class _Rule:
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


def _own_variance(values: Sequence[float]) -> Variance:
    """What launches, or pairs of them, tell of today's noise; nothing where there is only one."""
    count = len(values)
    if count < 2:
        return Variance(0, 0)
    mean = sum(values) / count
    return Variance(sum((value - mean) ** 2 for value in values) / (count - 1), count - 1)


def _fraction(rate: float, looks: Sequence[int]) -> float:
    return rate / max(1, len(looks))


def _miss_fraction(count: int, looks: Sequence[int]) -> float:
    """Half for the first look, where nearly all unchanged code is to pass, and the rest in equal parts."""
    if len(looks) == 1:
        return MISS_RATE
    return MISS_RATE / 2 if count == looks[0] else MISS_RATE / 2 / (len(looks) - 1)


@lru_cache(maxsize=512)
def _spent(rate: float, count: int, looks: tuple[int, ...]) -> float:
    """What is spent of ``rate`` at ``count`` pairs: little early, nearly all of it at the last look.

    The spending function of Lan and DeMets (Biometrika 70, 1983) that resembles O'Brien and Fleming's boundary. Each
    look takes what has been added since the one before.
    """
    from scipy.stats import norm  # costs collection half a second otherwise

    failing = [look for look in looks if look >= MIN_PAIRS_TO_FAIL] or [count]
    earlier = max((look for look in failing if look < count), default=0)
    bound = float(norm.ppf(1 - rate / 2))

    def total(pairs: int) -> float:
        information = min(1.0, pairs / failing[-1])
        return 2 * float(norm.sf(bound / math.sqrt(information))) if information else 0.0

    return total(count) - (0.0 if count > failing[-1] else total(earlier))


def _drawn_in(values: Sequence[float], known: float) -> list[float]:
    """The values, outliers among five or more moved to the edge; ``known`` is the deviation to expect.

    At most a fifth on either side, one at least: what comes more often is no outlier but a second mode.
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
    """Of one pair. Few pairs tell that today is louder than all that was seen before, but not that it is quieter."""
    if own.df and own.value > OTHER_WEATHER * prior.value:
        return own
    pooled = prior.pooled(own)
    return Variance(max(pooled.value, own.value), pooled.df)


@lru_cache(maxsize=4096)
def _quantile_t(fraction: float, df: float) -> float:
    from scipy.stats import t  # costs collection half a second otherwise

    return float(t.ppf(fraction, df))


def quantile_t(fraction: float, df: float) -> float:
    """Student's quantile; degrees of freedom are rounded down to tenths, which errs to the careful side."""
    return _quantile_t(fraction, max(0.5, math.floor(df * 10) / 10))
