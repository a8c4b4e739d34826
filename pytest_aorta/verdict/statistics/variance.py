"""The variance of a metric between launches and between session blocks, from a baseline's launches. Pure functions.

A launch's value is y = ln(metric). Launches vary around the median of their block with variance ``within``, and blocks
vary with variance ``between``: the random-effects model of a meta-analysis (DerSimonian and Laird, Controlled Clinical
Trials 7, 1986). With few launches both variances are shrunk toward a prior, as in the moderated t of Smyth
(Statistical Applications in Genetics and Molecular Biology 3, 2004): variances are averaged, weighted by their degrees
of freedom.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median
from typing import TypeAlias

# Efficiency of a scale estimate from two quantiles, relative to the standard deviation: Mosteller, Ann. Math. Stat. 17,
# 1946.
_QUANTILE_EFFICIENCY = 0.65
_HIGH = 0.9
# From this number of values on, the extreme value is left out, so that no single launch determines a scale.
_ENOUGH_TO_TRIM = 8
# Variance of the median of n normal values, times n.
_MEDIAN_VARIANCE = {1: 1.0, 2: 1.0, 3: 1.345, 4: 1.193, 5: 1.434, 6: 1.288, 7: 1.474, 8: 1.345, 9: 1.494}

# The logs of one revision's launches, grouped by block.
Revision: TypeAlias = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Variance:
    """A variance of logs with its degrees of freedom."""

    value: float
    df: float

    def times(self, factor: float) -> Variance:
        """Return the variance multiplied by ``factor``."""
        return replace(self, value=self.value * factor)

    def pooled(self, *others: Variance) -> Variance:
        """Return the average weighted by degrees of freedom, with their sum; of no degrees of freedom, 0."""
        every = [part for part in (self, *others) if part.df > 0]
        df = sum(part.df for part in every)
        return Variance(sum(part.value * part.df for part in every) / (df or 1), df)


@dataclass(frozen=True)
class VarianceComponents:
    """The variance components of launches, as variances of logs.

    Attributes:
        slower, faster: Variance of the launches of one block, above and below the block's median. The two differ,
            because other jobs on the machine only add time.
        between: Variance between blocks.
    """

    slower: Variance
    faster: Variance
    between: Variance

    @classmethod
    def of(cls, within: float, between: float, df: float) -> VarianceComponents:
        """Build the components from standard deviations, with ``df`` degrees of freedom each; both sides are equal."""
        side = Variance(within**2, df)
        return cls(side, side, Variance(between**2, df))

    @property
    def within(self) -> Variance:
        """Return the variance of launches of one block, both sides together."""
        return self.slower.pooled(self.faster)


@dataclass(frozen=True)
class Estimate:
    """A baseline estimate: the center of a baseline and its uncertainty.

    Attributes:
        center: Transformed value of the metric, for most metrics its logarithm.
        weights: Weight of each block's median in the center; their sum is 1.
        counts: Number of launches of each block.
        variance: Variance components of further launches.
        noise: Variance of the launches of one block as observed, without a prior.
    """

    center: float
    weights: dict[Hashable, float]
    counts: dict[Hashable, int]
    variance: VarianceComponents
    noise: float = 0.0

    @property
    def num_launches(self) -> int:
        """Return the number of the center launches."""
        return sum(self.counts.values())

    def with_launches(self, count: int) -> Estimate:
        """Return the estimate that ``count`` launches, not fewer than now, would give with the variance unchanged."""
        have = self.num_launches
        gained = _QUANTILE_EFFICIENCY * (count - have) / 2
        slower, faster = (replace(side, df=side.df + gained) for side in (self.variance.slower, self.variance.faster))
        counts = {block: math.ceil(known * count / have) for block, known in self.counts.items()}
        return replace(self, counts=counts, variance=replace(self.variance, slower=slower, faster=faster))

    def with_noise(self, factor: float) -> Estimate:
        """Return the estimate for launches of one block that vary ``factor`` times as much."""
        slower, faster = (side.times(factor**2) for side in (self.variance.slower, self.variance.faster))
        return replace(self, variance=replace(self.variance, slower=slower, faster=faster))

    def error(self, block: Hashable, num_launches: int, side: Variance) -> Variance:
        """Return the variance of the median of ``num_launches`` further launches of ``block`` minus the center."""
        launches = median_variance(num_launches) + sum(
            weight**2 * median_variance(self.counts[known]) for known, weight in self.weights.items()
        )
        # The deviation of a block that both the candidate and the baseline contain cancels.
        own = self.weights.get(block, 0.0)
        blocks = (1 - own) ** 2 + sum(weight**2 for known, weight in self.weights.items() if known != block)
        return _summed(side.times(launches), self.variance.between.times(blocks))


def baseline_estimate(
    center_values: Mapping[Hashable, Sequence[float]], revisions: Sequence[Revision], prior: VarianceComponents
) -> Estimate:
    """Return the estimate of a baseline: center from its center launches, variance from all launches of all revisions.

    ``center_values`` maps each block to the transformed values of its center launches, at least one. The center is the
    mean of the blocks' medians, weighted by inverse variance. The centers of different revisions are not compared.
    """
    medians = {block: median(values) for block, values in center_values.items()}
    variance = pooled_variance(revisions, prior)
    between, within = variance.between.value, variance.within.value
    inverse = {
        # 1e-18 gives equal weights to the blocks of a metric that never varied.
        block: 1 / (between + within * median_variance(len(values)) + 1e-18)
        for block, values in center_values.items()
    }
    total = sum(inverse.values())
    weights = {block: value / total for block, value in inverse.items()}
    center = sum(weights[block] * value for block, value in medians.items())
    counts = {block: len(values) for block, values in center_values.items()}
    return Estimate(center, weights, counts, variance, observed(revisions).within.value)


def pooled_variance(revisions: Sequence[Revision], prior: VarianceComponents) -> VarianceComponents:
    """Return the variance of launches grouped by revision and block, pooled with the prior.

    The prior variance between blocks is at least half of the variance of launches.
    """
    own = observed(revisions)
    slower, faster = own.slower.pooled(prior.slower), own.faster.pooled(prior.faster)
    # Disturbances by other jobs say nothing about blocks, so the faster side is used.
    between = replace(prior.between, value=max(prior.between.value, faster.value / 2))
    return VarianceComponents(slower, faster, own.between.pooled(between))


def observed(revisions: Sequence[Revision]) -> VarianceComponents:
    """Return the variance without a prior, with 0 degrees of freedom if no block has two launches."""
    slower, faster = _sides([values for revision in revisions for values in revision if len(values) > 1])
    within = slower.pooled(faster).value
    return VarianceComponents(
        slower, faster, Variance(0, 0).pooled(*(_between(revision, within) for revision in revisions))
    )


def _sides(blocks: Sequence[Sequence[float]]) -> tuple[Variance, Variance]:
    residuals = sorted(value - median(values) for values in blocks for value in values)
    count = len(residuals)
    df = count - len(blocks)
    if df <= 0:
        return Variance(0, 0), Variance(0, 0)
    # The median fitted to each block reduces the residuals.
    scale = _expected_quantile(count) * math.sqrt(df / count)
    fraction = _upper_fraction(count)
    high, low = max(0.0, quantile(residuals, fraction)), max(0.0, -quantile(residuals, 1 - fraction))
    each = _QUANTILE_EFFICIENCY * df / 2
    return Variance((high / scale) ** 2, each), Variance((low / scale) ** 2, each)


def _between(blocks: Sequence[Sequence[float]], within: float) -> Variance:
    medians = own_variance([median(values) for values in blocks])
    expected = within * sum(median_variance(len(values)) for values in blocks) / max(1, len(blocks))
    return Variance(max(0.0, medians.value - expected), medians.df)


def own_variance(values: Sequence[float]) -> Variance:
    """Return the sample variance of values, such as those of launches; fewer than two give no degrees of freedom."""
    count = len(values)
    if count < 2:
        return Variance(0, 0)
    mean = sum(values) / count
    return Variance(sum((value - mean) ** 2 for value in values) / (count - 1), count - 1)


def median_variance(count: int) -> float:
    """Return the variance of the median of ``count`` normal values of unit variance; from 10 values on, its limit."""
    return _MEDIAN_VARIANCE.get(count, math.pi / 2) / count


def quantile(ascending: Sequence[float], fraction: float) -> float:
    """Return a quantile, interpolated linearly between order statistics as in numpy's default."""
    position = fraction * (len(ascending) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (position - below) * (ascending[above] - ascending[below])


def _upper_fraction(count: int) -> float:
    return min(_HIGH, (count - 2) / (count - 1)) if count >= _ENOUGH_TO_TRIM else _HIGH


@lru_cache(maxsize=512)
def _expected_quantile(count: int) -> float:
    """Return the expected upper quantile of ``count`` normal values, by Blom's scores."""
    from scipy.special import ndtri  # imported here, because it would add 0.2 s to collection

    scores = [float(ndtri((rank - 0.375) / (count + 0.25))) for rank in range(1, count + 1)]
    return quantile(scores, _upper_fraction(count))


def _summed(*parts: Variance) -> Variance:
    value = sum(part.value for part in parts)
    # Satterthwaite, Biometrics Bulletin 2, 1946.
    df = value**2 / sum(part.value**2 / part.df for part in parts) if value > 0 else parts[0].df
    return Variance(value, df)
