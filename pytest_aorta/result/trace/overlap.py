"""Computes the overlap of a profiled step, and the parts of its time, from intervals."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median_low
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt

from pytest_aorta.result.trace.families import mean_over_steps
from pytest_aorta.result.trace.profiled_steps import (
    Collective,
    CollectiveTime,
    HeadStart,
    Profile,
    StepOverlap,
    Timeline,
    joined_calls,
)

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


# The least fraction of the profiled steps in which the host has to be ahead of the device. The variance of a mean over
# half of the steps is at most twice the variance of the mean over all of them.
LEAST_AHEAD = 0.5
# A lane of a timeline is for drawing, and a screen cannot show more than 300 intervals.
MAX_LANE_INTERVALS = 300
_NS_PER_MS = 1e6


class Lane(StrEnum):
    """A lane of a timeline other than the kinds of :class:`Collective`. Only drawings have the lane ``exposed``."""

    COMPUTE = "compute"
    COPY = "copy"
    WAIT = "wait"
    EXPOSED = "exposed"


@dataclass(frozen=True)
class PartAhead:
    """Some of the profiled steps, captured at once with a head start of their own."""

    capture: Profile
    lead: HeadStart


def overlap_of(lanes: Mapping[str, Intervals], windows: Sequence[tuple[int, int]]) -> Profile:
    """Return the breakdown of the steps that ran in ``windows``.

    Args:
        lanes: sets of moments in nanoseconds, by name: ``compute``, ``copy``, ``wait`` and the kinds of
            :class:`Collective`. A lane that is absent is empty.
        windows: ``(begin, end)`` of each step in nanoseconds.

    Raises:
        ValueError: There is no step, or a lane has another name.
    """
    if not windows:
        raise ValueError("no step was profiled; at least one profiled step is needed")
    allowed = [str(name) for name in (Lane.COMPUTE, Lane.COPY, Lane.WAIT, *Collective)]
    if unknown := sorted(set(lanes) - set(allowed)):
        raise ValueError(f"no such lanes {unknown}; allowed are {allowed}")
    parts = [{name: clip(lane, *window) for name, lane in lanes.items()} for window in windows]
    steps = [_step(inside, end - begin) for inside, (begin, end) in zip(parts, windows, strict=True)]
    return Profile(steps, _timeline(parts[-1], windows[-1][0]))


def joined(parts: Sequence[Profile]) -> Profile:
    """Return the capture of all steps of ``parts``, captured one after the other; the timeline is of the last step."""
    if len(parts) == 1:
        return parts[0]
    return Profile(
        [step for part in parts for step in part.steps],
        parts[-1].timeline,
        kernels=mean_over_steps([(part.kernels, len(part.steps)) for part in parts]),
        collectives=joined_calls([part.collectives for part in parts]),
    )


def is_too_late(parts: Sequence[PartAhead], num_steps: int) -> bool:
    """Return whether too few of ``num_steps`` steps can count, whatever the parts show that are not captured yet.

    A wait for the device is in the code of every step, so one blocked part is enough.
    """
    num_late = sum(len(part.capture.steps) for part in parts if not part.lead.succeeded)
    return any(part.lead.blocked_by for part in parts) or num_steps - num_late < LEAST_AHEAD * num_steps


def joined_ahead(parts: Sequence[PartAhead], as_run: Profile, num_steps: int) -> Profile:
    """Return the capture of ``num_steps`` steps that were captured in ``parts``, one after the other.

    Parts in which the host was late are left out and counted. If too few steps remain (:func:`is_too_late`), the
    capture is that of all steps ``as_run``, without a head start. The head start has the least favorable values of the
    parts.
    """
    failed = is_too_late(parts, num_steps)
    kept = [part for part in parts if failed or part.lead.succeeded]
    capture = as_run if failed else joined([part.capture for part in kept])
    lead = HeadStart(
        lead_ms=max(part.lead.lead_ms for part in parts),
        attempts=max(part.lead.attempts for part in parts),
        step_ratio=max((part.lead.step_ratio for part in kept if part.lead.step_ratio is not None), default=None),
        succeeded=not failed,
        blocked_by=parts[-1].lead.blocked_by,
        late_steps=0 if failed else num_steps - len(capture.steps),
    )
    return capture.replace(head_start=lead, as_run=as_run.steps)


def _step(lanes: Mapping[str, Intervals], duration_ns: int) -> StepOverlap:
    compute, copies, waits = (lanes.get(name, union()) for name in (Lane.COMPUTE, Lane.COPY, Lane.WAIT))
    of_kind = {kind.value: lanes[kind] for kind in Collective if kind in lanes and len(lanes[kind])}
    communication = union(*of_kind.values())
    busy = union(*lanes.values())
    return StepOverlap(
        step_ms=duration_ns / _NS_PER_MS,
        compute_ms=_ms(compute),
        comm_ms=_ms(communication),
        copy_ms=_ms(copies),
        idle_ms=(duration_ns - length(busy)) / _NS_PER_MS,
        hidden_comm_ms=_ms(intersection(communication, compute)),
        collectives={
            kind: CollectiveTime(_ms(lane), _ms(intersection(lane, compute))) for kind, lane in of_kind.items()
        },
        exposed_wait_ms=_ms(difference(waits, union(communication, compute))),
    )


def _timeline(lanes: Mapping[str, Intervals], begin_ns: int) -> Timeline:
    """Return lanes for drawing, in milliseconds from the beginning of the step, rounded to the microsecond."""
    drawn = {name: coarsened(lane, MAX_LANE_INTERVALS).tolist() for name, lane in lanes.items() if len(lane)}
    return {
        name: [[round((edge - begin_ns) / _NS_PER_MS, 3) for edge in row] for row in cast("list[list[int]]", rows)]
        for name, rows in drawn.items()
    }


def _ms(moments: Intervals) -> float:
    return length(moments) / _NS_PER_MS


class Part(StrEnum):
    """A part of a step's time, as a key of baselines."""

    COMPUTE = "compute"
    """Compute that every rank does: the least compute time of any rank."""
    STRAGGLER = "straggler"
    """Compute of the critical rank beyond the least compute time of any rank."""
    EXPOSED = "exposed_comm"
    """Communication, and its own waits for other ranks, during which the critical rank does not compute."""
    COPY = "copy"
    """Copies during which the critical rank neither computes nor communicates."""
    IDLE = "idle"
    """Time that the critical rank's device loses to delays of its host."""


@dataclass(frozen=True)
class Breakdown:
    """The parts of a launch's median timed step in milliseconds; the rest of the step is in no part.

    Attributes:
        rank: The critical rank, whose own work and idle time take longest.
        num_ranks: Number of ranks that were profiled.
        parts_ms: The length of each part.
    """

    rank: int
    num_ranks: int
    parts_ms: dict[Part, float]


@dataclass(frozen=True, order=True)
class _RankTime:
    """The lengths of one rank's step. The order is that of ``own_ms``, the time that peers may wait for."""

    own_ms: float
    compute_ms: float
    exposed_ms: float
    copy_ms: float
    idle_ms: float


def break_down(
    steps: Sequence[Sequence[StepOverlap]], as_run: Sequence[Sequence[StepOverlap]], timed_ms: float
) -> Breakdown:
    """Return the parts of a step that takes ``timed_ms``.

    If several steps were profiled, the step of median length counts, since single steps may be disturbed.

    Compute, communication and copies come from ``steps``. Peers that wait for a straggler are in a collective all the
    while. So exposed communication counts only on the critical rank: the rank with the most compute, copies and idle
    time. Idle time comes from ``as_run`` and includes the communication that only a late host exposes. It is limited
    to the time that the work of ``steps`` leaves in the timed step, because profiling may delay the host further.

    Args:
        steps: ``steps[rank][profiled step]``, with a head start of the host if ranks run on devices.
        as_run: The steps of the same ranks without a head start; ``steps`` themselves if there was no head start.
        timed_ms: Median duration of the timed steps.
    """
    sides = zip(_median_step(steps), _median_step(as_run), strict=True)
    ranks = [_rank_time(step, late_step, timed_ms) for step, late_step in sides]
    critical = max(ranks)
    common_ms = min(rank.compute_ms for rank in ranks)
    parts = {
        Part.COMPUTE: common_ms,
        Part.STRAGGLER: critical.compute_ms - common_ms,
        Part.EXPOSED: critical.exposed_ms,
        Part.COPY: critical.copy_ms,
        Part.IDLE: critical.idle_ms,
    }
    return Breakdown(ranks.index(critical), len(ranks), parts)


def _median_step(steps: Sequence[Sequence[StepOverlap]]) -> tuple[StepOverlap, ...]:
    """Return the step of median length on every rank; a step is as long as on its slowest rank."""
    by_number = list(zip(*steps, strict=False))
    lengths_ms = [max(step.step_ms for step in ranks) for ranks in by_number]
    return by_number[lengths_ms.index(median_low(lengths_ms))]


def _rank_time(step: StepOverlap, as_run: StepOverlap, timed_ms: float) -> _RankTime:
    busy_ms = step.step_ms - step.idle_ms
    # Lengths are differences of large numbers, so a length of zero may come out just below.
    exposed_ms, late_exposed_ms = (one.exposed_comm_ms + one.exposed_wait_ms for one in (step, as_run))
    copy_ms = max(0.0, busy_ms - step.compute_ms - exposed_ms)
    left_ms = max(0.0, timed_ms - busy_ms)
    late_ms = max(0.0, late_exposed_ms - exposed_ms)
    return _RankTime(
        own_ms=step.compute_ms + copy_ms + min(as_run.idle_ms, left_ms),
        compute_ms=step.compute_ms,
        exposed_ms=exposed_ms,
        copy_ms=copy_ms,
        idle_ms=min(as_run.idle_ms + late_ms, left_ms),
    )
