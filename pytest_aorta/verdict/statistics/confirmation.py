"""Confirmation of a named commit: whether its launches rank above launches of the commit before it.

The posterior that names a commit assumes a distribution of the noise, and launches that fall into two groups violate
it. This rule assumes only that launches of equal commits, made in turn, are exchangeable: the one-sided Mann-Whitney
test (Annals of Mathematical Statistics 18, 1947), exact, after 5, 8, 12 and 20 launches of each commit. The four
probabilities of an error add up to at most 1% (Bonferroni). Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence

# Launches of each commit at a look -> the most pairs of launches, one of each commit, in which the named commit may be
# no worse. Probabilities of an error: 0.40%, 0.15%, 0.18% and 0.26%.
LOOKS = {5: 0, 8: 5, 12: 23, 20: 98}


def is_confirmed(pairs: Sequence[tuple[float, float]]) -> bool | None:
    """Return whether the launches of the named commit are worse, or None if further pairs may show it.

    ``pairs`` contain the metric in a launch of the named commit and in one of the commit before it. A larger value is
    worse.
    """
    if any(_num_not_worse(pairs[:look]) <= most for look, most in LOOKS.items() if look <= len(pairs)):
        return True
    return False if len(pairs) >= max(LOOKS) else None


def _num_not_worse(pairs: Sequence[tuple[float, float]]) -> int:
    named, before = zip(*pairs, strict=True)
    # An equal value counts against the change, which keeps the probability of an error below that without ties.
    return sum(here <= there for here in named for there in before)
