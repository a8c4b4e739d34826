"""Builds the rows of the page's tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pytest_aorta.report.data import Case, Launch, Report, Test
from pytest_aorta.verdict.applicability import identity
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Verdict

# From worst to best; outcomes that decide nothing come before those that are fine.
SEVERITY = (
    Outcome.REGRESSION, Outcome.MISSING, Outcome.INCONCLUSIVE, Outcome.NOT_APPLICABLE, Outcome.IMPROVED, Outcome.PASS,
)  # fmt: skip
UNKNOWN = "not stored"


@dataclass(frozen=True)
class Difference:
    """A key of the config or the environment, with its value on both sides as text."""

    key: str
    candidate: str
    reference: str

    @property
    def differs(self) -> bool:
        """Return whether both values are known and differ."""
        return self.candidate != self.reference and UNKNOWN not in (self.candidate, self.reference)


@dataclass(frozen=True)
class RankTimes:
    """The step times of one rank in a launch, in milliseconds; ``lag_ms`` is None where waits were not measured."""

    rank: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    lag_ms: float | None


def severity(verdict: Verdict) -> int:
    """Return the rank of a verdict's outcome in :data:`SEVERITY`; 0 is the worst."""
    return SEVERITY.index(verdict.outcome)


def failing_first(report: Report) -> list[Test]:
    """Return failed tests first, then by their worst verdict, else in the order in which they ran."""
    least = len(SEVERITY)
    return sorted(
        report.tests, key=lambda test: (not test.is_failing, min(map(severity, test.verdicts), default=least))
    )


def rank_times(launch: Launch) -> list[RankTimes]:
    """Return one row per rank."""
    times_ms = np.asarray(launch.result.rank_step_times_ms)
    columns = np.quantile(times_ms, (0.5, 0.99, 1.0), axis=1).T.tolist()
    lags = launch.facts.rank_lag_ms
    return [
        RankTimes(rank, p50, p99, peak, lags[rank] if lags else None) for rank, (p50, p99, peak) in enumerate(columns)
    ]


def environment_rows(case: Case) -> list[Difference]:
    """Return the environments of the first candidate launch and of the other side; differences first."""
    if not case.candidate:
        return []
    return _differences(case.candidate[0].result.environment, _other_environment(case))


def config_rows(case: Case) -> list[Difference]:
    """Return the configs of the first candidate launch and of the other side; differences first."""
    if not case.candidate:
        return []
    stored = case.baseline.config if case.baseline else {}
    other = case.reference[0].result.config if case.reference else stored
    return _differences(identity(case.candidate[0].result.config), identity(other))


def _other_environment(case: Case) -> Mapping[str, Any]:
    if case.reference:
        return case.reference[0].result.environment
    return case.others[-1].environment if case.others else {}


def _differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[Difference]:
    rows = [
        Difference(key, *(_text(side[key]) if key in side else UNKNOWN for side in (here, there)))
        for key in sorted(here.keys() | there.keys())
    ]
    return sorted(rows, key=lambda row: not row.differs)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
