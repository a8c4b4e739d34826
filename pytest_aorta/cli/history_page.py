"""The page of a history: each case with its change points and charts, in one file that loads nothing from outside."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_aorta.cli.history import CaseHistory, Change, find_changes
from pytest_aorta.report.page.render import rendered
from pytest_aorta.verdict.metrics import METRICS

# Rows of a table of versions; the charts show all versions.
MAX_ROWS = 100
# Characters of a commit on the axis of a chart.
_SHORT = 7
_MIB = 2.0**20


@dataclass(frozen=True)
class _Case:
    """A case with its change points, newest first."""

    history: CaseHistory
    changes: tuple[Change, ...]

    @property
    def newest(self) -> str:
        """Return the time of the newest change, or an empty text without a change."""
        return self.changes[0].first_after.measured_at if self.changes else ""

    @property
    def charts(self) -> list[str]:
        """Return the metrics that are numbers in some version."""
        return [name for name in self.history.metrics if any(row.numbers(name) for row in self.history.versions)]

    @property
    def versions(self) -> list[Any]:
        """Return the newest versions, newest first."""
        return list(self.history.versions[: -MAX_ROWS - 1 : -1])


def render(histories: Sequence[CaseHistory]) -> str:
    """Return the HTML of the page; cases with the newest changes come first.

    Raises:
        UsageError: Otava is not installed.
    """
    found = (_Case(history, tuple(reversed(find_changes(history)))) for history in histories)
    cases = sorted(found, key=lambda case: case.newest, reverse=True)
    return rendered(
        "history",
        ["history.js"],
        cases=cases,
        metrics=METRICS,
        data=[_chart_data(case) for case in cases],
    )


def _chart_data(case: _Case) -> dict[str, Any]:
    """Return the values that the page's script draws; long lists are little-endian numbers in base64."""
    versions = case.history.versions
    at = [index for index, version in enumerate(versions) for _ in version.launches]
    return {
        "names": [version.commit[:_SHORT] if version.commit else "?" for version in versions],
        "dirty": [index for index, version in enumerate(versions) if version.dirty],
        "times": [version.measured_at for version in versions],
        "at": _encoded(at, "<u4"),
        "revisions": case.history.revisions,
        "charts": {name: _chart(case, name) for name in case.history.metrics},
    }


def _chart(case: _Case, name: str) -> dict[str, Any]:
    versions = case.history.versions
    is_bytes = METRICS[name].unit == "B"
    unit = _MIB if is_bytes else 1.0
    medians = [float(np.median(numbers)) / unit if (numbers := row.numbers(name)) else np.nan for row in versions]
    launches = (launch.get(name) for version in versions for launch in version.launches)
    values = [float(value) / unit if isinstance(value, float | int) else np.nan for value in launches]
    return {
        "unit": "MiB" if is_bytes else METRICS[name].unit,
        "medians": _encoded(medians, "<f8"),
        "launches": _encoded(values, "<f8"),
        "baseline": _encoded([version.baselines.get(name, np.nan) / unit for version in versions], "<f8"),
        "changes": [[change.index, change.verdict] for change in case.changes if change.metric == name],
    }


def _encoded(values: npt.ArrayLike, kind: str) -> str:
    return base64.b64encode(np.asarray(values, dtype=kind).tobytes()).decode("ascii")
