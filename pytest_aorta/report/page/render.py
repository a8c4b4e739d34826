"""Renders the HTML page: one file that includes its script, style and data and loads nothing from outside."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any, Final

import jinja2
from markupsafe import Markup

from pytest_aorta.report.data import Report
from pytest_aorta.report.page import rows
from pytest_aorta.report.page.rows import REACH, case_plots, interval_marks, numbers_a_launch
from pytest_aorta.report.timeline import collective_overlaps, rank_overlaps
from pytest_aorta.verdict.metrics import METRICS

MAX_FAILURE_CHARACTERS = 20_000
# The most failed tests that are open at first, so that a page still begins with a list if every test failed.
MAX_OPEN = 10
_FOLDER = files("pytest_aorta.report.page")


def render(report: Report) -> str:
    """Return the HTML of a report."""
    places = rows.failing_first(report)
    tests = [report.tests[place] for place in places]
    verdicts = Counter(row.label for test in report.final for row in test.verdicts)
    table = [row for test in tests for row in test.verdicts]
    limit = numbers_a_launch(report)
    plots = {
        f"{index}-{number}": case_plots(case, limit)
        for index, test in enumerate(tests)
        for number, case in enumerate(test.cases)
    }
    return _template().render(
        report=report,
        tests=tests,
        places=places,
        max_open=MAX_OPEN,
        plots=plots,
        outcomes=Counter(test.outcome for test in sorted(report.final, key=lambda test: not test.is_failing)),
        verdicts=[(label, verdicts[label]) for label in rows.SEVERITY if verdicts[label]],
        shown_outcomes=[label for label in rows.SEVERITY if any(row.label == label for row in table)],
        rows=rows,
        rank_overlaps=rank_overlaps,
        collective_overlaps=collective_overlaps,
        interval_marks=interval_marks,
        reach=REACH,
        metrics=METRICS,
        style=asset("vendor/uPlot.min.css") + asset("page.css"),
        library=asset("vendor/uPlot.iife.min.js"),
        script=asset("shared.js") + asset("charts.js") + asset("page.js"),
    )


def html_template(
    name: str, read: Callable[[str], str], filters: Mapping[str, Callable[..., Any]] | None = None
) -> jinja2.Template:
    """Return the template ``{name}.html.jinja``, which escapes values and fails where a value is missing.

    ``read`` reads the template's file and the files that it imports.
    """
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(read),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= filters or {}
    return environment.get_template(f"{name}.html.jinja")


@functools.cache
def _template() -> jinja2.Template:
    return html_template("page", asset, _FILTERS)


def asset(name: str) -> str:
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


_FILTERS: Final[dict[str, Callable[..., Any]]] = {
    "ms": _ms,
    "percent": _percent,
    "breakable": _breakable,
    "bounded": _bounded,
}
