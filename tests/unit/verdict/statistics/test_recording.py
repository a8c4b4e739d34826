"""A recording that ends by its own noise: errors of the comparisons that follow, by simulation."""

import random
from collections import Counter

import pytest

from pytest_aorta.verdict.statistics.decision import Outcome, Scale, StoredRule
from pytest_aorta.verdict.statistics.variance import Estimate, Variance, VarianceComponents, baseline_estimate

TOLERANCE, MOST, MAX_LAUNCHES = 0.05, 10, 6
SIDE = Variance(0.005**2, 1.0)
PRIOR = VarianceComponents(SIDE, SIDE, Variance(0.005**2, 6.0))


def recorded(
    rng: random.Random, deviation: float, least: int = 3, tolerance: float = TOLERANCE, block: str = "block"
) -> tuple[Estimate, int]:
    """Record launches from ``least`` on until the rule ends, and return their estimate and number."""
    values: list[float] = []
    while True:
        values.append(rng.gauss(0, deviation))
        estimate = baseline_estimate({"block": values}, [[values]], PRIOR)
        rule = StoredRule(estimate, block, tolerance, MAX_LAUNCHES)
        if len(values) >= MOST or (len(values) >= least and rule.is_settled(MOST)):
            return estimate, len(values)


def compared(rng: random.Random, baseline: Estimate, deviation: float, change: float) -> Outcome:
    values: list[float] = []
    while True:
        values.append(Scale.RELATIVE.difference(change) + rng.gauss(0, deviation))
        decision = StoredRule(baseline, "block", TOLERANCE, MAX_LAUNCHES).decide(values)
        if decision.outcome is not None:
            return decision.outcome


@pytest.mark.parametrize(
    ("deviation", "launches"), [(0.0015, (3, 3)), (0.005, (3, 4)), (0.02, (4, 8)), (0.1, (5, 5.5))]
)
def test_number_of_recorded_launches_follows_the_noise(deviation, launches):
    rng = random.Random(1)
    counts = [recorded(rng, deviation)[1] for _ in range(20)]
    assert launches[0] <= sum(counts) / len(counts) <= launches[1]


def test_launches_that_noise_between_hours_outweighs_are_few():
    """Kernel times of a GPU that vary by 0.1% in a session: a tolerance of 2% is decided by other sessions' noise."""
    assert recorded(random.Random(1), 0.001, tolerance=0.02, block="another")[1] == 3


@pytest.mark.extended
@pytest.mark.parametrize(("deviation", "found"), [(0.005, 0.99), (0.01, 0.97), (0.015, 0.8)])
def test_recordings_that_end_early_raise_no_false_alarms(deviation, found):
    rng = random.Random(1)
    same, doubled = Counter(), Counter()
    for _ in range(1000):
        baseline, _ = recorded(rng, deviation)
        same.update(compared(rng, baseline, deviation, 0.0) for _ in range(4))
        doubled[compared(rng, baseline, deviation, 2 * TOLERANCE)] += 1
    assert same[Outcome.REGRESSION] <= 4  # FALSE_ALARM_RATE allows 2 of 4,000; 5 have a probability of 5%
    assert doubled[Outcome.REGRESSION] >= 1000 * found
    assert doubled[Outcome.PASS] <= 50  # MISS_RATE
