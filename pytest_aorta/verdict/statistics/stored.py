"""Comparison of launches with a stored baseline, and what such a comparison can detect.

Both error rates are divided over the looks (Bonferroni), so their totals stay below ``FALSE_ALARM_RATE`` and
``MISS_RATE`` however much the looks depend on each other.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from pytest_aorta.verdict.statistics.decision import (
    MIN_LAUNCHES_TO_FAIL,
    MISS_RATE,
    Decision,
    Outcome,
    Rule,
    Scale,
    own_variance,
    quantile_t,
)
from pytest_aorta.verdict.statistics.variance import Estimate, Variance, median_variance, quantile

# Probability that unchanged code is called a regression in a comparison, over all looks.
FALSE_ALARM_RATE = 5e-4
LOOKS = (1, 3, 5, 7, 9, 11, 13)
# A tolerance of fewer standard deviations of launches leaves most comparisons undecided.
RESOLVED_BY = 2.5
# The printed limit of a baseline is detected with this probability, by so many resamplings.
POWER = 0.8
_DRAWS = 200
# Further launches count as unable to show a regression if the probability of one is below this.
REGRESSION_CHANCE = 0.01


def decide_stored(
    candidate: Sequence[float],
    block: Hashable,
    baseline: Estimate,
    tolerance: float,
    *,
    max_launches: int,
    worse: int,
    scale: Scale = Scale.RELATIVE,
    false_alarm_rate: float = FALSE_ALARM_RATE,
) -> Decision:
    """Compare launches of one session block with a stored baseline.

    Between two looks the outcome is None. The outcome is final at the last look that ``max_launches`` allows, or at an
    earlier look after which no further launch could change it.

    Args:
        candidate: Transformed values of at least one launch.
        block: The session block of these launches.
        baseline: The baseline estimate.
        tolerance: A change on ``scale``.
        max_launches: The most launches of the candidate.
        worse: 1 if a larger value is worse, else -1.
        scale: The scale on which the values were transformed.
        false_alarm_rate: Probability that unchanged code is called a regression, over all looks.
    """
    rule = _StoredRule(block, baseline, tolerance, _looks(max_launches), worse, scale, false_alarm_rate)
    decision = rule.decide(candidate, rule.effect(candidate), own_variance(candidate), len(candidate))
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
    scale: Scale
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
        alarm, miss = self._errors(own, count)
        rule = self._rule(count)
        # A single launch that another job disturbed must not decide, so every launch has to be slow.
        is_slower = min(worse * (value - baseline.center) for value in candidate) > rule.allowed / 2
        is_faster = max(worse * (value - baseline.center) for value in candidate) < -rule.allowed / 2
        return rule.decide(effect, alarm, miss, count, is_slower=is_slower, is_faster=is_faster, is_last=is_last)

    def least_detected(self, candidate: Sequence[float]) -> float:
        """Return the smallest further change, a difference of transformed values, that makes a regression of launches.

        ``candidate`` contains the values without this change.
        """
        rule, count = self._rule(len(candidate)), len(candidate)
        beyond = rule.beyond(self._errors(own_variance(candidate), count)[0])
        best = min(self.worse * (value - self.baseline.center) for value in candidate)
        return max(beyond - self.effect(candidate), rule.allowed / 2 - best)

    def _rule(self, count: int) -> Rule:
        failing = [look for look in self.looks if look >= MIN_LAUNCHES_TO_FAIL]
        alarm_rate = self.false_alarm_rate / max(1, len(failing))
        return Rule(self.tolerance, self.scale, alarm_rate, _miss_fraction(count, self.looks), self.looks)

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
        now = self.decide(candidate, self.effect(candidate), own, count, is_last=True).outcome
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
        same, worse = (self.decide(candidate, effect + more, own, look).outcome for more in (0.0, increase))
        return {same} | {worse} & {Outcome.REGRESSION}


def detectable(
    baseline: Estimate,
    block: Hashable,
    num_launches: int,
    *,
    tolerance: float = 0.0,
    max_launches: int = 1,
    worse: int = 1,
    scale: Scale = Scale.RELATIVE,
    false_alarm_rate: float = FALSE_ALARM_RATE,
) -> float:
    """Return the smallest change for the worse, on ``scale``, that ``num_launches`` of a block mostly detect.

    At least three launches, resampled from those of the baseline, detect the change with probability ``POWER`` in a
    comparison of up to ``max_launches``.
    """
    looks = _looks(max(num_launches, max_launches))
    rule = _StoredRule(block, baseline, tolerance, looks, worse, scale, false_alarm_rate)
    rng = random.Random(0)  # noqa: S311 - the same text for the same baseline
    draws = (rule.least_detected(baseline.resampled(block, num_launches, rng)) for _ in range(_DRAWS))
    return scale.change(max(0.0, quantile(sorted(draws), POWER)))


def least_tolerance(
    baseline: Estimate, block: Hashable, *, max_launches: int = 1, power: float = 0.9, scale: Scale = Scale.RELATIVE
) -> float:
    """Return the smallest tolerance at which unchanged code passes with probability ``power``.

    The tolerance is a change on ``scale``. A comparison may use up to
    ``max_launches`` launches of the block.
    """
    looks, least = _looks(max_launches), math.inf
    for look in looks:
        error = baseline.error(block, look, baseline.variance.within)
        quantiles = quantile_t(1 - _miss_fraction(look, looks), error.df) + quantile_t(power, error.df)
        least = min(least, quantiles * math.sqrt(error.value))
    return scale.change(least) / 2


def last_look(max_launches: int) -> int:
    """Return the number of launches after which every outcome is final."""
    return _looks(max_launches)[-1]


def _looks(max_launches: int) -> tuple[int, ...]:
    return tuple(look for look in LOOKS if look <= max_launches) or (1,)


def _miss_fraction(count: int, looks: Sequence[int]) -> float:
    """Return the miss rate of a look: half for the first look, where most unchanged code passes; equal parts after."""
    if len(looks) == 1:
        return MISS_RATE
    return MISS_RATE / 2 if count == looks[0] else MISS_RATE / 2 / (len(looks) - 1)
