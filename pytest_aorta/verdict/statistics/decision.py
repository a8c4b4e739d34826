"""The outcome of a comparison: the rule for one look, pairs of an A/B, and a stored baseline with what it can detect.

Pure functions: no file, no clock, no launch.

The unit of statistics is the launch, because the steps of a launch depend on each other and most of the variance is
between launches. A change is a difference of transformed values (logs, for most metrics), and is positive if the metric
got worse. A change is a regression only if it exceeds both the tolerance and the noise. It passes only if a change of
twice the tolerance can be ruled out. Otherwise another launch is needed. After the last launch, or if further launches
could not decide, the outcome is inconclusive.

A look is a number of launches after which a decision is possible. Both error rates are divided over the looks
(Bonferroni), so their totals stay below ``FALSE_ALARM_RATE`` and ``MISS_RATE`` however much the looks depend on each
other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from functools import cached_property, lru_cache
from itertools import accumulate
from statistics import median

from pytest_aorta.verdict.statistics.variance import Estimate, Variance, median_variance, own_variance

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
    CHANGED = "changed"
    """Improved beside a regression, whose cause it may be."""
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
class _Rule:
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
# The last two are those of a search for a commit.
PAIR_LOOKS = (2, 3, 4, 6, 8, 12, 18, 24)
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
        tolerance, worse, scale: As in :class:`StoredRule`.
    """
    count = len(pairs)
    looks = [look for look in PAIR_LOOKS if look <= max_pairs] or [PAIR_LOOKS[0]]
    prior = Variance(2 * variance.value, min(variance.df, PAIR_PRIOR_DF))
    values = _winsorized([worse * (here - there) for here, there in pairs], math.sqrt(prior.value))
    own, is_slower, is_faster = own_variance(values), True, True
    early = sum(MIN_LAUNCHES_TO_FAIL <= look < PAIRS_WITHOUT_PRIOR for look in looks)
    late = sum(look >= PAIRS_WITHOUT_PRIOR for look in looks)
    alarm_rate = PAIR_FALSE_ALARM_RATE / 2 / max(1, early)
    if count < PAIRS_WITHOUT_PRIOR:
        single = _pair_variance(prior, own)
    else:
        single, alarm_rate = own, _BY_RANKS
        most = most_not_worse(count, PAIR_FALSE_ALARM_RATE / 2 / max(1, late))
        is_slower, is_faster = (
            num_not_worse([(sign * here, sign * there) for here, there in pairs]) <= most for sign in (worse, -worse)
        )
    error = Variance(single.value / count, single.df)
    rule = _Rule(tolerance, scale, alarm_rate, MISS_RATE / len(looks), looks)
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


# Probability that unchanged code is called a regression in a comparison, over all looks.
FALSE_ALARM_RATE = 5e-4
LOOKS = (1, 3, 5, 7, 9, 11, 13)
# A tolerance of fewer standard deviations of launches leaves most comparisons undecided.
RESOLVED_BY = 2.5
# The printed limit of a baseline is detected with this probability.
POWER = 0.8
PASS_POWER = 0.9
# Further launches count as unable to show a regression if the probability of one is below this.
REGRESSION_CHANCE = 0.01


def allowed_looks(max_launches: int) -> tuple[int, ...]:
    """Return the numbers of launches after which a decision is possible; after the last, every outcome is final."""
    return tuple(look for look in LOOKS if look <= max_launches) or (1,)


@dataclass(frozen=True)
class StoredRule:
    """The rule by which launches of one session block are compared with a stored baseline.

    Attributes:
        baseline: The baseline estimate.
        block: The session block of the launches.
        tolerance: A change on ``scale``.
        max_launches: The most launches of the candidate; the last look that they allow is final.
        worse: 1 if a larger value is worse, else -1.
        scale: The scale on which the values were transformed.
    """

    baseline: Estimate
    block: Hashable
    tolerance: float = 0.0
    max_launches: int = 1
    worse: int = 1
    scale: Scale = Scale.RELATIVE

    @cached_property
    def looks(self) -> tuple[int, ...]:
        """Return the numbers of launches after which a decision is possible."""
        return allowed_looks(self.max_launches)

    def decide(self, candidate: Sequence[float]) -> Decision:
        """Return the decision on the transformed values of at least one launch.

        Between two looks the outcome is None. It is final at the last look, or at an earlier one after which no further
        launch could change it.
        """
        decision = self._decide(candidate, self.effect(candidate), own_variance(candidate), len(candidate))
        if decision.outcome is not None or len(candidate) not in self.looks:
            return decision
        return replace(decision, outcome=self.foreseen(candidate))

    def effect(self, candidate: Sequence[float]) -> float:
        """Return the change of the median, positive if the metric got worse."""
        return self.worse * (median(candidate) - self.baseline.center)

    def _decide(
        self, candidate: Sequence[float], effect: float, own: Variance, count: int, *, is_last: bool = False
    ) -> Decision:
        """Return the decision after ``count`` launches with this effect and variance.

        The launches begin with those of ``candidate``. With ``is_last``, the decision is final.
        """
        baseline, worse = self.baseline, self.worse
        alarm, miss = self._errors(own, count)
        rule = self._rule(count)
        # A single launch that another job disturbed must not decide, so every launch has to be slow.
        is_slower = min(worse * (value - baseline.center) for value in candidate) > rule.allowed / 2
        is_faster = max(worse * (value - baseline.center) for value in candidate) < -rule.allowed / 2
        return rule.decide(effect, alarm, miss, count, is_slower=is_slower, is_faster=is_faster, is_last=is_last)

    def _rule(self, count: int) -> _Rule:
        failing = [look for look in self.looks if look >= MIN_LAUNCHES_TO_FAIL]
        alarm_rate = FALSE_ALARM_RATE / max(1, len(failing))
        return _Rule(self.tolerance, self.scale, alarm_rate, self._miss_rate(count), self.looks)

    def _errors(self, own: Variance, count: int) -> tuple[Variance, Variance]:
        """Return the variance of the effect of ``count`` launches, for a regression and for a pass."""
        slower, faster = self.baseline.variance.slower, self.baseline.variance.faster
        up, down = (slower, faster) if self.worse > 0 else (faster, slower)
        within = self.baseline.variance.within
        both = within.pooled(own)
        # The largest of several estimates, with the degrees of freedom of both sides.
        noisy = replace(both, value=max(both.value, replace(within, value=up.value).pooled(own).value, own.value))
        alarm = self.baseline.error(self.block, count, noisy)
        return alarm, self.baseline.error(self.block, count, replace(within, value=down.value).pooled(own))

    def foreseen(self, candidate: Sequence[float]) -> Outcome | None:
        """Return the final outcome after ``candidate`` if further launches are not worth making, or None.

        Further launches are worth making if they could show a regression, even by chance. They are also worth making if
        launches like those so far would show an improvement, or a pass that ``candidate`` alone does not show.
        """
        ahead = {outcome for look in self.looks if look > len(candidate) for outcome in self._ahead(candidate, look)}
        if ahead & {Outcome.REGRESSION, Outcome.IMPROVED}:
            return None
        own, count = own_variance(candidate), len(candidate)
        now = self._decide(candidate, self.effect(candidate), own, count, is_last=True).outcome
        return None if Outcome.PASS in ahead and now is not Outcome.PASS else now

    def _ahead(self, candidate: Sequence[float], look: int) -> set[Outcome | None]:
        """Return the outcome of a later look if the median does not change, and a regression if one is possible.

        Further launches are assumed to be as noisy as those of the baseline and ``candidate``. A regression is possible
        if the later look would show it after an increase of the median that has the probability ``REGRESSION_CHANCE``.
        """
        count, effect = len(candidate), self.effect(candidate)
        within = self.baseline.variance.within.pooled(own_variance(candidate))
        moved = within.value * (median_variance(count) + median_variance(look - count))
        increase = quantile_t(1 - REGRESSION_CHANCE, within.df) * math.sqrt(moved)
        own = Variance(within.value, look - 1)
        same, worse = (self._decide(candidate, effect + more, own, look).outcome for more in (0.0, increase))
        return {same} | {worse} & {Outcome.REGRESSION}

    def detectable(self, num_launches: int) -> float:
        """Return the smallest change for the worse, on the scale, that ``num_launches`` of the block mostly detect.

        Launches that are as noisy as those of the baseline show the change with probability ``POWER`` in a comparison
        of up to ``max_launches``.
        """
        rule = replace(self, max_launches=max(num_launches, self.max_launches))
        own = Variance(self.baseline.noise, num_launches - 1)
        error = self.baseline.error(self.block, num_launches, replace(self.baseline.variance.within, value=own.value))
        beyond = rule._rule(num_launches).beyond(self._errors(own, num_launches)[0])
        return self.scale.change(beyond + quantile_t(POWER, error.df) * math.sqrt(error.value))

    def with_launches(self, count: int) -> StoredRule:
        """Return the rule as if the baseline had ``count`` launches, as in :meth:`Estimate.with_launches`."""
        return replace(self, baseline=self.baseline.with_launches(count))

    def least_tolerance(self) -> float:
        """Return the smallest tolerance, on the scale, at which unchanged code passes with ``PASS_POWER``."""
        least = math.inf
        for look in self.looks:
            error = self.baseline.error(self.block, look, self.baseline.variance.within)
            quantiles = quantile_t(1 - self._miss_rate(look), error.df) + quantile_t(PASS_POWER, error.df)
            least = min(least, quantiles * math.sqrt(error.value))
        return self.scale.change(least) / 2

    def _enforced(self, noise: float = 1.0) -> float:
        """Return the tolerance of which a comparison passes the same code and finds the double.

        Each with the power of :meth:`least_tolerance` and :meth:`detectable`, for launches that vary ``noise`` times
        as much.
        """
        rule = replace(self, baseline=self.baseline.with_noise(noise))
        least, look = rule.least_tolerance(), self.looks[-1]
        return least if look < MIN_LAUNCHES_TO_FAIL else max(least, rule.detectable(look) / 2)

    def is_settled(self, most: int) -> bool:
        """Return whether a baseline that is being recorded needs no further launch, of at most ``most``.

        The tolerance is enforced now, or even ``most`` launches would not enforce it by :data:`UNSURE`, or noise
        between sessions, which further launches leave as it is, exceeds it alone. A deviation that decides when to
        stop is biased toward small values (Stein, Ann. Math. Stat. 16, 1945: the first sample has to bear the
        uncertainty of the deviation). Here the quantiles of Student's t with the degrees of freedom of the launches so
        far bear it, so few launches stop only if they are quieter than the tolerance by a factor of their quantile.
        """
        is_few, tolerance = self.baseline.num_launches < MIN_LAUNCHES, self.tolerance
        if self._enforced(UNSURE if is_few else 1.0) <= tolerance:
            return True
        if not is_few and self.with_launches(most)._enforced() > UNSURE * tolerance:
            return True
        # More launches would not show that these are too noisy to be kept.
        deviation = UNSURE * RESOLVED_BY * math.sqrt(self.baseline.variance.within.value)
        return deviation <= self.scale.difference(tolerance) and self._enforced(0.0) > tolerance

    def _miss_rate(self, count: int) -> float:
        """Return the miss rate of a look: half for the first, where most unchanged code passes; equal parts after."""
        if len(self.looks) == 1:
            return MISS_RATE
        return MISS_RATE / 2 if count == self.looks[0] else MISS_RATE / 2 / (len(self.looks) - 1)


# From this number of launches on, a recording can end because its metric is too noisy; before, the prior weighs more.
MIN_LAUNCHES = 5
# The deviation of five to ten launches is known to about this factor (Mosteller's estimate of variance.py).
UNSURE = 1.5
