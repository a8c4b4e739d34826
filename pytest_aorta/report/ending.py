"""The end of a session: the report that was asked for, and the summary for GitHub."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_aorta.options import Options
from pytest_aorta.records import TestRecord
from pytest_aorta.report.markdown import markdown
from pytest_aorta.report.session import session_report
from pytest_aorta.report.write import write_report

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
