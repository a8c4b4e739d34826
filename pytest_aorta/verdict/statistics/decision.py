"""The outcome of a comparison, and the rule for one look at an effect. Pure functions: no file, no clock, no launch.

The unit of statistics is the launch, because the steps of a launch depend on each other and most of the variance is
between launches. A change is a difference of transformed values (logs, for most metrics), and is positive if the metric
got worse. A change is a regression only if it exceeds both the tolerance and the noise. It passes only if a change of
twice the tolerance can be ruled out. Otherwise another launch is needed. After the last launch, or if further launches
could not decide, the outcome is inconclusive.

A look is a number of launches after which a decision is possible. The error rates are divided over the looks, by
:mod:`stored` and :mod:`pairs`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import lru_cache

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
        return math.expm1(difference) if self is Scale.RELATIVE else difference

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
