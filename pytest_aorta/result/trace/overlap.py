"""Computes the breakdown of one rank's profiled steps from intervals of any source. Pure.

Communication is *hidden* while compute runs on the same rank, and *exposed* otherwise; copies hide nothing. The overlap
ratio is defined as in Holistic Trace Analysis' ``get_comm_comp_overlap``, step by step, but of communication alone: a
rank's wait for late ranks at the beginning of a collective is a lane of its own where it is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import median
from typing import cast

from pytest_aorta.result.measurements import RankResult
from pytest_aorta.result.trace.families import mean_over_steps
from pytest_aorta.result.trace.intervals import Intervals, clip, coarsened, difference, intersection, length, union
from pytest_aorta.result.trace.profiled_steps import (
    AS_RUN,
    Collective,
    CollectiveCalls,
    CollectiveTime,
    FamilyTime,
    HeadStart,
    StepOverlap,
)
from pytest_aorta.result.trace.transfers import joined_calls

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
class OverlapCapture:
    """The profiled steps of one rank.

    Attributes:
        steps: One breakdown per step; empty if there is a ``problem``.
        timeline, head_start, kernels, collectives: As in :class:`~pytest_aorta.result.measurements.RankResult`.
        as_run: Breakdowns of the same steps without a head start; empty on CPU ranks.
        problem: The reason why there are no steps; empty if there are steps.
    """

    steps: list[StepOverlap]
    timeline: dict[str, list[list[float]]]
    head_start: HeadStart | None = None
    as_run: list[StepOverlap] = field(default_factory=list)
    kernels: dict[str, FamilyTime] = field(default_factory=dict)
    collectives: list[CollectiveCalls] = field(default_factory=list)
    problem: str = ""

    def metrics(self) -> dict[str, float]:
        """Return the overlap metrics of the steps, and ``device_idle_ms`` of the steps as they run; none without steps.

        If a head start was tried and failed, the steps show the host's delay. The overlap metrics are then those of the
        steps as they run, with ``_as_run`` after their names, so that nothing compares them with a baseline.
        """
        if not self.steps:
            return {}
        suffix = AS_RUN if self.head_start and not self.head_start.succeeded else ""
        found = {
            f"{name}{suffix}": value for name, value in _overlap_metrics(self.as_run if suffix else self.steps).items()
        }
        if self.as_run:
            found["device_idle_ms"] = median(step.idle_ms for step in self.as_run)
        return found

    def added_to(self, result: RankResult) -> RankResult:
        """Return the result with these steps, their timeline and their metrics."""
        metrics = result.metrics | self.metrics()
        return replace(
            result,
            metrics=metrics,
            overlap=self.steps,
            timeline=self.timeline,
            head_start=self.head_start,
            overlap_as_run=self.as_run,
            kernels=self.kernels,
            collectives=self.collectives,
            overlap_problem=self.problem,
        )


def _overlap_metrics(steps: Sequence[StepOverlap]) -> dict[str, float]:
    """Return ``exposed_comm_ms``, a mean over steps, and ``overlap_ratio`` over all steps if they communicate."""
    exposed_ms = sum(step.exposed_comm_ms for step in steps)
    comm_ms = sum(step.comm_ms for step in steps)
    found = {"exposed_comm_ms": exposed_ms / len(steps)}
    return found | ({"overlap_ratio": (comm_ms - exposed_ms) / comm_ms} if comm_ms else {})


@dataclass(frozen=True)
class PartAhead:
    """Some of the profiled steps, captured at once with a head start of their own."""

    capture: OverlapCapture
    lead: HeadStart


def overlap_of(lanes: Mapping[str, Intervals], windows: Sequence[tuple[int, int]]) -> OverlapCapture:
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
    return OverlapCapture(steps, _timeline(parts[-1], windows[-1][0]))


def joined(parts: Sequence[OverlapCapture]) -> OverlapCapture:
    """Return the capture of all steps of ``parts``, captured one after the other; the timeline is of the last step."""
    if len(parts) == 1:
        return parts[0]
    return OverlapCapture(
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


def joined_ahead(parts: Sequence[PartAhead], num_steps: int) -> OverlapCapture:
    """Return the capture of ``num_steps`` steps that were captured in ``parts``, one after the other.

    Parts in which the host was late are left out and counted, unless too few steps remain (:func:`is_too_late`). The
    head start has the least favorable values of the parts.
    """
    failed = is_too_late(parts, num_steps)
    kept = [part for part in parts if failed or part.lead.succeeded]
    capture = joined([part.capture for part in kept])
    lead = HeadStart(
        lead_ms=max(part.lead.lead_ms for part in parts),
        attempts=max(part.lead.attempts for part in parts),
        step_ratio=max((part.lead.step_ratio for part in kept if part.lead.step_ratio is not None), default=None),
        succeeded=not failed,
        blocked_by=parts[-1].lead.blocked_by,
        late_steps=0 if failed else num_steps - len(capture.steps),
    )
    return replace(capture, head_start=lead)


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


def _timeline(lanes: Mapping[str, Intervals], begin_ns: int) -> dict[str, list[list[float]]]:
    """Return lanes for drawing, in milliseconds from the beginning of the step, rounded to the microsecond."""
    drawn = {name: coarsened(lane, MAX_LANE_INTERVALS).tolist() for name, lane in lanes.items() if len(lane)}
    return {
        name: [[round((edge - begin_ns) / _NS_PER_MS, 3) for edge in row] for row in cast("list[list[int]]", rows)]
        for name, rows in drawn.items()
    }


def _ms(moments: Intervals) -> float:
    return length(moments) / _NS_PER_MS
