"""From what ran when on one rank to where its profiled steps' time went, whatever the source of the intervals. Pure.

Communication is *hidden* while compute runs on the same rank, and *exposed* otherwise; copies hide nothing. That is
the ratio of Holistic Trace Analysis' ``get_comm_comp_overlap``, step by step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_aorta.result.measurements import COLLECTIVES, CollectiveTime, RankResult, StepOverlap
from pytest_aorta.result.trace.intervals import Intervals, clip, coarsened, intersection, length, union

COMPUTE, COPY = "compute", "copy"
# A lane of a timeline is drawn, and 300 pieces are more than a screen shows.
MAX_LANE_INTERVALS = 300
_NS_PER_MS = 1e6


@dataclass(frozen=True)
class OverlapCapture:
    """The profiled steps of one rank; ``timeline`` is that of the last step, as in :class:`RankResult`."""

    steps: list[StepOverlap]
    timeline: dict[str, list[list[float]]]

    def metrics(self) -> dict[str, float]:
        """``exposed_comm_ms``, a mean of steps, and ``overlap_ratio`` over all of them, if there was communication."""
        exposed_ms = sum(step.exposed_comm_ms for step in self.steps)
        comm_ms = sum(step.comm_ms for step in self.steps)
        found = {"exposed_comm_ms": exposed_ms / len(self.steps)}
        return found | ({"overlap_ratio": (comm_ms - exposed_ms) / comm_ms} if comm_ms else {})

    def added_to(self, result: RankResult) -> RankResult:
        """The result with these steps, their timeline and their metrics."""
        metrics = result.metrics | self.metrics()
        return replace(result, metrics=metrics, overlap=self.steps, timeline=self.timeline)


def overlap_of(lanes: Mapping[str, Intervals], windows: Sequence[tuple[int, int]]) -> OverlapCapture:
    """What ``lanes`` show of the steps that took place in ``windows``, one ``(begin, end)`` each; all in nanoseconds.

    ``lanes`` are sets by name: ``compute``, ``copy`` and those of ``COLLECTIVES``; one that is absent is empty.

    Raises:
        ValueError: there is no step, or a lane of another name.
    """
    if not windows:
        raise ValueError("no step was profiled: there has to be one at least")
    if unknown := sorted(set(lanes) - {COMPUTE, COPY, *COLLECTIVES}):
        raise ValueError(f"no such lanes {unknown}; there are {[COMPUTE, COPY, *COLLECTIVES]}")
    parts = [{name: clip(lane, *window) for name, lane in lanes.items()} for window in windows]
    steps = [_step(inside, end - begin) for inside, (begin, end) in zip(parts, windows, strict=True)]
    return OverlapCapture(steps, _timeline(parts[-1], windows[-1][0]))


def _step(lanes: Mapping[str, Intervals], duration_ns: int) -> StepOverlap:
    compute, copies = (lanes.get(name, union()) for name in (COMPUTE, COPY))
    of_kind = {kind: lanes[kind] for kind in COLLECTIVES if kind in lanes and len(lanes[kind])}
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
    )


def _timeline(lanes: Mapping[str, Intervals], begin_ns: int) -> dict[str, list[list[float]]]:
    """To the microsecond, from the step's begin."""
    return {
        name: [
            [round((edge - begin_ns) / _NS_PER_MS, 3) for edge in row]
            for row in coarsened(lane, MAX_LANE_INTERVALS).tolist()
        ]
        for name, lane in lanes.items()
        if len(lane)
    }


def _ms(moments: Intervals) -> float:
    return length(moments) / _NS_PER_MS
