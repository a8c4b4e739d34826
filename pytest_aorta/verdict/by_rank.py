"""Comparison of metrics that each rank has values of: costs, the growth of memory, what scripts recorded by step. Pure.

Costs repeat to the last unit, so that one launch decides. Each rank is compared with the same rank of the other side,
and the worst rank decides. What differs between launches of the other side, e.g. operators that depend on the data, is
left out by its name.

Curves of an unedited script are equal bit for bit where the recorded launches are. Elsewhere each step may differ from
the median of the recorded launches by the tolerance, and a few steps by more: one in a hundred, at least one and at
most fifty, as in Megatron-LM's functional tests.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import TypeAlias

from pytest_aorta.common.text import brief, counted, ranks_text, some_of
from pytest_aorta.result.facts import Launches, LaunchFacts
from pytest_aorta.result.trace.profiled_steps import Cost, Counts, by_rank
from pytest_aorta.verdict.environment import changes, is_reproducible
from pytest_aorta.verdict.metrics import Curve, Origin, Tolerance, Value
from pytest_aorta.verdict.noise import RESET
from pytest_aorta.verdict.rows import Row
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import MissingPart, Reason, Verdict

_MOST_NAMED = 6
# A cost whose parts have the places of those of another one.
_PLACED_AS = {Cost.COLLECTIVE_BYTES: Cost.COLLECTIVES, Cost.FLOPS: Cost.OPERATORS}
_LINE = re.compile(r":\d+")
# The order of outcomes, the one that decides first.
_ORDER = (Outcome.REGRESSION, Outcome.IMPROVED, Outcome.PASS)


@dataclass(frozen=True)
class _CostChange:
    """A cost of one rank on both sides, part by part.

    Attributes:
        rank: The rank.
        before, after: Part -> number in a step.
    """

    rank: int
    before: Mapping[str, int]
    after: Mapping[str, int]

    @property
    def totals(self) -> tuple[int, int]:
        """Return the sum of all parts before and after."""
        return sum(self.before.values()), sum(self.after.values())

    @property
    def excess(self) -> float:
        """Return the size of the change, as a fraction of the cost before."""
        before, after = self.totals
        return abs(after - before) / max(before, 1)

    @property
    def parts(self) -> dict[str, int]:
        """Return the change of each part that changed, the largest first."""
        changes = Counter(self.after)
        changes.subtract(self.before)
        names = sorted(changes, key=lambda name: (-abs(changes[name]), name))
        return {name: changes[name] for name in names if changes[name]}

    def outcome(self, tolerance: Tolerance) -> Outcome:
        """Return the outcome of this rank. Other parts of the same sum are no pass if the cost has to be exact."""
        before, after = self.totals
        allowed = (tolerance.value or 0.0) * before
        if after - before > allowed or (tolerance.is_exact and after == before and self.parts):
            return Outcome.REGRESSION
        return Outcome.IMPROVED if before - after > allowed else Outcome.PASS


@dataclass(frozen=True)
class Costs:
    """A cost of each rank, of launches and of those of the other side."""

    launches: Launches
    others: Launches
    cost: Cost

    @cached_property
    def varying(self) -> set[str]:
        """The parts that differ between launches of the other side on any rank, and are left out."""
        first, *further = [by_rank(launch.costs, self.cost) or {} for launch in self.others]
        pairs = [(first[rank], other[rank]) for other in further for rank in first.keys() & other.keys()]
        return {name for one, other in pairs for name, _ in one.items() ^ other.items()}

    def changes(self, launch: LaunchFacts) -> list[_CostChange]:
        """Return the cost of each rank of a launch beside that of the last launch of the other side."""
        here, there = (by_rank(side.costs, self.cost) or {} for side in (launch, self.others[-1]))
        return [
            _CostChange(
                rank, *({name: side[rank][name] for name in side[rank].keys() - self.varying} for side in (there, here))
            )
            for rank in sorted(here.keys() & there.keys())
        ]

    def first(self, rank: int | None = None) -> _CostChange | None:
        """Return the change of a rank, or of the first that differs, in the last launch; None if there is none."""
        changes = self.changes(self.launches[-1])
        return next((change for change in changes if change.parts and rank in (None, change.rank)), None)

    def text_of(self, rank: int) -> str:
        """Return the parts that came or went on a rank in the last launch; empty if none did."""
        worst = self.first(rank)
        return self.text(worst, self.changes(self.launches[-1])) if worst else ""

    def text(self, worst: _CostChange, changes: Sequence[_CostChange]) -> str:
        """Return what came and what went on the worst rank, and the ranks on which it did unless on all of them."""
        parts = worst.parts
        named, rest = list(parts)[:_MOST_NAMED], list(parts)[_MOST_NAMED:]
        texts = [
            self._part(worst, name) + (f" ({place})" if (place := self.place(worst, name)) else "") for name in named
        ]
        same = {change.rank for change in changes if change.parts == parts}
        ranks = {change.rank for change in changes}
        if others := {change.rank for change in changes if change.parts} - same:
            where = f" on {ranks_text(same)}; {ranks_text(others)} changed otherwise"
        elif same != ranks:
            where = f" on {ranks_text(same)} only"
        else:  # stages of a pipeline have costs of their own
            is_one = len({change.totals for change in changes}) == 1
            where = "" if is_one else f"; the values are those of rank {worst.rank}"
        return some_of(texts + rest, _MOST_NAMED) + where

    def _part(self, change: _CostChange, name: str) -> str:
        more = change.parts[name]
        match self.cost:
            case Cost.COLLECTIVES:
                sizes = [
                    (by_rank(side[-1].costs, Cost.COLLECTIVE_BYTES) or {}).get(change.rank, {})
                    for side in (self.others, self.launches)
                ]
                num_bytes = sizes[1].get(name, 0) - sizes[0].get(name, 0)
                moved = f", {_size(num_bytes)}" if num_bytes else ""
                return f"{name} {change.before.get(name, 0)} -> {change.after.get(name, 0)} a step{moved}"
            case Cost.COLLECTIVE_BYTES:
                return f"{name} {_size(more)}"
            case Cost.FLOPS:
                return f"{name} {more:+,}"
            case Cost.RECOMPILATIONS:
                steps = counted(self.launches[-1].num_steps, "measured step")
                return f"{change.after.get(name, 0)} in {steps}, {change.before.get(name, 0)} before"
        return f"{'+' if more > 0 else '-'} {name} x {abs(more)}"

    def place(self, change: _CostChange, name: str) -> str:
        """Return the place of most calls that came or went, and how many others there are; empty if not known."""
        placed_as = _PLACED_AS.get(self.cost, self.cost)
        sides = [_places(side, change.rank) for side in (self.launches, self.others)]
        if not all(sides):
            return ""
        came, left = (
            side.get(placed_as, {}).get(name, {}) for side in (sides if change.parts[name] > 0 else reversed(sides))
        )
        # A line that was added moves those below it, whose code stays the same.
        more = _by_code(came) - _by_code(left)
        calls = {place: min(number, more[code_of(place)]) for place, number in came.items()}
        places = sorted(
            (place for place, number in calls.items() if number), key=lambda place: (place in left, -calls[place])
        )
        if not places:
            return ""
        others_too = f" and {counted(len(places) - 1, 'other line')}" if len(places) > 1 else ""
        return f"{places[0]}{f' x {calls[places[0]]}' if calls[places[0]] > 1 else ''}{others_too}"


def judge_costs(row: Row, cost: Cost) -> Verdict:
    """Return the verdict on a cost: a regression if any rank of any launch costs more than allowed."""
    costs, launch, other = Costs(row.launches, row.others, cost), row.launches[-1], row.others[-1]
    changes = [change for each in row.launches for change in costs.changes(each)]
    if not changes:  # of a simulated world, some ranks are launched
        here, there = ([rank for group in side.costs for rank in group.ranks] for side in (launch, other))
        detail = f"the launch has the costs of ranks {here}, the {row.reference} of ranks {there}"
        return row.missing(MissingPart.BASELINE_VALUE, f"{detail}; record it again with {RESET}")
    outcome = min((change.outcome(row.tolerance) for change in changes), key=_ORDER.index)
    deciding = [change for change in changes if change.outcome(row.tolerance) is outcome]
    # Of ranks that pass, the one with the largest cost is shown.
    worst = max(deciding, key=lambda change: change.totals[1] if outcome is Outcome.PASS else change.excess)
    before, after = worst.totals
    is_gone = cost is Cost.COLLECTIVES and any(name not in worst.after for name in worst.parts)
    if outcome is Outcome.IMPROVED and is_gone and not (launch.weight_hashes and is_reproducible(launch)):
        outcome = Outcome.REGRESSION
    details = [costs.text(worst, changes)] if worst.parts else []
    if worst.parts and (versions := row.other_versions()):
        details.append(f"{versions}, which can be the cause")
    if costs.varying:
        named = some_of(sorted(costs.varying), _MOST_NAMED)
        details.append(f"left out, since it differs between launches of the {row.reference}: {named}")
    unknown = {name for group in row.launches[0].costs for name in group.costs.without_flops}
    if unknown and cost is Cost.FLOPS:
        details.append(f"no formula is known for {brief(', '.join(sorted(unknown)))}, which counts as 0")
    delta = after / before - 1 if before else None
    return row.decided(outcome, float(after), float(before), "; ".join(details), delta)


def _size(num_bytes: int) -> str:
    return f"{num_bytes:+,} B" if abs(num_bytes) < 10_000 else f"{num_bytes / 1e6:+.4g} MB"


def _places(launches: Launches, rank: int) -> Mapping[Cost, Mapping[str, Counts]]:
    """Return the places of the costs of a rank, if they are known; of a baseline, one launch has them."""
    groups = (group.costs for launch in launches for group in launch.costs if rank in group.ranks)
    return next((costs.places for costs in groups if costs.places), {})


def code_of(place: str) -> str:
    """Return a place without the number of its line, which code above it moves."""
    return _LINE.sub("", place)


def _by_code(places: Mapping[str, int]) -> Counter[str]:
    found: Counter[str] = Counter()
    for place, calls in places.items():
        found[code_of(place)] += calls
    return found


# The most by which unchanged code exceeds the growth of memory of its baseline, as a fraction of this growth.
_GROWTH_VARIES = 0.25


def judge_growth(row: Row) -> Verdict:
    """Return the verdict on the growth of memory: a regression if a rank exceeds that of the other side in each launch.

    Without a marker, code that leaks may exceed the growth of its baseline by a quarter of it.
    """
    allowed = row.tolerance.value or 0.0
    is_default = row.tolerance.origin is Origin.DEFAULT
    here, there = ([facts.growth_of(row.metric.grows) for facts in side] for side in (row.launches, row.others))
    recorded = [max(ranks) for ranks in zip(*there, strict=False)]
    limits = [more + max(allowed, is_default * _GROWTH_VARIES * more) for more in recorded]
    least = [min(ranks) for ranks in zip(*here, strict=False)]
    rank = max(range(min(len(least), len(limits))), key=lambda rank: least[rank] - limits[rank])
    value, baseline = round(least[rank], 3), round(recorded[rank], 3)
    delta = value - baseline
    if least[rank] <= limits[rank]:
        return row.decided(Outcome.PASS, value, baseline, "", delta)
    now, before = (
        getattr(side[-1], f"{row.metric.name}_bytes")[rank] / side[-1].num_steps / 2**20
        for side in (row.launches, row.others)
    )
    of = "memory" if row.metric.grows == "memory" else "resident memory"
    num_others = sum(grows > limit for grows, limit in zip(least, limits, strict=False)) - 1
    others = f" (and {counted(num_others, 'other')})" if num_others else ""
    detail = (
        f"{of} of rank {rank}{others} grows by {now:.3g} MiB a step, that of the {row.reference} by {before:.3g} MiB; "
        f"look for what each step keeps, such as a loss with its graph"
    )
    return row.decided(Outcome.REGRESSION, value, baseline, detail, delta)


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


# The values of each launch.
_Curves: TypeAlias = Sequence[Mapping[_Point, float]]


def judge_curves(row: Row, curve: Curve) -> Verdict:
    """Return the verdict on the values of all optimizers, by step and rank."""
    here, there = ([_points(launch, curve) for launch in side] for side in (row.launches, row.others))
    shared = set(there[-1]).intersection(*here, *there)
    lost, added = there[-1].keys() - shared, here[-1].keys() - shared
    verdict = _judge_points(row, *([{at: points[at] for at in shared} for points in side] for side in (here, there)))
    if not lost and not added:
        return verdict
    side = "the launch" if lost else f"the {row.reference}"
    detail = f"{side} has no {row.metric.name} of {_first(lost or added, row)}{_optimizers(row)}"
    if verdict.outcome is Outcome.REGRESSION:
        return verdict.replace(detail=f"{verdict.detail}; {detail}")
    if lost:
        return row.lost(detail, row.value, verdict.baseline)
    return row.missing(MissingPart.BASELINE_VALUE, detail).replace(baseline=verdict.baseline)


def _judge_points(row: Row, here: _Curves, there: _Curves) -> Verdict:
    """Return the verdict on the values that all launches have."""
    num_steps = len({(point.series, point.step) for point in there[-1]})
    baseline = row.metric.measure(row.others[-1])
    do_repeat = row.tolerance.origin is not Origin.MARKER and _do_bits_repeat(row, there)
    other = next(filter(None, (changes(launch, row.others[-1]).machine for launch in row.launches)), "")
    is_exact = row.tolerance.is_exact or (do_repeat and not other)
    if is_exact:
        row = replace(row, tolerance=row.tolerance.replace(value=None))
    if all(points == there[-1] for points in (*here, *there)):
        return row.decided(Outcome.PASS, row.value, baseline, f"{counted(num_steps, 'step')}, bit for bit")
    if is_exact:
        if (first := _first_other(here, there, row)) is None:
            return row.decided(Outcome.PASS, row.value, baseline)
        detail, value, recorded = first
        return row.decided(Outcome.REGRESSION, value, recorded, detail)
    verdict = _judge_steps(row, here, there, baseline)
    if not do_repeat or verdict.outcome is not Outcome.PASS:
        return verdict
    if row.tolerance.origin is Origin.NUMERICS:
        return row.not_applicable(Reason.ENVIRONMENT, other, row.value, baseline)
    return verdict.replace(detail=f"{verdict.detail}; not compared bit for bit, {other}")


def _points(launch: LaunchFacts, curve: Curve) -> dict[_Point, float]:
    return {
        _Point(number, series.name, rank, step): value
        for number, series in enumerate(launch.series)
        for rank, values in enumerate(curve(series))
        for step, value in values.items()
    }


def _first(points: set[_Point], row: Row) -> _Point:
    series = row.launches[-1].series

    def order(point: _Point) -> tuple[int, int, int]:
        step = int(point.step)
        return series[point.series].turn(step) if point.series < len(series) else step, point.series, point.rank

    return min(points, key=order)


def _optimizers(row: Row) -> str:
    """Return the optimizers of both sides with their steps, after a semicolon; empty if they are the same."""
    here, there = (
        ", ".join(f"{one.steps} of {one.name}" for one in side[-1].series) for side in (row.launches, row.others)
    )
    return "" if here == there else brief(f"; the launch has {here}; the {row.reference} has {there}", 300)


def _do_bits_repeat(row: Row, there: _Curves) -> bool:
    """Return whether equal code computes equal bits on one machine: recorded launches did, or weights are compared."""
    do_repeat = all(points == there[0] for points in there) if len(there) > 1 else bool(row.others[-1].weight_hashes)
    return do_repeat and all(map(is_reproducible, (*row.launches, *row.others)))


def _first_other(here: _Curves, there: _Curves, row: Row) -> tuple[str, float, float] | None:
    """Return text on the first value that no recorded launch has and all ranks of this step, with both values."""
    different = {
        point for points in here for point, value in points.items() if all(other[point] != value for other in there)
    }
    if not different:
        return None
    first = _first(different, row)
    ranks = [point.rank for point in different if (point.series, point.step) == (first.series, first.step)]
    value, recorded = next(points[first] for points in here if points[first] != there[-1][first]), there[-1][first]
    where = f"step {first.step} of {first.name} on {ranks_text(ranks, len({point.rank for point in there[-1]}))}"
    return f"differs first in {where}: {value!r}, recorded {recorded!r}", value, recorded


def _judge_steps(row: Row, here: _Curves, there: _Curves, baseline: Value) -> Verdict:
    """Return the verdict on curves whose bits do not repeat: each step within the tolerance, but for a few."""
    tolerance = row.tolerance.value or 0.0
    center = {point: median(points[point] for points in there) for point in there[-1]}
    spreads = [abs(points[at] - middle) / abs(middle) for at, middle in center.items() if middle for points in there]
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
    beside = f"the recorded launches differ by up to {max(spreads, default=0.0):.2g} of the value"
    if not worst:
        return row.decided(Outcome.PASS, row.value, baseline, beside)
    first = _first(set(worst), row)
    value = next(each[first] for each in here if abs(each[first] - center[first]) > tolerance * abs(center[first]))
    detail = (
        f"{counted(len(worst), 'step')} outside of the tolerance, allowed {'is' if allowed == 1 else 'are'} {allowed}; "
        f"first {first}: {value:.6g}, recorded {center[first]:.6g}; {beside}"
    )
    return row.decided(Outcome.REGRESSION, value, center[first], detail)
