"""Simulated kinds of noise between launches, and a week of a suite in each; percent of the step time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from pytest_aorta.verdict.metrics import METRICS
from pytest_aorta.verdict.noise import default_variance
from pytest_aorta.verdict.statistics.decision import Outcome, StoredRule, decide_pairs
from pytest_aorta.verdict.statistics.variance import (
    Revision,
    Variance,
    VarianceComponents,
    baseline_estimate,
)

K, MAX_LAUNCHES, MAX_PAIRS, TOLERANCE = 10, 5, 6, 0.05
TESTS_A_WEEK = 50 * 50
Launches = Callable[[], float]


def _normal(rng: np.random.Generator, between: float, within: float) -> Launches:
    center = rng.normal(0, between)
    return lambda: center + rng.normal(0, within)


def _bimodal(rng: np.random.Generator) -> Launches:
    base = _normal(rng, 0.3, 0.4)
    return lambda: base() + (1.3 if rng.random() < 0.5 else -1.3)


def _stragglers(rng: np.random.Generator) -> Launches:
    base = _normal(rng, 0.25, 0.25)
    return lambda: base() + (rng.exponential(2.0) if rng.random() < 0.05 else 0.0)


def _neighbour(rng: np.random.Generator) -> Launches:
    base = _normal(rng, 0.3, 0.4)
    return lambda: base() + (rng.uniform(4, 24) if rng.random() < 0.085 else 0.0)


def _thermal(rng: np.random.Generator) -> Launches:
    base, launched = _normal(rng, 0.3, 0.3), iter(range(1000))
    return lambda: base() + 1.6 * (1 - math.exp(-(next(launched) + 1) / 3))


# Each value makes a new block; the total standard deviations are .36, .87, 1.8, 1.4, .65, 4.3, .78, as in the study.
REGIMES: dict[str, Callable[[np.random.Generator], Launches]] = {
    "quiet": lambda rng: _normal(rng, 0.25, 0.25),
    "typical": lambda rng: _normal(rng, 0.63, 0.6),
    "noisy": lambda rng: _normal(rng, 1.25, 1.3),
    "bimodal": _bimodal,
    "stragglers": _stragglers,
    "neighbour": _neighbour,
    "thermal": _thermal,
}


def week(name: str, trials: int, rng: np.random.Generator) -> str:
    """Return table cells: false alarms per week, launches, inconclusive, power at twice the tolerance, then by A/B.

    Each test's baseline is from one block, and each commit has a block of its own; there are ten times ``trials``
    commits.
    """
    new_block, prior = REGIMES[name], default_variance(METRICS["step_time_p50"], "cuda")
    null: dict[Outcome, int] = defaultdict(int)
    null_ab: dict[Outcome, int] = defaultdict(int)
    spent, spent_ab, flagged, flagged_ab, changed = 0, 0, 0, 0, max(100, trials // 5)
    for _ in range(10 * trials):
        outcome, launches = _commit(new_block, prior, 0.0, rng)
        null[outcome] += 1
        spent += launches
        outcome, launches = _commit(new_block, prior, 0.0, rng, by_pairs=True)
        null_ab[outcome] += 1
        spent_ab += launches
    for _ in range(changed):
        slower = math.log1p(2 * TOLERANCE)
        flagged += _commit(new_block, prior, slower, rng)[0] is Outcome.REGRESSION
        flagged_ab += _commit(new_block, prior, slower, rng, by_pairs=True)[0] is Outcome.REGRESSION
    total = 10 * trials
    return " | ".join(
        f"{TESTS_A_WEEK * outcomes[Outcome.REGRESSION] / total:.2f} | {launches / total:.2f} | "
        f"{100 * outcomes[Outcome.INCONCLUSIVE] / total:.2f} | {100 * found / changed:.0f}"
        for outcomes, launches, found in ((null, spent, flagged), (null_ab, spent_ab, flagged_ab))
    )


def _revision(launch: Launches) -> Revision:
    return [[launch() / 100 for _ in range(K)]]


def _commit(
    new_block: Callable[[np.random.Generator], Launches],
    prior: VarianceComponents,
    change: float,
    rng: np.random.Generator,
    *,
    by_pairs: bool = False,
) -> tuple[Outcome, int]:
    """Return the outcome and the number of launches; ``by_pairs`` settles by A/B what the first launch leaves open."""
    revision = _revision(new_block(rng))
    stored = baseline_estimate({"recorded": revision[0]}, [revision], prior)
    launch, logs = new_block(rng), []
    while True:
        logs.append(launch() / 100 + change)
        decision = StoredRule(stored, "today", TOLERANCE, MAX_LAUNCHES).decide(logs)
        if decision.outcome is not None:
            return decision.outcome, len(logs)
        if by_pairs:
            return _pairs(launch, change, stored.variance.within)


def _pairs(launch: Launches, change: float, variance: Variance) -> tuple[Outcome, int]:
    pairs: list[tuple[float, float]] = []
    while True:
        pairs.append((launch() / 100 + change, launch() / 100))
        decision = decide_pairs(pairs, variance, TOLERANCE, max_pairs=MAX_PAIRS, worse=1)
        if decision.outcome is not None:
            return decision.outcome, 1 + 2 * len(pairs)
