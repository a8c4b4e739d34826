"""Builds the capture of a trace's steps from lanes, kernels and calls of collectives. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from pytest_aorta.result.trace.families import family_times
from pytest_aorta.result.trace.intervals import Intervals
from pytest_aorta.result.trace.overlap import overlap_of
from pytest_aorta.result.trace.profiled_steps import Call, CollectiveCalls, Profile
from pytest_aorta.result.trace.transfers import MAX_CALLS, MAX_COLLECTIVES


def capture_of(
    edges: Sequence[int],
    lanes: Mapping[str, Intervals],
    durations: Iterable[tuple[str, int]],
    calls: Iterable[tuple[Call, int]],
) -> Profile:
    """Return the capture of the steps between ``edges``; all times are in nanoseconds.

    Args:
        edges: the boundaries, in order; n + 1 for n steps.
        lanes: the lanes of :func:`~pytest_aorta.result.trace.overlap.overlap_of`.
        durations: the family of each kernel of the steps, and its duration.
        calls: each call of a collective in the steps, and its duration, in order.
    """
    origin = edges[0]
    windows = [(begin - origin, end - origin) for begin, end in pairwise(edges)]
    return overlap_of({name: lane - origin for name, lane in lanes.items()}, windows).replace(
        kernels=family_times(durations, len(windows)),
        collectives=_collectives(calls),
    )


def _collectives(calls: Iterable[tuple[Call, int]]) -> list[CollectiveCalls]:
    """Return the durations in ms of calls with equal keys, in groups; the group with the longest total comes first."""
    durations: dict[Call, list[float]] = defaultdict(list)
    sizes: dict[Call, list[int | None]] = defaultdict(list)
    for call, duration_ns in calls:
        if len(durations[call.key]) < MAX_CALLS:
            durations[call.key].append(duration_ns / 1e6)
            sizes[call.key].append(call.num_bytes)
    longest = sorted(durations.items(), key=lambda entry: -sum(entry[1]))[:MAX_COLLECTIVES]
    return [CollectiveCalls(key.kind, key.group, key.group_size, _mean_size(sizes[key]), ms) for key, ms in longest]


def _mean_size(sizes: Sequence[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) // len(known) if len(known) == len(sizes) else None
