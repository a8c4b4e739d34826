"""Probabilistic bisection: the posterior over the first commit with a change, the next commit, and confirmation.

Commits are numbered from 1, in order; commit 0 is the good one. If commit k introduces a change, every commit from k on
has the change. Before any probe, a change is as likely as no change, and each commit is equally likely to introduce it.

Each probe halves the posterior, which is Horstein's rule (IEEE Trans. Information Theory 9, 1963). Waeber, Frazier and
Henderson (SIAM J. Control and Optimization 51, 2013) prove that the error decreases exponentially with the number of
probes. Both papers assume that a probe's error rate is known. Here the size of the change and the noise are unknown, so
the posterior is integrated over both. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from pytest_aorta.verdict.statistics.decision import PAIRS_WITHOUT_PRIOR, num_not_worse, own_variance
from pytest_aorta.verdict.statistics.variance import Variance

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Probability that no commit has a change, before any probe.
NONE_PRIOR = 0.5
# Degrees of freedom of Student's t, the distribution of one pair's noise. With few of them, a disturbed launch has
# little weight, however far off it is.
TAILS_DF = 4.0
# The most degrees of freedom of the prior variance, as in an A/B.
PRIOR_DF = 8.0
# The least variance of a pair: a metric that never varied in the launches of a prior has none, but a density needs one.
_LEAST_VARIANCE = 1e-18
# Number of points of the grid of changes and noises, and half the grid's width: in standard errors, and in logs.
_CHANGES, _NOISES = 81, 25
_CHANGE_WIDTH, _NOISE_WIDTH = 6.0, 3.0
# Logarithm of the probability that a probe of bits is wrong. Only a faulty launch makes it wrong.
_LOG_BIT_ERROR = -50.0
# Commits near one that does not start often do not start either, so the worth of a neighbor is reduced by this.
_NEAR_SKIPPED = 0.5


# Launches of each commit at a look -> the most pairs of launches, one of each commit, in which the named commit may be
# no worse. Probabilities of an error: 0.40%, 0.15%, 0.18% and 0.26%.
LOOKS = {5: 0, 8: 5, 12: 23, 20: 98}


@dataclass(frozen=True)
class Posterior:
    """The posterior probabilities.

    Attributes:
        first: ``first[k - 1]`` is the probability that commit k is the first with the change.
        none: Probability that no commit has a change.
        change: Median of the change, on the scale of the differences; 0 if bits are compared.
        low, high: Ends of the central 95% interval of the change.
    """

    first: tuple[float, ...]
    none: float
    change: float = 0.0
    low: float = 0.0
    high: float = 0.0

    def has_change(self, commit: int) -> float:
        """Return the probability that ``commit`` has the change."""
        return min(1.0, math.fsum(self.first[:commit]))


@dataclass(frozen=True)
class Suspects:
    """Consecutive commits that no probe can distinguish, because all but the last do not start.

    Attributes:
        commits: Numbers of the commits.
        probability: Probability that the first commit with the change is one of them.
    """

    commits: tuple[int, ...]
    probability: float


def posterior_of_bits(num_commits: int, changed: Mapping[int, bool]) -> Posterior:
    """Return the posterior if each probe shows without noise whether a commit has the change.

    ``changed`` maps the number of each probed commit to whether it has the change.
    """
    probed = sorted(changed)
    # Hypothesis number j: the probed commits from index j on have the change.
    wrong = [
        sum(changed[commit] != (place >= number) for place, commit in enumerate(probed))
        for number in range(len(probed) + 1)
    ]
    first, none = _by_commit(num_commits, probed, [_LOG_BIT_ERROR * count for count in wrong])
    return Posterior(first, none)


def posterior_of_pairs(
    num_commits: int, differences: Mapping[int, Sequence[float]], variance: Variance, least: float
) -> Posterior:
    """Return the posterior if each pair shows the difference between a commit and the good commit, with noise.

    Args:
        num_commits: Number of commits after the good one.
        differences: Number of a commit -> transformed values of the commit minus those of the good commit, pair by
            pair. The last commit has at least one pair.
        variance: Prior of a single launch's variance. As in an A/B, twelve pairs of the last commit replace it.
        least: The smallest change to search for, on the scale of the differences, with the sign of the change.
    """
    import numpy as np  # imported here, since importing numpy would add 0.1 s to every collection

    known = variance.times(2)
    if len(differences[num_commits]) >= PAIRS_WITHOUT_PRIOR:
        known = own_variance(differences[num_commits])
    prior = Variance(max(known.value, _LEAST_VARIANCE), min(known.df, PRIOR_DF))
    changes, noises, weights = _grid(differences[num_commits], prior, least)
    probed = sorted(differences)
    without = [_log_likelihood(differences[commit], np.zeros(1), noises) for commit in probed]
    having = [_log_likelihood(differences[commit], changes, noises) for commit in probed]
    # Hypothesis number j: the probed commits from index j on have the change.
    totals = [weights + sum(without[:place]) + sum(having[place:]) for place in range(len(probed) + 1)]
    first, none = _by_commit(num_commits, probed, [float(np.logaddexp.reduce(total, axis=None)) for total in totals])
    over_noise = np.logaddexp.reduce(np.logaddexp.reduce(np.stack(totals[:-1]), axis=0), axis=1)
    mass = np.exp(over_noise - over_noise.max())
    mass /= mass.sum()
    half = (changes[-1] - changes[0]) / max(1, len(changes) - 1) / 2
    edges, below = np.append(changes - half, changes[-1] + half), np.append(0.0, np.cumsum(mass))
    low, middle, high = (float(np.interp(fraction, below, edges)) for fraction in (0.025, 0.5, 0.975))
    return Posterior(first, none, middle, low, high)


def _grid(
    at_last: Sequence[float], prior: Variance, least: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return the grid: changes ``[C]``, noises as standard deviations ``[N]``, and log prior weights ``[C, N]``."""
    import numpy as np

    center = median(at_last)
    own = max(abs(value - center) for value in at_last)
    deviation = max(math.sqrt(prior.value), own)
    width = _CHANGE_WIDTH * deviation / math.sqrt(len(at_last))
    sign = math.copysign(1.0, least)
    changes = np.linspace(center - width, center + width, _CHANGES, dtype=np.float64)
    changes = changes[sign * changes >= abs(least)] if (sign * changes >= abs(least)).any() else np.array([least])
    logs = math.log(prior.value) / 2 + np.linspace(-_NOISE_WIDTH, _NOISE_WIDTH, _NOISES, dtype=np.float64)
    # The scaled inverse chi-squared prior of a variance, as a density of its logarithm.
    weights = -prior.df * logs - prior.df * prior.value / 2 * np.exp(-2 * logs)
    weights -= np.logaddexp.reduce(weights)
    return changes, np.exp(logs), np.tile(weights - math.log(len(changes)), (len(changes), 1))


def _log_likelihood(
    values: Sequence[float], changes: NDArray[np.float64], noises: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the log likelihood ``[C, N]`` of the values, under Student's t with the noise as its scale."""
    import numpy as np

    distances = (np.asarray(values)[:, None, None] - changes[None, :, None]) / noises[None, None, :]
    logs = -(TAILS_DF + 1) / 2 * np.log1p(distances**2 / TAILS_DF)
    total: NDArray[np.float64] = logs.sum(axis=0) - len(values) * np.log(noises)
    return total


def _by_commit(num_commits: int, probed: Sequence[int], logs: Sequence[float]) -> tuple[tuple[float, ...], float]:
    """Return the probability that each commit is the first with the change, and the probability of no change.

    ``logs`` contains the log likelihood of each hypothesis. It is the same for all commits after one probed commit, up
    to the next probed commit.
    """
    bounds = [0, *probed]
    most = max(logs)
    each = [math.exp(log - most) * (1 - NONE_PRIOR) / num_commits for log in logs]
    first = [each[place] for place, (begin, end) in enumerate(pairwise(bounds)) for _ in range(end - begin)]
    after = num_commits - bounds[-1]
    first += [each[-1]] * after
    none = math.exp(logs[-1] - most) * NONE_PRIOR
    total = math.fsum(first) + none
    return tuple(value / total for value in first), none / total


def suspects(posterior: Posterior, skipped: Collection[int]) -> list[Suspects]:
    """Return the commits in groups that probes can distinguish; ``skipped`` are the commits that do not start.

    The last commit must not be skipped.
    """
    testable = [number for number in range(1, len(posterior.first) + 1) if number not in skipped]
    return [
        Suspects(tuple(range(begin + 1, end + 1)), min(1.0, math.fsum(posterior.first[begin:end])))
        for begin, end in pairwise([0, *testable])
    ]


def next_commit(posterior: Posterior, skipped: Collection[int], allowed: Collection[int] | None = None) -> int:
    """Return the commit to probe: the one that best halves the posterior, with less worth near skipped commits.

    ``allowed`` limits the commits; None allows every commit that is not skipped.
    """
    numbers = range(1, len(posterior.first) + 1) if allowed is None else allowed
    candidates = [number for number in numbers if number not in skipped]
    return max(candidates, key=lambda number: _worth(posterior, skipped, number))


def _worth(posterior: Posterior, skipped: Collection[int], number: int) -> float:
    """Return 0.5 for a commit that halves the posterior, 0 for a certain commit; less near a skipped commit."""
    probability = posterior.has_change(number)
    distance = min((abs(number - other) for other in skipped), default=None)
    factor = 1.0 if distance is None else 1 - _NEAR_SKIPPED / 2 ** (distance - 1)
    return min(probability, 1 - probability) * factor


def is_confirmed(pairs: Sequence[tuple[float, float]]) -> bool | None:
    """Return whether the launches of the named commit are worse, or None if further pairs may show it.

    The posterior that names a commit assumes a distribution of the noise, and launches that fall into two groups
    violate it. This rule assumes only that launches of equal commits, made in turn, are exchangeable: the exact
    one-sided test by :func:`num_not_worse`, after 5, 8, 12 and 20 launches of each commit. The four probabilities of an
    error add up to at most 1% (Bonferroni).

    ``pairs`` contain the metric in a launch of the named commit and in one of the commit before it. A larger value is
    worse.
    """
    if any(num_not_worse(pairs[:look]) <= most for look, most in LOOKS.items() if look <= len(pairs)):
        return True
    return False if len(pairs) >= max(LOOKS) else None
