"""Prepares the data that the page's script draws, as plain JSON values; long lists are float32 in base64."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_aorta.report.data import Case, Launch, Report
from pytest_aorta.report.lanes import drawn_lanes
from pytest_aorta.result.facts import LaunchFacts

# Names of the sides that have launches of their own.
CANDIDATE, REFERENCE = "candidate", "reference"
# Numbers in the whole page: 16 characters encode three numbers, so this limit is 2.7 MB.
MAX_NUMBERS = 500_000
_LEAST_NUMBERS = 4_000
# Fractions of steps that a baseline's sample of twenty steps per launch resolves. Its p99 and maximum are stored.
_SAMPLE_FRACTIONS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95)
FRACTIONS = (*_SAMPLE_FRACTIONS, 0.99, 1.0)


def numbers_a_launch(report: Report) -> int:
    """Return how many step times per launch the page may contain, so that the page of a large session still opens."""
    launches = sum(len(case.candidate) + len(case.reference) for test in report.tests for case in test.cases)
    return max(_LEAST_NUMBERS, MAX_NUMBERS // max(1, launches))


def case_plots(case: Case, max_numbers: int) -> dict[str, Any]:
    """Return the step times of each launch, their quantiles, the ranges of the other sides, and a step's timeline."""
    sides = ((CANDIDATE, case.candidate), (REFERENCE, case.reference))
    return {
        "launches": [_series(side, launch, max_numbers) for side, launches in sides for launch in launches],
        "fractions": FRACTIONS,
        "curves": [step_quantiles(launch) for launch in case.candidate],
        "bands": list(_bands(case)),
        "reference": case.reference_name,
        "timeline": _timeline(case.candidate),
    }


def encoded(values: npt.ArrayLike) -> str:
    """Return the values as little-endian float32 in base64."""
    return base64.b64encode(np.asarray(values, dtype="<f4").tobytes()).decode("ascii")


def _series(side: str, launch: Launch, max_numbers: int) -> dict[str, Any]:
    times_ms = np.asarray(launch.result.rank_step_times_ms)
    block = -(-times_ms.size // max_numbers)
    # Readers look for slow steps, so the slowest step is drawn where several steps share a point.
    starts = np.arange(0, times_ms.shape[1], block)
    return {
        "side": side,
        "number": launch.number,
        "block": block,
        "num_steps": times_ms.shape[1],
        "ranks": [encoded(rank) for rank in np.maximum.reduceat(times_ms, starts, axis=1)],
    }


def step_quantiles(launch: Launch) -> list[float]:
    """Return the quantiles of the steps' maxima over ranks, at :data:`FRACTIONS`."""
    return _rounded(np.quantile(launch.result.step_times_ms, FRACTIONS))


def _stored_quantiles(facts: LaunchFacts) -> list[float]:
    times = facts.step_time_ms
    return [*_rounded(np.quantile(facts.step_time_sample_ms, _SAMPLE_FRACTIONS)), times["p99"], times["max"]]


def _bands(case: Case) -> Iterator[dict[str, Any]]:
    """Yield the ranges of the A/B reference and of the stored baseline, as far as the case has them."""
    if case.reference:
        curves = [step_quantiles(launch) for launch in case.reference]
        yield _band(REFERENCE, case.reference_name, curves, [launch.facts for launch in case.reference])
    if case.baseline:
        center = case.baseline.center_launches
        yield _band("baseline", case.baseline_name, [_stored_quantiles(facts) for facts in center], center)


def _band(side: str, name: str, curves: Sequence[Sequence[float]], launches: Sequence[LaunchFacts]) -> dict[str, Any]:
    """Return the lowest, middle and highest launch of a side, at each fraction of steps and of the medians."""
    p50s = [facts.step_time_ms["p50"] for facts in launches]
    return {
        "side": side,
        "name": name,
        "low": np.min(curves, axis=0).tolist(),
        "middle": np.median(curves, axis=0).tolist(),
        "high": np.max(curves, axis=0).tolist(),
        "p50": _rounded([min(p50s), float(np.median(p50s)), max(p50s)]),
        "launches": len(curves),
    }


def _timeline(launches: Sequence[Launch]) -> dict[str, Any] | None:
    """Return the timeline of the first profiled launch; None where no launch was profiled."""
    for launch in launches:
        if any(launch.result.timeline):
            ranks = [drawn_lanes(lanes) for lanes in launch.result.timeline]
            steps = [rank[-1].step_ms for rank in launch.result.overlap if rank]
            ends = [end for lanes in ranks for intervals in lanes.values() for _, end in intervals]
            return {
                "step_ms": max([*steps, *ends]),
                "ranks": [{name: encoded(lane) for name, lane in lanes.items()} for lanes in ranks],
            }
    return None


def _rounded(values: npt.ArrayLike) -> list[float]:
    return [float(f"{value:.6g}") for value in np.asarray(values, dtype=float).ravel()]
