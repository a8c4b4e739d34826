"""Contents of the page for each test: rows of verdicts, their intervals, and the values that its script draws."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np

from pytest_aorta.common.text import some_of
from pytest_aorta.report.data import AB_REFERENCE, Case, Report, Test
from pytest_aorta.report.provenance import provenance_values
from pytest_aorta.report.timeline import schedule_drawing, step_drawing, waits_drawing
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.session.record import Side
from pytest_aorta.verdict.metrics import METRICS, middle_of
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import EXPECTED_REGRESSION, FINDINGS, Verdict

# The labels of verdicts from worst to best; metrics that were not compared come last.
SEVERITY = (*FINDINGS, EXPECTED_REGRESSION, Outcome.CHANGED, Outcome.PASS, Outcome.NOT_APPLICABLE)
# Launches of a baseline in the history of a metric.
_MOST_PAST = 40


def _severity(verdict: Verdict) -> int:
    """Return the rank of a verdict in :data:`SEVERITY`; 0 is the worst."""
    return SEVERITY.index(verdict.label)


def failing_first(report: Report) -> list[int]:
    """Return the indices of the tests: failed tests first, then by the worst verdict, then in the order of running.

    A test that failed without a verdict, for example because a launch failed, is sorted with the regressions.
    """

    def key(place: int) -> tuple[bool, int]:
        record = report.tests[place].record
        without = 0 if record.has_failed else len(SEVERITY)
        return not record.has_failed, min(map(_severity, record.verdicts), default=without)

    return sorted(range(len(report.tests)), key=key)


def compared(case: Case) -> list[Verdict]:
    """Return the verdicts of the metrics that were compared, the worst first."""
    return sorted((row for row in case.comparison.rows if row.outcome is not Outcome.NOT_APPLICABLE), key=_severity)


def notable(test: Test) -> list[tuple[Outcome, list[str]]]:
    """Return the entries of a test's heading, the worst first: an outcome with its metrics and their changes."""
    found: dict[Outcome, list[str]] = {}
    for row in sorted(test.record.verdicts, key=_severity):
        if row.is_finding:
            change = "" if row.delta is None else f" {row.change.partition(' [')[0]}"
            found.setdefault(row.outcome, []).append(f"{row.metric}{change}")
    return list(found.items())


def unremarkable(test: Test) -> str:
    """Return the number of a test's verdicts that are not findings, by label; the heading only counts these."""
    counts = Counter(row.label for row in test.record.verdicts if not row.is_finding)
    return ", ".join(f"{counts[label]} {label}" for label in SEVERITY if counts[label])


def sparkline(case: Case, metric: str) -> list[tuple[float, float]]:
    """Return the points of a metric over the baseline's launches and then the candidate's, within 60 by 14; or none."""
    stored = [launch.facts for launch in case.baseline.launches] if case.baseline else []
    launches = [*stored[-_MOST_PAST:], *case.candidate]
    values = [METRICS[metric].measure(facts) for facts in launches] if metric in METRICS and stored else []
    numbers = [(place, value) for place, value in enumerate(values) if isinstance(value, float | int)]
    if len(numbers) < 2:
        return []
    low, high = (edge(value for _, value in numbers) for edge in (min, max))
    last = len(launches) - 1
    return [(60 * place / last, 14 * (high - value) / ((high - low) or 1)) for place, value in numbers]


def compared_with(verdict: Verdict) -> str:
    """Return the name of the other side of a verdict."""
    reference = verdict.reference
    if reference.is_ab:
        return f"{AB_REFERENCE} {reference.name}".rstrip()
    if reference.revision is None:
        return "stored baseline" if verdict.baseline is not None else "no stored baseline"
    return f"stored baseline\N{NO-BREAK SPACE}{reference.revision}"


def provenance(cases: Sequence[Case], *, has_baseline: bool = True) -> dict[str, dict[str, str]]:
    """Return the time, host and version of the launches of each side of some cases: side -> label -> value."""
    sides: dict[str, list[LaunchFacts]] = {Side.CANDIDATE: []}
    for case in cases:
        sides[Side.CANDIDATE] += case.candidate
        sides.setdefault(case.reference_name, []).extend(case.reference)
        if has_baseline and case.baseline:
            sides[case.baseline_name] = [*case.baseline.center_launches]
    return {
        name: {
            label: " to ".join(values) if label == "measured" else some_of(values)
            for label, values in provenance_values(launches).items()
        }
        for name, launches in sides.items()
        if launches
    }


# Range of the drawing to either side, in tolerances. An interval that extends beyond the range ends in an arrow.
REACH = 3.0
WIDTH = 100.0


def _position(tolerances: float) -> float:
    return round((max(-REACH, min(tolerances, REACH)) / REACH + 1) / 2 * WIDTH, 1)


@dataclass(frozen=True)
class _IntervalMarks:
    """Positions from 0 to :data:`WIDTH`; ``left`` and ``right`` say whether an end lies beyond the drawing.

    ``times_allowed`` is the size of the change as text, in tolerances.
    """

    low: float
    middle: float
    high: float
    left: bool
    right: bool
    times_allowed: str
    lower_limit: float = _position(-1.0)
    zero: float = _position(0.0)
    upper_limit: float = _position(1.0)


def interval_marks(verdict: Verdict) -> _IntervalMarks | None:
    """Return the positions to draw; None where a verdict has no change or no tolerance."""
    tolerance = verdict.tolerance.value
    if verdict.delta is None or not tolerance:
        return None
    low = verdict.delta if verdict.low is None else verdict.low
    high = verdict.delta if verdict.high is None else verdict.high
    times = abs(verdict.delta) / tolerance
    low_at, middle, high_at = (_position(end / tolerance) for end in (low, verdict.delta, high))
    left, right = low < -REACH * tolerance, high > REACH * tolerance
    times_allowed = f"{times:,.{0 if times >= 9.95 else 1}f}\N{MULTIPLICATION SIGN}"
    return _IntervalMarks(low_at, middle, high_at, left, right, times_allowed)


# Step times of a launch, so that the page of a large session opens.
_MOST_NUMBERS = 8_000
# Steps of a curve.
_MOST_STEPS = 4_000


def case_plots(case: Case) -> dict[str, Any]:
    """Return what the page's script draws of a case, by the kinds of its figures; None where nothing is known."""
    draw = {
        "schedule": schedule_drawing,
        "timeline": step_drawing,
        "waits": waits_drawing,
    }
    launches = [(side, *launch) for side, results in case.results.items() for launch in results.items()]
    return {
        "launches": [_series(*launch) for launch in launches],
        "bands": list(_bands(case)),
        "reference": case.reference_name,
        "loss": _curves(case, "loss"),
        "grad_norm": _curves(case, "grad_norm"),
        **{kind: (drawing := of(case)) and asdict(drawing) for kind, of in draw.items()},
    }


def _series(side: str, number: int, result: WorkloadResult) -> dict[str, Any]:
    times_ms = np.asarray(result.rank_step_times_ms)
    block = -(-times_ms.size // _MOST_NUMBERS)
    # Readers look for slow steps, so the slowest step is drawn where several steps share a point.
    starts = np.arange(0, times_ms.shape[1], block)
    return {
        "side": side,
        "number": number,
        "block": block,
        "ranks": np.maximum.reduceat(times_ms, starts, axis=1).round(3).tolist(),
    }


def _bands(case: Case) -> Iterator[dict[str, Any]]:
    """Yield the range of the medians of the A/B reference and of the stored baseline, as far as the case has them."""
    sides = (
        (Side.REFERENCE, case.reference_name, case.reference),
        ("baseline", case.baseline_name, case.baseline.center_launches if case.baseline else ()),
    )
    for side, name, launches in sides:
        if p50s := [facts.step_time_ms["p50"] for facts in launches]:
            p50 = min(p50s), middle_of(p50s, is_relative=True), max(p50s)
            yield {"side": side, "name": name, "p50": [float(f"{value:.6g}") for value in p50]}


def _curves(case: Case, name: str) -> dict[str, Any] | None:
    """Return the losses, or norms of gradients, by step of one launch of each side; None where neither has any."""
    curves: dict[str, dict[int, float]] = {}
    for side, launches, results in case.sides:
        curves[side] = _curve(launches[-1], name) if launches else {}
        if results and not curves[side]:
            curves[side] = dict(enumerate(getattr(results[-1], name), 1))
    steps = sorted({step for curve in curves.values() for step in curve})
    steps = steps[:: -(-len(steps) // _MOST_STEPS)] if steps else []
    lines = [{"side": side, "values": [curve.get(step) for step in steps]} for side, curve in curves.items() if curve]
    return {"steps": steps, "lines": lines} if lines else None


def _curve(facts: LaunchFacts, name: str) -> dict[int, float]:
    """Return the means over ranks of a script's series, by step."""
    ranks: list[dict[str, float]] = next((getattr(series, name) for series in facts.series if series.is_main), [])
    steps = sorted(set.intersection(*({*map(int, rank)} for rank in ranks))) if ranks else []
    return {step: float(f"{fmean(rank[str(step)] for rank in ranks):.6g}") for step in steps}
