"""Writes a report: the page, and beside it ``summary.json`` and the timelines."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.files import write_json, write_text
from pytest_aorta.plan.options import Options
from pytest_aorta.report.data import Report
from pytest_aorta.report.from_session import session_report
from pytest_aorta.report.markdown import markdown
from pytest_aorta.session.record import TestRecord

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
    from pytest_aorta.report.page.render import render
    from pytest_aorta.report.summary import summary
    from pytest_aorta.report.timeline import draw_timelines

    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, render(report))
    table = file.parent / "summary.json"
    write_json(table, summary(report))
    return [file, table, *draw_timelines(report, file.parent)]


STEP_SUMMARY = "GITHUB_STEP_SUMMARY"


def tell(records: Sequence[TestRecord], options: Options, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Write both, as far as they are wanted; returns lines for the terminal. Nothing that goes wrong is raised."""
    told = [record for record in records if record.num_launches or record.lacked_devices]
    lines: list[str] = []
    if told and environ.get(STEP_SUMMARY):
        lines += _step_summary(told, Path(environ[STEP_SUMMARY]))
    if options.report is not None:
        lines += _report(told, options.report)
    return lines


def _step_summary(records: Sequence[TestRecord], file: Path) -> list[str]:
    try:
        with file.open("a", encoding="utf-8", errors="backslashreplace") as summary:
            summary.write(markdown(records))
    except OSError as error:
        return [f"WARNING: {STEP_SUMMARY}: {file}: not written: {error.strerror or error}"]
    return []


def _report(records: Sequence[TestRecord], file: Path) -> list[str]:
    try:
        report = session_report(records, title="pytest-aorta")
        written = write_report(report, file)
    except Exception as error:  # noqa: BLE001 - a picture of a run must not take the run's verdicts with it
        return [f"WARNING: {file}: no report: {type(error).__name__}: {error}"]
    return [*(f"WARNING: {warning}" for warning in report.warnings), f"report: {', '.join(map(str, written))}"]
