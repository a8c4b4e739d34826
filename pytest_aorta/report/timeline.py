"""Drawings of the page in rows of bars.

A drawing shows what each rank's streams did in a step, how the step's graph of streams plays on the nominal machine,
or the waits of ranks step by step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias, cast

import numpy as np

from pytest_aorta.report.data import Case, Launch
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.trace.overlap import Intervals, Lane, Part, difference, intersection, union
from pytest_aorta.result.trace.schedule import Schedule

_NS_PER_MS, _NS_PER_US = 1_000_000, 1000
# Follows the names of the other side's rows.
BEFORE = ", before"
# Beyond, neighboring steps of waits share a bar.
_MOST_STEPS = 120
_MOST_ARROWS = 40
_Spans: TypeAlias = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Bars:
    """Bars of one kind, which has a color.

    Attributes:
        spans: Begin and end of each bar.
        values: What each bar stands for, in ms, shown by the strength of its color; empty if all are alike.
        texts: What is said of each bar; empty if its kind is enough.
    """

    kind: str
    spans: _Spans
    values: Sequence[float] = ()
    texts: Sequence[str] = ()


@dataclass(frozen=True)
class Row:
    """Bars at one height; rows that follow one another with the same name belong together."""

    name: str
    bars: Sequence[Bars]
    height: float = 1.0


@dataclass(frozen=True)
class Drawing:
    """Rows over milliseconds, or over steps.

    Attributes:
        begin, end: The range that the rows cover.
        unit: Of the range.
        arrows: A place in the range, and the rows from which and to which an arrow points there.
    """

    rows: Sequence[Row]
    end: float
    begin: float = 0.0
    unit: str = "ms"
    arrows: Sequence[tuple[float, int, int]] = ()


def schedule_drawing(case: Case) -> Drawing | None:
    """Return the schedules of both sides on the nominal machine, of the first ranks, or one if they are equal.

    None without a schedule.
    """
    sides = ([launch.facts for launch in case.candidate], case.others)
    groups = [[group.schedule for facts in side for group in facts.schedules] for side in sides]
    here, there = (next((one for one in found if one.issued), None) for found in groups)
    return drawn_schedules([here] if here == there else [here, there])


def drawn_schedules(schedules: Sequence[Schedule | None]) -> Drawing | None:
    """Return schedules, the first being that of the code under test; exposed communication is of a kind of its own.

    An arrow leads to an exposed collective from the stream whose work it waits for.
    """
    rows: list[Row] = []
    arrows: list[tuple[float, int, int]] = []
    for schedule, suffix in zip(schedules, ("", BEFORE), strict=False):
        if schedule is not None:
            first, streams = len(rows), [*dict.fromkeys([Lane.COMPUTE, *(one.stream for one in schedule.issued)])]
            rows += [Row(stream + suffix, _stream_bars(schedule, stream)) for stream in streams]
            exposed = sorted((one for one in schedule.issued if one.behind), key=lambda one: -one.exposed_us)
            arrows += [
                (
                    one.begin_us * _NS_PER_US / _NS_PER_MS,
                    first + streams.index(one.behind),
                    first + streams.index(one.stream),
                )
                for one in exposed[:_MOST_ARROWS]
                if one.exposed_us and one.behind in streams
            ]
    ends = [end for row in rows for bars in row.bars for _, end in bars.spans]
    return Drawing(rows, max(ends), arrows=arrows) if ends else None


def _stream_bars(schedule: Schedule, stream: str) -> list[Bars]:
    """Return the compute of a stream, and of its collectives what compute hides, by kind, and what is exposed."""
    computing = _moments(schedule.computing_us)
    parts: list[tuple[str, Intervals, str]] = [(Lane.COMPUTE, computing, "")] if stream == Lane.COMPUTE else []
    for one in schedule.issued:
        if one.stream == stream:
            whole = _moments([(one.begin_us, one.end_us)])
            names = (one.name, one.of and f"of {one.of}", one.waits_for and f"after {one.waits_for}")
            text = " ".join(filter(None, names))
            parts.append((one.name, intersection(whole, computing), text))
            parts.append((Lane.EXPOSED, difference(whole, computing), text))
    found: dict[str, Bars] = {}
    for kind, moments, text in parts:
        known = found.get(kind, Bars(kind, []))
        spans = _in_ms(moments)
        found[kind] = Bars(kind, [*known.spans, *spans], texts=[*known.texts, *[text] * len(spans)])
    return [*found.values()]


def _moments(spans_us: _Spans) -> Intervals:
    return union([(round(begin * _NS_PER_US), round(end * _NS_PER_US)) for begin, end in spans_us])


def _in_ms(moments: Intervals) -> list[tuple[float, float]]:
    return cast("list[tuple[float, float]]", (moments / _NS_PER_MS).tolist())


def step_drawing(case: Case) -> Drawing | None:
    """Return a profiled step of each side by rank, and the parts of the median steps; None without a profiled step."""
    sides = (("", case.candidate), (BEFORE, case.reference))
    rows = [row for suffix, launches in sides for row in _rank_rows(launches, suffix)]
    facts = (("", [launch.facts for launch in case.candidate]), (BEFORE, case.others))
    rows += [row for suffix, launches in facts for row in _part_rows(launches, suffix)] if rows else []
    return Drawing(rows, max(end for row in rows for bars in row.bars for _, end in bars.spans)) if rows else None


def _rank_rows(launches: Sequence[Launch], suffix: str) -> Iterator[Row]:
    """Yield rows of each rank of the first profiled launch: compute, what is exposed, communication, copies."""
    for rank, lanes in enumerate(next((one.result.timeline for one in launches if any(one.result.timeline)), ())):
        drawn = drawn_lanes(lanes)
        rest = [name for name in drawn if name not in (Lane.COMPUTE, Lane.EXPOSED, Lane.COPY)]
        for names, height in (([Lane.COMPUTE], 1.0), ([Lane.EXPOSED], 0.4), (rest, 1.0), ([Lane.COPY], 1.0)):
            if bars := [Bars(name, spans) for name in names if (spans := drawn.get(name))]:
                yield Row(f"rank {rank}{suffix}", bars, height)


def _part_rows(launches: Sequence[LaunchFacts], suffix: str) -> Iterator[Row]:
    """Yield a row of the parts of the median step, one after another, of the first launch that has them."""
    if parts_ms := next((facts.breakdown_ms for facts in launches if facts.breakdown_ms), {}):
        names = [Lane.EXPOSED if name == Part.EXPOSED else name for name in parts_ms]
        spans = pairwise(accumulate(parts_ms.values(), initial=0.0))
        yield Row(
            f"parts{suffix}", [Bars(name, [span]) for name, span in zip(names, spans, strict=True) if span[1] > span[0]]
        )


def waits_drawing(case: Case) -> Drawing | None:
    """Return how long each rank of the first launch waits in collectives, by step; None where it is not known."""
    result = case.candidate[0].result if case.candidate else None
    if result is None or len(result.collective_ms) < 2 or not result.collective_ms[0]:
        return None
    waits_ms = np.asarray(result.collective_ms)
    count = waits_ms.shape[1]
    edges = [*range(0, count, -(-count // _MOST_STEPS)), count]
    means_ms = np.round(np.add.reduceat(waits_ms, edges[:-1], axis=1) / np.diff(edges), 4)
    first = result.total_iterations - count + 1
    spans = [(first + begin, first + end) for begin, end in pairwise(edges)]
    rows = [Row(f"rank {rank}", [Bars("waiting", spans, row.tolist())]) for rank, row in enumerate(means_ms)]
    return Drawing(rows, first + count, first, "step")


def drawn_lanes(lanes: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, list[tuple[float, float]]]:
    """Return a rank's lanes with the lane ``exposed`` added: communication that compute does not hide.

    Gaps in lanes may be closed, so use lanes for drawing only, not for computing values.
    """
    sets = {
        name: union([(round(begin * _NS_PER_MS), round(end * _NS_PER_MS)) for begin, end in intervals])
        for name, intervals in lanes.items()
    }
    others = (Lane.COMPUTE, Lane.COPY, Lane.WAIT)
    comm = union(*(moments for name, moments in sets.items() if name not in others))
    sets[Lane.EXPOSED] = difference(comm, sets.get(Lane.COMPUTE, union()))
    return {name: _in_ms(moments) for name, moments in sets.items()}
