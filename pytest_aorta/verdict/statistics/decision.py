"""The rules that turn launches and a tolerance into an outcome. Pure functions: no file, no clock, no launch.

The unit of statistics is the launch, because the steps of a launch depend on each other and most of the variance is
between launches. A change is a difference of transformed values (logs, for most metrics), and is positive if the metric
got worse. A change is a regression only if it exceeds both the tolerance and the noise. It passes only if a change of
twice the tolerance can be ruled out. Otherwise another launch is needed. After the last launch, or if further launches
could not decide, the outcome is inconclusive.

A look is a number of launches after which a decision is possible. Both error rates are divided over the looks
(Bonferroni), so their totals stay below ``FALSE_ALARM_RATE`` and ``MISS_RATE`` however much the looks depend on each
other. An A/B spends its false-alarm rate by the function of Lan and DeMets instead.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from statistics import median

from pytest_aorta.verdict.statistics.scale import difference
from pytest_aorta.verdict.statistics.variance import Estimate, Variance, median_variance

# Probability that unchanged code is called a regression in a comparison, over all looks.
FALSE_ALARM_RATE = 5e-4
# The same for an A/B, which is used only for comparisons that a stored baseline could not decide.
PAIR_FALSE_ALARM_RATE = 5e-3
# Probability that a change of twice the tolerance passes.
MISS_RATE = 0.05
CONFIDENCE = 0.95
LOOKS = (1, 3, 5, 7, 9, 11, 13)
MIN_LAUNCHES_TO_FAIL = 3
PAIR_LOOKS = (2, 3, 4, 6, 8, 12)
MIN_PAIRS_TO_FAIL = 3
# A tolerance of fewer standard deviations of launches leaves most comparisons undecided.
RESOLVED_BY = 2.5
# Further launches count as unable to show a regression if the probability of one is below this.
REGRESSION_CHANCE = 0.01
# The most degrees of freedom of a prior variance in an A/B, because the A/B's block may have another noise regime.
PAIR_PRIOR_DF = 8.0
# A variance of the pairs above this multiple of the prior variance shows another noise regime.
OTHER_REGIME = 2.0
# A pair difference that is this many scales away from the median is an outlier.
OUTLIER_SCALES = 3.0
# Standard deviation of normal values, divided by their median absolute deviation.
_MAD_TO_DEVIATION = 1.4826
# Among fewer values, two that agree would make the third an outlier.
_ENOUGH_FOR_OUTLIERS = 5


class Outcome(StrEnum):
    """The outcome of a comparison."""

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


def decide_stored(
    candidate: Sequence[float],
    block: Hashable,
    baseline: Estimate,
    tolerance: float,
    *,
    max_launches: int,
    worse: int,
    relative: bool = True,
    may_pass: bool = True,
    false_alarm_rate: float = FALSE_ALARM_RATE,
) -> Decision:
    """Compare launches of one session block with a stored baseline.

    Between two looks the outcome is None. The outcome is final at the last look that ``max_launches`` allows, or at an
    earlier look after which no further launch could change it.

    Args:
        candidate: Transformed values of at least one launch.
        block: The session block of these launches.
        baseline: The baseline estimate.
        tolerance: A relative change if ``relative`` is set, else a difference of transformed values.
        max_launches: The most launches of the candidate.
        worse: 1 if a larger value is worse, else -1.
        relative: Whether transformed values are logs.
        may_pass: Whether a pass is possible; False if the baseline is too noisy for its tolerance.
        false_alarm_rate: Probability that unchanged code is called a regression, over all looks.
    """
    rule = _StoredRule(block, baseline, tolerance, _looks(max_launches), worse, relative, may_pass, false_alarm_rate)
    decision = rule.decide(candidate, rule.effect(candidate), _own_variance(candidate), len(candidate))
    if decision.outcome is not None or len(candidate) not in rule.looks:
        return decision
    return replace(decision, outcome=rule.foreseen(candidate))


@dataclass(frozen=True)
class _StoredRule:
    """The rule of :func:`decide_stored`, for launches that were made and for launches that could be made."""

    block: Hashable
    baseline: Estimate
    tolerance: float
    looks: tuple[int, ...]
    worse: int
    relative: bool
    may_pass: bool
    false_alarm_rate: float

    def effect(self, candidate: Sequence[float]) -> float:
        """Return the change of the median, positive if the metric got worse."""
        return self.worse * (median(candidate) - self.baseline.center)

    def decide(
        self, candidate: Sequence[float], effect: float, own: Variance, count: int, *, is_last: bool = False
    ) -> Decision:
        """Return the decision after ``count`` launches with this effect and variance.

        The launches begin with those of ``candidate``. With ``is_last``, the decision is final.
        """
        baseline, worse = self.baseline, self.worse
        slower, faster = baseline.variance.slower, baseline.variance.faster
        up, down = (slower, faster) if worse > 0 else (faster, slower)
        within = baseline.variance.within
        both = within.pooled(own)
        # The largest of several estimates, with the degrees of freedom of both sides.
        noisy = replace(both, value=max(both.value, replace(within, value=up.value).pooled(own).value, own.value))
        alarm = baseline.error(self.block, count, noisy)
        miss = baseline.error(self.block, count, replace(within, value=down.value).pooled(own))
        failing = [look for look in self.looks if look >= MIN_LAUNCHES_TO_FAIL]
        allowed, doubled = (difference(times * self.tolerance, relative=self.relative) for times in (1, 2))
        # A single launch that another job disturbed must not decide, so every launch has to be slow.
        all_worse = min(worse * (value - baseline.center) for value in candidate) > allowed / 2
        all_better = max(worse * (value - baseline.center) for value in candidate) < -allowed / 2
        rates = _fraction(self.false_alarm_rate, failing), _miss_fraction(count, self.looks)
        last = is_last or count >= self.looks[-1]
        looked = last or count in self.looks
        may_fail = looked and count >= MIN_LAUNCHES_TO_FAIL
        return _Rule(allowed, doubled, *rates).decide(
            effect,
            alarm,
            miss,
            count,
            can_fail=may_fail and all_worse,
            can_improve=may_fail and all_better,
            can_pass=looked and self.may_pass,
            last=last,
        )

    def foreseen(self, candidate: Sequence[float]) -> Outcome | None:
        """Return the final outcome after ``candidate`` if further launches are not worth making, or None.

        Further launches are worth making if they could show a regression, even by chance. They are also worth making if
        launches like those so far would show an improvement, or a pass that ``candidate`` alone does not show.
        """
        ahead = {outcome for look in self.looks if look > len(candidate) for outcome in self._ahead(candidate, look)}
        if ahead & {Outcome.REGRESSION, Outcome.IMPROVED}:
            return None
        own, count = _own_variance(candidate), len(candidate)
        now = self.decide(candidate, self.effect(candidate), own, count, is_last=True).outcome
        return None if Outcome.PASS in ahead and now is not Outcome.PASS else now

    def _ahead(self, candidate: Sequence[float], look: int) -> set[Outcome | None]:
        """Return the outcome of a later look if the median does not change, and a regression if one is possible.

        Further launches are assumed to be as noisy as those of the baseline and ``candidate``. A regression is possible
        if the later look would show it after an increase of the median that has the probability ``REGRESSION_CHANCE``.
        """
        count, effect = len(candidate), self.effect(candidate)
        within = self.baseline.variance.within.pooled(_own_variance(candidate))
        moved = within.value * (median_variance(count) + median_variance(look - count))
        increase = quantile_t(1 - REGRESSION_CHANCE, within.df) * math.sqrt(moved)
        own = Variance(within.value, look - 1)
        same, worse = (self.decide(candidate, effect + more, own, look).outcome for more in (0.0, increase))
        return {same} | {worse} & {Outcome.REGRESSION}


def decide_pairs(
    differences: Sequence[float],
    variance: Variance,
    tolerance: float,
    *,
    max_pairs: int,
    worse: int,
    relative: bool = True,
    false_alarm_rate: float = PAIR_FALSE_ALARM_RATE,
) -> Decision:
    """Compare adjacent launches of candidate and reference, pair by pair.

    Outliers are winsorized (Huber, Robust Statistics, 1981), so that a single launch of either side moves the mean only
    slightly.

    Args:
        differences: Transformed value of the candidate minus that of the reference, for at least one pair.
        variance: The prior of a single launch's variance.
        max_pairs: The most pairs.
        tolerance, worse, relative, false_alarm_rate: As in :func:`decide_stored`.
    """
    count = len(differences)
    looks = [look for look in PAIR_LOOKS if look <= max_pairs] or [PAIR_LOOKS[0]]
    prior = Variance(2 * variance.value, min(variance.df, PAIR_PRIOR_DF))
    values = _winsorized([worse * value for value in differences], math.sqrt(prior.value))
    effect = sum(values) / count
    single = _pair_variance(prior, _own_variance(values))
    error = Variance(single.value / count, single.df)
    allowed, doubled = (difference(times * tolerance, relative=relative) for times in (1, 2))
    rule = _Rule(allowed, doubled, _spent(false_alarm_rate, count, tuple(looks)), MISS_RATE / len(looks))
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
    false_alarm_rate: float = FALSE_ALARM_RATE,
) -> float:
    """Return the smallest slowdown beyond the tolerance that ``num_launches`` of a block detect.

    The slowdown is a relative change if ``relative`` is set, else a difference. It is detected with probability
    ``power`` and with looks up to ``max_launches``. Fewer than three launches never fail a test; for them, the result
    is the smallest slowdown that does not pass.
    """
    error = baseline.error(block, num_launches, baseline.variance.within)
    looks = _looks(max(num_launches, max_launches))
    failing = [look for look in looks if look >= MIN_LAUNCHES_TO_FAIL]
    may_fail = num_launches >= MIN_LAUNCHES_TO_FAIL
    alarm = _fraction(false_alarm_rate, failing) if may_fail else _fraction(MISS_RATE, looks)
    deviation = math.sqrt(error.value)
    beyond = max(difference(tolerance, relative=relative), quantile_t(1 - alarm, error.df) * deviation)
    least = beyond + quantile_t(power, error.df) * deviation
    return math.expm1(least) if relative else least


def least_tolerance(
    baseline: Estimate, block: Hashable, *, max_launches: int = 1, power: float = 0.9, relative: bool = True
) -> float:
    """Return the smallest tolerance at which unchanged code passes with probability ``power``.

    The tolerance is a relative change if ``relative`` is set, else a difference. A comparison may use up to
    ``max_launches`` launches of the block.
    """
    looks, least = _looks(max_launches), math.inf
    for look in looks:
        error = baseline.error(block, look, baseline.variance.within)
        quantiles = quantile_t(1 - _miss_fraction(look, looks), error.df) + quantile_t(power, error.df)
        least = min(least, quantiles * math.sqrt(error.value))
    return (math.expm1(least) if relative else least) / 2


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
    """Return the sample variance of launches or of pair differences, with 0 degrees of freedom for a single value."""
    count = len(values)
    if count < 2:
        return Variance(0, 0)
    mean = sum(values) / count
    return Variance(sum((value - mean) ** 2 for value in values) / (count - 1), count - 1)


def last_look(max_launches: int) -> int:
    """Return the number of launches after which every outcome is final."""
    return _looks(max_launches)[-1]


def _looks(max_launches: int) -> tuple[int, ...]:
    return tuple(look for look in LOOKS if look <= max_launches) or (1,)


def _fraction(rate: float, looks: Sequence[int]) -> float:
    return rate / max(1, len(looks))


def _miss_fraction(count: int, looks: Sequence[int]) -> float:
    """Return the miss rate of a look: half for the first look, where most unchanged code passes; equal parts after."""
    if len(looks) == 1:
        return MISS_RATE
    return MISS_RATE / 2 if count == looks[0] else MISS_RATE / 2 / (len(looks) - 1)


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


@lru_cache(maxsize=4096)
def _quantile_t(fraction: float, df: float) -> float:
    from scipy.special import stdtrit  # importing scipy.stats takes more than twice as long

    if fraction in (0.0, 1.0):  # stdtrit returns NaN
        return math.inf if fraction else -math.inf
    return float(stdtrit(df, fraction))


def quantile_t(fraction: float, df: float) -> float:
    """Return a quantile of Student's t. Degrees of freedom are rounded down to tenths, which is conservative."""
    return _quantile_t(fraction, max(0.5, math.floor(df * 10) / 10))
