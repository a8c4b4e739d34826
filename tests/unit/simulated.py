"""Launches drawn from the model that the rules assume, as logarithms: blocks vary, and launches around them."""

import random
from collections.abc import Callable

from scipy.stats import binom

from pytest_aorta.verdict.statistics.decision import Decision, StoredRule, decide_pairs
from pytest_aorta.verdict.statistics.variance import Estimate, Variance, VarianceComponents, baseline_estimate

WITHIN, BETWEEN = 0.005, 0.007
PRIOR = VarianceComponents(Variance(WITHIN**2, 2), Variance(WITHIN**2, 2), Variance(BETWEEN**2, 6))


def at_most(rate: float, trials: int) -> int:
    """Return the count that ``trials`` trials exceed with a chance of 1 in 1,000, if each hits with ``rate``."""
    return int(binom.ppf(0.999, trials, rate))


def draw_block(rng: random.Random, count: int, change: float = 0.0) -> list[float]:
    center = rng.gauss(change, BETWEEN)
    return [rng.gauss(center, WITHIN) for _ in range(count)]


def draw_estimate(rng: random.Random, sizes: tuple[int, ...]) -> Estimate:
    """Return a baseline estimate of blocks with these numbers of launches."""
    center = {number: draw_block(rng, size) for number, size in enumerate(sizes)}
    return baseline_estimate(center, [list(center.values())], PRIOR)


def until_decided(decide: Callable[[int], Decision], most: int) -> Decision:
    """Return the decision of a comparison that receives another launch until it decides."""
    return next(decision for count in range(1, most + 1) if (decision := decide(count)).outcome is not None)


def run_stored(candidate: list[float], baseline: Estimate, tolerance: float, max_launches: int = 5) -> Decision:
    rule = StoredRule(baseline, "new", tolerance, max_launches)
    return until_decided(lambda count: rule.decide(candidate[:count]), max_launches)


def run_pairs(pairs: list[tuple[float, float]], deviation: float, tolerance: float, max_pairs: int = 6) -> Decision:
    return until_decided(
        lambda count: decide_pairs(pairs[:count], Variance(deviation**2, 4), tolerance, max_pairs=max_pairs, worse=1),
        max_pairs,
    )


def draw_pairs(
    rng: random.Random, count: int, change: float = 0.0, within: float = WITHIN
) -> list[tuple[float, float]]:
    return [(rng.gauss(change, within), rng.gauss(0.0, within)) for _ in range(count)]
