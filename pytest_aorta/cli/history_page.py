"""The page of a history: each case with its change points and charts, in one file that loads nothing from outside."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from itertools import starmap
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


def render(histories: Sequence[CaseHistory]) -> str:
    """Return the HTML of the page; cases with the newest changes come first.

    Raises:
        UsageError: Otava is not installed.
    """
    found = [(history, find_changes(history)[::-1]) for history in histories]
    found.sort(key=lambda case: case[1][0].first_after.measured_at if case[1] else "", reverse=True)
    return rendered(
        "history",
        ["history.js"],
        cases=found,
        max_rows=MAX_ROWS,
        metrics=METRICS,
        data=list(starmap(_chart_data, found)),
    )


def _chart_data(history: CaseHistory, changes: Sequence[Change]) -> dict[str, Any]:
    """Return the values that the page's script draws; long lists are little-endian numbers in base64."""
    versions = history.versions
    at = [index for index, version in enumerate(versions) for _ in version.launches]
    return {
        "names": [version.commit[:_SHORT] if version.commit else "?" for version in versions],
        "dirty": [index for index, version in enumerate(versions) if version.dirty],
        "times": [version.measured_at for version in versions],
        "at": _encoded(at, "<u4"),
        "revisions": history.revisions,
        "charts": {name: _chart(history, changes, name) for name in history.metrics},
    }


def _chart(history: CaseHistory, changes: Sequence[Change], name: str) -> dict[str, Any]:
    versions = history.versions
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
        "changes": [[change.index, change.verdict] for change in changes if change.metric == name],
    }


def _encoded(values: npt.ArrayLike, kind: str) -> str:
    return base64.b64encode(np.asarray(values, dtype=kind).tobytes()).decode("ascii")
