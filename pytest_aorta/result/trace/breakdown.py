"""Breaks a launch's step time down into parts that add up, for the rank that its peers wait for. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median_low
from typing import Annotated, TypeAlias

from msgspec import Meta

from pytest_aorta.result.trace.profiled_steps import StepOverlap


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


PartName: TypeAlias = Annotated[str, Meta(pattern=f"^({'|'.join(Part)})$")]


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
