"""Computes the breakdown of one rank's profiled steps from intervals of any source. Pure.

Communication is *hidden* while compute runs on the same rank, and *exposed* otherwise; copies hide nothing. The overlap
ratio is defined as in Holistic Trace Analysis' ``get_comm_comp_overlap``, step by step, but of communication alone: a
rank's wait for late ranks at the beginning of a collective is a lane of its own where it is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

from pytest_aorta.result.trace.families import mean_over_steps
from pytest_aorta.result.trace.intervals import Intervals, clip, coarsened, difference, intersection, length, union
from pytest_aorta.result.trace.profiled_steps import (
    Collective,
    CollectiveTime,
    HeadStart,
    Profile,
    StepOverlap,
    Timeline,
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


def joined_ahead(parts: Sequence[PartAhead], num_steps: int) -> Profile:
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
    return capture.replace(head_start=lead)


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
