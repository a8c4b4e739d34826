"""Comparison of what was recorded of each optimizer of an unedited script: curves by step and rank, and weights. Pure.

Curves are equal bit for bit where the recorded launches are. Elsewhere each step may differ from the median of the
recorded launches by the tolerance, and a few steps by more: one in a hundred, at least one and at most fifty, as in
Megatron-LM's functional tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from pytest_aorta.common.text import brief, counted
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.verdict.applicability import is_reproducible, other_machine
from pytest_aorta.verdict.metrics import Curve, Origin
from pytest_aorta.verdict.rows import Row
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Missing, Verdict

_STEPS_PER_OUTLIER, _MOST_OUTLIERS = 100, 50


@dataclass(frozen=True)
class _Point:
    """A value of one optimizer in one step on one rank."""

    series: int
    name: str
    rank: int
    step: str

    def __str__(self) -> str:
        """Return the place of the value."""
        return f"step {self.step} of {self.name} on rank {self.rank}"


def judge_curves(row: Row, curve: Curve) -> Verdict:
    """Return the verdict on the values of all optimizers, by step and rank."""
    here, there = ([_points(launch, curve) for launch in side] for side in (row.launches, row.others))
    if lost := there[-1].keys() - here[-1].keys():
        return row.missing(
            Missing.CANDIDATE_VALUE,
            f"the launch has no {row.metric.name} of {_first(lost)}; {_optimizers(row)}",
            baseline=row.metric.measure(row.others[-1]),
        )
    if added := here[-1].keys() - there[-1].keys():
        detail = f"the {row.reference} has no {row.metric.name} of {_first(added)}; {_optimizers(row)}"
        return row.missing(Missing.BASELINE_VALUE, detail, baseline=row.metric.measure(row.others[-1]))
    num_steps = len({(point.series, point.step) for point in there[-1]})
    known: dict[str, Any] = {"value": row.value, "baseline": row.metric.measure(row.others[-1])}
    is_exact = row.tolerance.is_exact or (row.tolerance.origin is Origin.DEFAULT and _are_bits_known(row, there))
    if is_exact:
        known["tolerance"] = row.tolerance.replace(value=None)
    if all(points == there[-1] for points in (*here, *there)):
        return row.verdict(Outcome.PASS, detail=f"{counted(num_steps, 'step')}, bit for bit", **known)
    if is_exact:
        if (first := _first_other(here, there)) is None:
            return row.verdict(Outcome.PASS, **known)
        detail, value, recorded = first
        return row.verdict(Outcome.REGRESSION, detail=detail, **known | {"value": value, "baseline": recorded})
    return _judge_steps(row, here, there, known)


def _points(launch: LaunchFacts, curve: Curve) -> dict[_Point, float]:
    return {
        _Point(number, series.name, rank, step): value
        for number, series in enumerate(launch.series)
        for rank, values in enumerate(curve(series))
        for step, value in values.items()
    }


def _first(points: set[_Point]) -> _Point:
    return min(points, key=lambda point: (int(point.step), point.series, point.rank))


def _optimizers(row: Row) -> str:
    sides = [(side[-1], word) for side, word in ((row.launches, "the launch"), (row.others, f"the {row.reference}"))]
    counts = [
        f"{word} has {', '.join(f'{one.num_steps} steps of {one.name}' for one in side.series)}" for side, word in sides
    ]
    return brief("; ".join(counts), 300)


def _are_bits_known(row: Row, there: Sequence[Mapping[_Point, float]]) -> bool:
    """Return whether equal code computes equal bits: recorded launches did, or weights are compared so."""
    launches = (*row.launches, *row.others)
    is_one_machine = not any(other_machine(launch, row.others[-1]) for launch in row.launches)
    do_repeat = all(points == there[0] for points in there) if len(there) > 1 else bool(row.others[-1].weight_hashes)
    return is_one_machine and do_repeat and all(map(is_reproducible, launches))


def _first_other(
    here: Sequence[Mapping[_Point, float]], there: Sequence[Mapping[_Point, float]]
) -> tuple[str, float, float] | None:
    """Return text on the first value that no recorded launch has and all ranks of this step, with both values."""
    different = {
        point for points in here for point, value in points.items() if all(other[point] != value for other in there)
    }
    if not different:
        return None
    first = _first(different)
    ranks = sorted(point.rank for point in different if (point.series, point.step) == (first.series, first.step))
    value, recorded = next(points[first] for points in here if points[first] != there[-1][first]), there[-1][first]
    who = _ranks(ranks, there[-1])
    return (
        f"differs first in step {first.step} of {first.name} on {who}: {value!r}, recorded {recorded!r}",
        value,
        recorded,
    )


def _ranks(ranks: Sequence[int], points: Mapping[_Point, float]) -> str:
    count = len({point.rank for point in points})
    return "all ranks" if len(ranks) == count > 1 else f"rank {', '.join(map(str, ranks))}"


def _judge_steps(
    row: Row, here: Sequence[Mapping[_Point, float]], there: Sequence[Mapping[_Point, float]], known: dict[str, Any]
) -> Verdict:
    """Return the verdict on curves whose bits do not repeat: each step within the tolerance, but for a few."""
    tolerance = row.tolerance.value or 0.0
    center = {point: median(points[point] for points in there) for point in there[-1]}
    spread = max(
        (
            max(abs(points[point] - middle) for points in there) / abs(middle)
            for point, middle in center.items()
            if middle
        ),
        default=0.0,
    )
    curves = {(point.series, point.rank) for point in center}
    worst: list[_Point] = []
    allowed = 0
    for points in here:
        for curve in sorted(curves):
            of_curve = [point for point in center if (point.series, point.rank) == curve]
            outside = [at for at in of_curve if abs(points[at] - center[at]) > tolerance * abs(center[at])]
            may_be = min(max(len(of_curve) // _STEPS_PER_OUTLIER, 1), _MOST_OUTLIERS)
            if len(outside) > may_be and len(outside) > len(worst):
                worst, allowed = outside, may_be
    beside = f"the recorded launches differ by up to {spread:.2g} of the value"
    if not worst:
        return row.verdict(Outcome.PASS, detail=beside, **known)
    first = _first(set(worst))
    value = next(each[first] for each in here if abs(each[first] - center[first]) > tolerance * abs(center[first]))
    detail = (
        f"{counted(len(worst), 'step')} outside of the tolerance, allowed {'is' if allowed == 1 else 'are'} {allowed}; "
        f"first {first}: {value:.6g}, recorded {center[first]:.6g}; {beside}"
    )
    return row.verdict(Outcome.REGRESSION, detail=detail, **known | {"value": value, "baseline": center[first]})


def series_notes(launches: Sequence[LaunchFacts]) -> list[str]:
    """Return what was measured, and which replicas differ."""
    return list(dict.fromkeys(filter(None, (text for one in launches for text in (one.optimizers, one.replicas)))))
