"""Renders the HTML page: one file that includes its script, style and data and loads nothing from outside."""

import functools
import re
from collections import Counter
from importlib.resources import files

import jinja2
from markupsafe import Markup

from pytest_aorta.report.data import Report
from pytest_aorta.report.page import rows
from pytest_aorta.verdict.metrics import METRICS

MAX_FAILURE_CHARACTERS = 20_000


def render(report: Report) -> str:
    """Return the HTML of a report."""
    places = rows.failing_first(report)
    tests = [report.tests[place] for place in places]
    verdicts = Counter(row.label for record in report.final for row in record.verdicts)
    shown = {row.label for test in tests for row in test.record.verdicts}
    plots = {
        f"{index}-{number}": rows.case_plots(case)
        for index, test in enumerate(tests)
        for number, case in enumerate(test.cases)
    }
    # The template escapes values and fails where a value is missing.
    return (
        _environment()
        .get_template("page.html.jinja")
        .render(
            report=report,
            tests=tests,
            places=places,
            is_alone=sum(test.record.has_failed for test in tests) == 1,
            plots=plots,
            outcomes=Counter(
                record.outcome for record in sorted(report.final, key=lambda record: not record.has_failed)
            ),
            verdicts=[(label, verdicts[label]) for label in rows.SEVERITY if verdicts[label]],
            shown_outcomes=[label for label in rows.SEVERITY if label in shown],
            rows=rows,
            metrics=METRICS,
            style=_asset("vendor/uPlot.min.css") + _asset("page.css"),
            library=_asset("vendor/uPlot.iife.min.js"),
            script="".join(map(_asset, ("shared.js", "charts.js", "page.js"))),
        )
    )


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"ms": _ms, "breakable": _breakable, "bounded": _bounded}
    return environment


def _asset(name: str) -> str:
    """Return a file of this package, which goes into the page unescaped because it contains no input."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _breakable(nodeid: str) -> Markup:
    """Return a node id that may wrap between its parts, but not within a name."""
    return Markup("<wbr>").join(part for part in re.split(r"(?<=[/:])(?![/:])", nodeid))


def _bounded(text: str) -> str:
    cut = len(text) - MAX_FAILURE_CHARACTERS
    return text if cut <= 0 else f"{text[:MAX_FAILURE_CHARACTERS]}\n... and {cut:,} more characters"
