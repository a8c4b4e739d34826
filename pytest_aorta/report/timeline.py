"""Drawings of a report in rows of bars, as SVG and for the page.

A drawing shows what each rank's streams did in a step, how the step's graph of streams plays on the nominal machine,
or the waits of ranks step by step.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise, zip_longest
from typing import TypeAlias, cast

import numpy as np

from pytest_aorta.report.data import Case
from pytest_aorta.result.facts import Launches
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.result.trace.overlap import Intervals, Lane, Part, difference, intersection, union
from pytest_aorta.result.trace.profiled_steps import Collective
from pytest_aorta.result.trace.schedule import Schedule
from pytest_aorta.session.record import Side

_NS_PER_MS, _NS_PER_US = 1_000_000, 1000
# Those of the page's light theme.
_COLORS: dict[str, str] = {
    Lane.COMPUTE: "#0072b2",
    Lane.COPY: "#8c959f",
    Lane.EXPOSED: "#c4162a",
    Lane.WAIT: "#d0d7de",
    Part.STRAGGLER: "#b0578f",
    Part.IDLE: "#d0d7de",
    Collective.ALL_GATHER: "#d98e00",
    Collective.REDUCE_SCATTER: "#00875f",
    Collective.ALL_REDUCE: "#b0578f",
    Collective.ALL_TO_ALL: "#c25400",
    Collective.BROADCAST: "#2f8fce",
    Collective.SEND_RECV: "#7c5a34",
    Collective.OTHER: "#6e7781",
    (IN_HOST := "exposed in a host"): "#d98e00",
    (BETWEEN_HOSTS := "exposed between hosts"): "#c4162a",
}
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
    groups = [[group.schedule for facts in launches for group in facts.schedules] for _, launches, _ in case.sides]
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


def _moments(spans: Iterable[Sequence[float]], unit_ns: int = _NS_PER_US) -> Intervals:
    return union([(round(begin * unit_ns), round(end * unit_ns)) for begin, end in spans])


def _in_ms(moments: Intervals) -> list[tuple[float, float]]:
    return cast("list[tuple[float, float]]", (moments / _NS_PER_MS).tolist())


def step_drawing(case: Case) -> Drawing | None:
    """Return a profiled step of each side by rank, and the parts of the median steps; None without a profiled step."""
    sides = [*zip(("", BEFORE), case.sides, strict=True)]
    rows = [row for suffix, (*_, results) in sides for row in _rank_rows(results, suffix)]
    rows += [row for suffix, (_, launches, _) in sides for row in _part_rows(launches, suffix)] if rows else []
    return Drawing(rows, max(end for row in rows for bars in row.bars for _, end in bars.spans)) if rows else None


def _rank_rows(results: Sequence[WorkloadResult], suffix: str) -> Iterator[Row]:
    """Yield rows of each rank of the first profiled launch: compute, what is exposed, communication, copies."""
    for rank, lanes in enumerate(next((one.timeline for one in results if any(one.timeline)), ())):
        drawn = drawn_lanes(lanes)
        rest = [name for name in drawn if name not in (Lane.COMPUTE, Lane.EXPOSED, Lane.COPY)]
        for names, height in (([Lane.COMPUTE], 1.0), ([Lane.EXPOSED], 0.4), (rest, 1.0), ([Lane.COPY], 1.0)):
            if bars := [Bars(name, spans) for name in names if (spans := drawn.get(name))]:
                yield Row(f"rank {rank}{suffix}", bars, height)


def _part_rows(launches: Launches, suffix: str) -> Iterator[Row]:
    """Yield a row of the parts of the median step, one after another, of the first launch that has them."""
    if parts_ms := next((facts.breakdown_ms for facts in launches if facts.breakdown_ms), {}):
        names = [Lane.EXPOSED if name == Part.EXPOSED else name for name in parts_ms]
        spans = pairwise(accumulate(parts_ms.values(), initial=0.0))
        yield Row(
            f"parts{suffix}", [Bars(name, [span]) for name, span in zip(names, spans, strict=True) if span[1] > span[0]]
        )


def waits_drawing(case: Case) -> Drawing | None:
    """Return how long each rank of the first launch waits in collectives, by step; None where it is not known."""
    result = next(iter(case.results[Side.CANDIDATE].values()), None)
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


_WIDTH, _LEFT, _ROW, _GAP, _LINE, _LETTER = 960, 150, 14, 2, 18, 6
_ARROW = 'stroke="#1f2328" fill="none" marker-end="url(#tip)"'
_TIP = (
    '<marker id="tip" markerWidth="6" markerHeight="6" refX="5" refY="3" orient="auto">'
    '<path d="M0 0L6 3L0 6Z"/></marker>'
)


def svg(panels: Sequence[tuple[str, Drawing]]) -> str:
    """Return drawings as one SVG, each below its title."""
    parts: list[str] = []
    top = 0.0
    for title, drawing in panels:
        parts.append(_text(4, top + _LINE, title, 'font-weight="600"'))
        top += 1.5 * _LINE
        scale, middles, is_before = (_WIDTH - _LEFT - _GAP) / (drawing.end - drawing.begin), [], False
        for name, rows in groupby(drawing.rows, key=lambda row: row.name):
            if name.endswith(BEFORE) is not is_before:
                top, is_before = top + _ROW / 2, not is_before
            parts.append(_text(4, top + 0.8 * _ROW, name))
            for row in rows:
                parts += _rects(row, drawing.begin, scale, top)
                middles.append(top + _ROW * row.height / 2)
                top += _ROW * row.height + _GAP
            top += _GAP
        for at, start, end in drawing.arrows:
            tip = middles[end] - math.copysign(_ROW / 2, middles[end] - middles[start])
            left = _LEFT + (at - drawing.begin) * scale
            parts.append(f'<path d="M{left:.1f} {middles[start]:.1f}V{tip:.1f}" {_ARROW}/>')
        parts.append(_text(_WIDTH - _GAP, top + _LINE, f"{drawing.end:.4g} {drawing.unit}", 'text-anchor="end"'))
        left = float(_LEFT)
        for kind in dict.fromkeys(bars.kind for row in drawing.rows for bars in row.bars):
            parts.append(f'<rect x="{left:.0f}" y="{top + 8:.0f}" width="10" height="10" fill="{_color(kind)}"/>')
            parts.append(_text(left + _ROW, top + _LINE, kind.replace("_", " ")))
            left += 2 * _LINE + _LETTER * len(kind)
        top += 2 * _LINE
    size = f'width="{_WIDTH}" height="{top:.0f}" viewBox="0 0 {_WIDTH} {top:.0f}"'
    style = 'font-family="system-ui, sans-serif" font-size="12" fill="#1f2328"'
    back = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{_TIP}{back}{"".join(parts)}</svg>\n'


def _rects(row: Row, first: float, scale: float, top: float) -> Iterator[str]:
    for bars in row.bars:
        rects = (
            f'<rect x="{_LEFT + (begin - first) * scale:.1f}" width="{max(0.5, (end - begin) * scale):.1f}" '
            f'y="{top:.1f}" height="{_ROW * row.height:.1f}"><title>{html.escape(text or bars.kind)}</title></rect>'
            for (begin, end), text in zip_longest(bars.spans, bars.texts)
        )
        yield f'<g fill="{_color(bars.kind)}">{"".join(rects)}</g>'


def _color(kind: str) -> str:
    return _COLORS.get(kind, _COLORS[Collective.OTHER])


def _text(left: float, bottom: float, text: str, style: str = "") -> str:
    return f'<text x="{left:.1f}" y="{bottom:.1f}" {style}>{html.escape(text)}</text>'


def drawn_lanes(lanes: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, list[tuple[float, float]]]:
    """Return a rank's lanes with the lane ``exposed`` added: communication that compute does not hide.

    Gaps in lanes may be closed, so use lanes for drawing only, not for computing values.
    """
    sets = {name: _moments(intervals, _NS_PER_MS) for name, intervals in lanes.items()}
    others = (Lane.COMPUTE, Lane.COPY, Lane.WAIT)
    comm = union(*(moments for name, moments in sets.items() if name not in others))
    sets[Lane.EXPOSED] = difference(comm, sets.get(Lane.COMPUTE, union()))
    return {name: _in_ms(moments) for name, moments in sets.items()}
