"""Sets of moments as sorted, disjoint, half-open intervals ``[begin, end)``. Pure.

A set is an int64 array of shape ``[n, 2]`` whose rows ascend and don't touch, so its length is a sum and the other
operations are merges. :func:`union` builds a set from any intervals.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Intervals: TypeAlias = npt.NDArray[np.int64]


def union(*parts: Intervals | Iterable[tuple[int, int]]) -> Intervals:
    """Return the moments in any interval of any part; intervals that end no later than they begin add nothing."""
    rows = [np.asarray(part if isinstance(part, np.ndarray) else list(part), np.int64).reshape(-1, 2) for part in parts]
    every = np.concatenate([np.empty((0, 2), np.int64), *rows])
    every = every[every[:, 1] > every[:, 0]]
    every = every[np.argsort(every[:, 0], kind="stable")]
    reached = np.maximum.accumulate(every[:, 1])
    # A row of the set begins where no earlier interval reaches; intervals that touch are merged.
    first = np.ones(len(every), bool)
    first[1:] = every[1:, 0] > reached[:-1]
    last = np.append(first[1:], True)[: len(every)]
    return np.stack([every[first, 0], reached[last]], axis=1)


def intersection(first: Intervals, second: Intervals) -> Intervals:
    """Return the moments in both sets."""
    edges = np.concatenate([first.ravel(), second.ravel()])
    # Sort ends before beginnings of the same moment, because half-open intervals that touch share no moment.
    steps = np.concatenate([np.tile([1, -1], len(first)), np.tile([1, -1], len(second))]).astype(np.int64)
    order = np.lexsort((steps, edges))
    edges, depth = edges[order], np.cumsum(steps[order])
    begins = np.flatnonzero(depth == 2)
    return union(np.stack([edges[begins], edges[begins + 1]], axis=1)) if len(begins) else union()


def difference(first: Intervals, second: Intervals) -> Intervals:
    """Return the moments in ``first`` and not in ``second``."""
    if not len(first):
        return union()
    begin, end = first[0, 0], first[-1, 1]
    inner = second[(second[:, 1] > begin) & (second[:, 0] < end)]
    edges = np.concatenate([[min(begin, inner[0, 0]) if len(inner) else begin], inner.ravel(), [end]])
    return intersection(first, union(edges.reshape(-1, 2)))


def length(moments: Intervals) -> int:
    """Return the length of a set, in the unit of its edges."""
    return int((moments[:, 1] - moments[:, 0]).sum())


def clip(moments: Intervals, begin: int, end: int) -> Intervals:
    """Return the moments of a set in ``[begin, end)``."""
    return intersection(moments, union([(begin, end)]))


def coarsened(moments: Intervals, most: int) -> Intervals:
    """Return a set of at most ``most`` intervals for drawing, in which the shortest gaps are closed."""
    if len(moments) <= most:
        return moments
    gaps = moments[1:, 0] - moments[:-1, 1]
    kept = np.sort(np.argsort(-gaps, kind="stable")[: most - 1])
    begins = moments[np.concatenate([[0], kept + 1]), 0]
    ends = moments[np.concatenate([kept, [len(moments) - 1]]), 1]
    return np.stack([begins, ends], axis=1)
