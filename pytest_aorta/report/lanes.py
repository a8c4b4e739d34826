"""Measured overlap for tables and drawings: means over the profiled steps, and the lanes of the last profiled step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import cast

from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.result.trace.intervals import Intervals, difference, union
from pytest_aorta.result.trace.overlap import Lane
from pytest_aorta.result.trace.profiled_steps import StepOverlap

_NS_PER_MS = 1_000_000


@dataclass(frozen=True)
class RankOverlap:
    """Means over the profiled steps of one rank, in milliseconds; ``ratio`` is None without communication.

    ``device_idle_ms`` is the idle time of the median step without a head start; None where no such step was profiled.
    """

    rank: int
    step_ms: float
    compute_ms: float
    comm_ms: float
    exposed_ms: float
    exposed_wait_ms: float
    copy_ms: float
    idle_ms: float
    ratio: float | None
    device_idle_ms: float | None


@dataclass(frozen=True)
class CollectiveOverlap:
    """One kind of collective: means over ranks and profiled steps, and the rank with the most exposed time."""

    name: str
    total_ms: float
    hidden_ms: float
    worst_rank: int
    worst_exposed_ms: float

    @property
    def exposed_ms(self) -> float:
        """Return the time that compute does not hide."""
        return self.total_ms - self.hidden_ms


def rank_overlaps(result: WorkloadResult) -> list[RankOverlap]:
    """Return one row per profiled rank."""
    as_run = dict(enumerate(result.overlap_as_run))
    return [_rank(rank, steps, as_run.get(rank, [])) for rank, steps in enumerate(result.overlap) if steps]


def _rank(rank: int, steps: Sequence[StepOverlap], as_run: Sequence[StepOverlap]) -> RankOverlap:
    comm, hidden = fmean(step.comm_ms for step in steps), fmean(step.hidden_comm_ms for step in steps)
    return RankOverlap(
        rank,
        fmean(step.step_ms for step in steps),
        fmean(step.compute_ms for step in steps),
        comm,
        comm - hidden,
        fmean(step.exposed_wait_ms for step in steps),
        fmean(step.copy_ms for step in steps),
        fmean(step.idle_ms for step in steps),
        hidden / comm if comm else None,
        median(step.idle_ms for step in as_run) if as_run else None,
    )


def collective_overlaps(result: WorkloadResult) -> list[CollectiveOverlap]:
    """Return one row per kind of collective, the most exposed kind first."""
    ranks = [(rank, steps) for rank, steps in enumerate(result.overlap) if steps]
    names = {name for _, steps in ranks for step in steps for name in step.collectives}
    rows = [_collective(name, ranks) for name in sorted(names)]
    return sorted(rows, key=lambda row: -row.exposed_ms)


def _collective(name: str, ranks: Sequence[tuple[int, Sequence[StepOverlap]]]) -> CollectiveOverlap:
    by_rank = {}
    for rank, steps in ranks:
        times = [step.collectives[name] for step in steps if name in step.collectives]
        total, hidden = sum(time.total_ms for time in times), sum(time.hidden_ms for time in times)
        by_rank[rank] = (total / len(steps), hidden / len(steps))
    worst = max(by_rank, key=lambda rank: by_rank[rank][0] - by_rank[rank][1])
    return CollectiveOverlap(
        name,
        fmean(total for total, _ in by_rank.values()),
        fmean(hidden for _, hidden in by_rank.values()),
        worst,
        by_rank[worst][0] - by_rank[worst][1],
    )


def drawn_lanes(lanes: dict[str, list[list[float]]]) -> dict[str, list[list[float]]]:
    """Return a rank's lanes with the lane ``exposed`` added: communication that compute does not hide.

    Gaps in lanes may be closed, so use lanes for drawing only, not for computing values.
    """
    sets = {name: _to_ns(intervals) for name, intervals in lanes.items()}
    others = (Lane.COMPUTE, Lane.COPY, Lane.WAIT)
    comm = union(*(moments for name, moments in sets.items() if name not in others))
    sets[Lane.EXPOSED] = difference(comm, sets.get(Lane.COMPUTE, union()))
    return {name: cast("list[list[float]]", (moments / _NS_PER_MS).tolist()) for name, moments in sets.items()}


def _to_ns(intervals: list[list[float]]) -> Intervals:
    return union([(round(begin * _NS_PER_MS), round(end * _NS_PER_MS)) for begin, end in intervals])
