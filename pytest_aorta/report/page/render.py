"""Renders the HTML page: one file that includes its script, style and data and loads nothing from outside."""

from __future__ import annotations

import functools
import re
from collections import Counter
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from pytest_aorta.common.text import counted
from pytest_aorta.report.data import Report
from pytest_aorta.report.lanes import collective_overlaps, rank_overlaps
from pytest_aorta.report.page import rows
from pytest_aorta.report.page.interval import interval_marks
from pytest_aorta.report.page.plots import case_plots, numbers_a_launch
from pytest_aorta.report.page.templates import html_template
from pytest_aorta.verdict.metrics import METRICS
from pytest_aorta.verdict.verdicts import Verdict

MAX_FAILURE_CHARACTERS = 20_000
_FOLDER = files("pytest_aorta.report.page")


def render(report: Report) -> str:
    """Return the HTML of a report."""
    tests = rows.failing_first(report)
    limit = numbers_a_launch(report)
    plots = {
        f"{index}-{number}": case_plots(case, limit)
        for index, test in enumerate(tests)
        for number, case in enumerate(test.cases)
    }
    table = [(index, test, row, sort_key(row)) for index, test in enumerate(tests) for row in test.verdicts]
    return _template().render(
        report=report,
        tests=tests,
        plots=plots,
        table=sorted(table, key=lambda entry: rows.severity(entry[2])),
        outcomes=Counter(test.outcome for test in report.final),
        num_tests=counted(len(report.final), "test"),
        verdicts=sorted({row.outcome for test in tests for row in test.verdicts}, key=list(rows.SEVERITY).index),
        rank_times=rows.rank_times,
        environment_rows=rows.environment_rows,
        config_rows=rows.config_rows,
        rank_overlaps=rank_overlaps,
        collective_overlaps=collective_overlaps,
        interval_marks=interval_marks,
        metrics=METRICS,
        style=_asset("vendor/uPlot.min.css") + _asset("page.css"),
        library=_asset("vendor/uPlot.iife.min.js"),
        script=_asset("theme.js") + _asset("page.js"),
    )


@functools.cache
def _template() -> jinja2.Template:
    filters = {"ms": _ms, "percent": _percent, "bounded": _bounded, "breakable": _breakable}
    return html_template("page", _asset, filters)


def sort_key(row: Verdict) -> dict[str, Any]:
    """Return the sort keys of the columns whose text does not sort by itself."""
    delta, allowed = row.delta, row.tolerance.value
    return {
        "change": "" if delta is None else delta,
        "tolerances": delta / allowed if delta is not None and allowed else "",
        "tolerance": "" if allowed is None else allowed,
        "verdict": rows.severity(row),
    }


def _asset(name: str) -> str:
    """Return a file of this package, which goes into the page unescaped because it contains no input."""
    return _FOLDER.joinpath(name).read_text(encoding="utf-8")


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _breakable(nodeid: str) -> Markup:
    """Return a node id that may wrap between its parts, but not within a name."""
    return Markup("<wbr>").join(part for part in re.split(r"(?<=[/:])(?![/:])", nodeid))


def _bounded(text: str) -> str:
    cut = len(text) - MAX_FAILURE_CHARACTERS
    return text if cut <= 0 else f"{text[:MAX_FAILURE_CHARACTERS]}\n... and {cut:,} more characters"
