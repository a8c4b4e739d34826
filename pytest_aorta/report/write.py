"""Writes a report: the page, and beside it ``summary.json`` and the timelines."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from pytest_aorta.errors import SpecError
from pytest_aorta.files import write_json, write_text
from pytest_aorta.report.data import Report

_PACKAGES = ("jinja2", "matplotlib", "numpy")


def require_packages() -> None:
    """Say what to install, before anything is run.

    Raises:
        SpecError: a package of the extra ``report`` is not installed.
    """
    if lacking := [name for name in _PACKAGES if find_spec(name) is None]:
        raise SpecError(f"a report takes {' and '.join(lacking)}; pip install 'pytest-aorta[report]'")


def write_report(report: Report, file: Path) -> list[Path]:
    """Write everything and return the files, the page first.

    Raises:
        OSError: a file can't be written.
    """
    # A run without a report needs neither.
    from pytest_aorta.report.page import render
    from pytest_aorta.report.picture import draw_timelines
    from pytest_aorta.report.summary import summary

    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, render(report))
    table = file.parent / "summary.json"
    write_json(table, summary(report))
    return [file, table, *draw_timelines(report, file.parent)]
