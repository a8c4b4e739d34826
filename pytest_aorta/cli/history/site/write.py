"""Writes the pages: an index, a page per case, and the script and style that the pages share."""

from __future__ import annotations

import base64
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt

from pytest_aorta.cli.history.changes import Change, find_changes
from pytest_aorta.cli.history.links import PLACEHOLDER
from pytest_aorta.cli.history.series import CaseHistory, Version
from pytest_aorta.common.files import slug, write_text
from pytest_aorta.report.page.render import html_template
from pytest_aorta.verdict.metrics import METRICS

# Rows of the table of versions; the charts show all versions.
MAX_ROWS = 100
# Characters of a commit on the axis of a chart.
_SHORT = 7
_MIB = 2.0**20
_PAGE = files("pytest_aorta.report.page")
_SITE = files("pytest_aorta.cli.history.site")


@dataclass(frozen=True)
class CasePage:
    """A case with its change points, newest first, and the name of its page."""

    history: CaseHistory
    changes: tuple[Change, ...]
    file: str

    @property
    def newest(self) -> str:
        """Return the time of the newest change, or an empty text without a change."""
        return self.changes[0].first_after.measured_at if self.changes else ""


def write_site(histories: Sequence[CaseHistory], folder: Path, template: str | None) -> list[Path]:
    """Write the pages to ``folder`` and return their paths, the index first; files with other names are kept.

    Args:
        histories: The cases.
        folder: The folder of the pages, which is created.
        template: Address of a commit with :data:`PLACEHOLDER`; None makes no links.

    Raises:
        OSError: A file can't be written.
        UsageError: Otava is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pages = [_case_page(history) for history in histories]
    recent_first = sorted(pages, key=lambda page: page.newest, reverse=True)
    written = {"index.html": _template("index").render(pages=recent_first, link=functools.partial(_link, template))}
    written |= {page.file: _render(page, template) for page in pages}
    written |= {
        "history.js": _PAGE.joinpath("vendor/uPlot.iife.min.js").read_text("utf-8")
        + _PAGE.joinpath("shared.js").read_text("utf-8")
        + _read("site.js"),
        "history.css": _PAGE.joinpath("vendor/uPlot.min.css").read_text("utf-8")
        + _PAGE.joinpath("page.css").read_text("utf-8")
        + _read("site.css"),
    }
    for name, text in written.items():
        write_text(folder / name, text)
    return [folder / name for name in written]


def _case_page(history: CaseHistory) -> CasePage:
    changes = sorted(find_changes(history), key=lambda change: change.index, reverse=True)
    return CasePage(history, tuple(changes), f"{slug(history.case)}-{history.platform}.html")


def _render(page: CasePage, template: str | None) -> str:
    history = page.history
    return _template("case").render(
        page=page,
        history=history,
        charts=[name for name in history.metrics if any(row.numbers(name) for row in history.versions)],
        versions=list(history.versions[: -MAX_ROWS - 1 : -1]),
        metrics=METRICS,
        link=functools.partial(_link, template),
        data=chart_data(page, template),
    )


@functools.cache
def _template(name: str) -> jinja2.Template:
    return html_template(name, _read)


def _read(name: str) -> str:
    return _SITE.joinpath(name).read_text("utf-8")


def _link(template: str | None, version: Version) -> str | None:
    if template is None or version.commit is None:
        return None
    return template.replace(PLACEHOLDER, version.commit)


def chart_data(page: CasePage, template: str | None) -> dict[str, Any]:
    """Return the values that the page's script draws; long lists are little-endian numbers in base64."""
    history = page.history
    at = [index for index, version in enumerate(history.versions) for _ in version.launches]
    return {
        "template": template,
        "names": [version.commit[:_SHORT] if version.commit else "?" for version in history.versions],
        "commits": [version.commit or "" for version in history.versions] if template else [],
        "dirty": [index for index, version in enumerate(history.versions) if version.dirty],
        "times": [version.measured_at for version in history.versions],
        "at": _encoded(at, "<u4"),
        "revisions": history.revisions,
        "charts": {name: _chart(page, name) for name in history.metrics},
    }


def _chart(page: CasePage, name: str) -> dict[str, Any]:
    versions = page.history.versions
    is_bytes = METRICS[name].unit == "B"
    unit = _MIB if is_bytes else 1.0
    medians = [float(np.median(numbers)) / unit if (numbers := row.numbers(name)) else np.nan for row in versions]
    launches = (launch.values.get(name) for version in versions for launch in version.launches)
    values = [float(value) / unit if isinstance(value, float | int) else np.nan for value in launches]
    return {
        "unit": "MiB" if is_bytes else METRICS[name].unit,
        "medians": _encoded(medians, "<f8"),
        "launches": _encoded(values, "<f8"),
        "baseline": _encoded([version.baselines.get(name, np.nan) / unit for version in versions], "<f8"),
        "changes": [[change.index, change.verdict] for change in page.changes if change.metric == name],
    }


def _encoded(values: npt.ArrayLike, kind: str) -> str:
    return base64.b64encode(np.asarray(values, dtype=kind).tobytes()).decode("ascii")
