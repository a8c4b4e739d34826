"""Writes the reports of a session: the page with its files, and Markdown for comments and GitHub's page of a job."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.files import write_json, write_text
from pytest_aorta.plan.options.run import Options
from pytest_aorta.report.data import Report
from pytest_aorta.report.from_session import reported, session_report
from pytest_aorta.report.markdown import MAX_COMMENT_BYTES, RunFacts, markdown
from pytest_aorta.report.provenance import run_pairs
from pytest_aorta.result.provenance import provenance
from pytest_aorta.session.record import TestRecord

SUMMARY_FILE = "summary.json"
# Set by GitHub Actions: the file that a job's step appends its Markdown summary to.
STEP_SUMMARY = "GITHUB_STEP_SUMMARY"
_TITLE = "pytest-aorta"
_PACKAGES = ("jinja2", "matplotlib", "numpy")


def require_packages() -> None:
    """Check that the packages of the extra ``report`` are installed, before anything is launched.

    Raises:
        SpecError: A package is not installed.
    """
    if lacking := [name for name in _PACKAGES if find_spec(name) is None]:
        raise SpecError(f"a report needs {' and '.join(lacking)}; pip install 'pytest-aorta[report]'")


def write_session_reports(
    records: Sequence[TestRecord],
    options: Options,
    environ: Mapping[str, str] = os.environ,
    *,
    lost: Sequence[TestRecord] = (),
    is_cut_short: bool = False,
) -> tuple[list[str], bool]:
    """Write the reports that the options and the environment ask for.

    Returns:
        Lines for the terminal, and whether every file that an option asks for was written. An error becomes a line,
        because a failed report must not hide the verdicts.

    Args:
        records: The records of all tests.
        options: The options of the run.
        environ: The environment, which names the summary of a CI step.
        lost: The records of tests without a result, and of files that could not be collected. They are part of every
            report, but do not make a run one with launches, to whose CI step a summary is appended.
        is_cut_short: Whether pytest ended before all tests had run.
    """
    shown = [*(launched := reported(records)), *lost]
    run = RunFacts(options.command, options.repeated, is_cut_short)
    lines: list[str] = []
    errors: list[str] = []
    if launched and environ.get(STEP_SUMMARY):
        lines += _append_step_summary(markdown(shown, run), Path(environ[STEP_SUMMARY]))
    if options.markdown is not None:
        try:
            lines += _write_markdown(markdown(shown, run, MAX_COMMENT_BYTES), options.markdown)
        except OSError as error:
            errors.append(f"ERROR {options.markdown}: no Markdown was written: {error.strerror or error}")
    if options.report is not None:
        try:
            lines += _write_page(session_report(records, title=_TITLE, lost=lost), options.report, options)
        except Exception as error:  # noqa: BLE001 - a failed report must not take the session's verdicts with it
            errors.append(f"ERROR {options.report}: no report was written: {type(error).__name__}: {error}")
    return lines + errors, not errors


def write_report(report: Report, file: Path) -> list[Path]:
    """Write the page to ``file``, and ``summary.json``, timelines and overlap step by step beside it.

    Return the files, the page first.

    Raises:
        OSError: A file can't be written.
    """
    # Sessions without a report need neither jinja2 nor matplotlib.
    from pytest_aorta.report.iterations import write_iterations
    from pytest_aorta.report.page.render import render
    from pytest_aorta.report.summary import summary
    from pytest_aorta.report.timeline import draw_timelines

    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, render(report))
    table = file.parent / SUMMARY_FILE
    write_json(table, summary(report))
    return [file, table, *draw_timelines(report, file.parent), *write_iterations(report, file.parent)]


def _append_step_summary(text: str, file: Path) -> list[str]:
    try:
        with file.open("a", encoding="utf-8") as summary:
            summary.write(text)
    except OSError as error:
        return [f"WARNING: {STEP_SUMMARY}: {file} can't be written: {error.strerror or error}"]
    return []


def _write_markdown(text: str, file: Path) -> list[str]:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, text)
    return [f"markdown: {file}"]


def _write_page(report: Report, file: Path, options: Options) -> list[str]:
    if not report.has_result:
        report = replace(report, run=tuple(run_pairs(provenance(options.rootdir), options.command)))
    written = write_report(report, file)
    return [*(f"WARNING: {warning}" for warning in report.warnings), f"report: {', '.join(map(str, written))}"]
