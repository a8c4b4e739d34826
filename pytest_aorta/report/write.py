"""Writes what a run reports: the page and Markdown."""

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.files import write_text
from pytest_aorta.common.model import to_json
from pytest_aorta.plan.options import CODE_QUALITY_SUFFIX, FINDINGS_SUFFIX, Options
from pytest_aorta.report.annotations import annotations, code_quality
from pytest_aorta.report.data import Report, session_report
from pytest_aorta.report.markdown import MAX_COMMENT_BYTES, Findings, findings, markdown
from pytest_aorta.result.provenance import code_version
from pytest_aorta.session.record import TestRecord

# Set by GitHub Actions: the file that a job's step appends its Markdown summary to.
STEP_SUMMARY = "GITHUB_STEP_SUMMARY"
_TITLE = "pytest-aorta"


def require_packages() -> None:
    """Check that the packages of the extra ``report`` are installed, before anything is launched.

    Raises:
        SpecError: A package is not installed.
    """
    if find_spec("jinja2") is None:
        raise SpecError("a report needs jinja2; pip install 'pytest-aorta[report]'")


def write_session_reports(
    records: Sequence[TestRecord], options: Options, *, lost: Sequence[TestRecord] = (), ended_by: str = ""
) -> tuple[list[str], bool]:
    """Write the reports that the options and the environment ask for.

    Returns:
        Lines for the terminal, and whether every file that an option asks for was written. An error becomes a line,
        because a failed report must not hide the verdicts.

    Args:
        records: The records of all tests.
        options: The options of the run.
        lost: The records of tests without a result, and of files that could not be collected. They are part of every
            report, but do not make a run one with launches, to whose CI step a summary is appended.
        ended_by: As in :func:`~pytest_aorta.report.markdown.markdown`.
    """
    shown = [*(launched := [record for record in records if record.is_reported]), *lost]
    found = findings(
        shown,
        commit=code_version(options.rootdir)[0] if options.markdown else None,
        command=options.command,
        argument_of=options.argument_of,
        repeated=options.repeated,
        ended_by=ended_by,
    )
    lines = annotations(shown, options.rootdir)
    errors: list[str] = []
    if launched and (step_summary := os.environ.get(STEP_SUMMARY)):
        lines += _append_step_summary(markdown(found), Path(step_summary))
    reports: tuple[tuple[Path | None, Callable[[Path], str]], ...] = (
        (options.markdown, lambda file: _write_markdown(found, code_quality(shown, options.rootdir), file)),
        (options.report, lambda file: _write_page(session_report(records, title=_TITLE, lost=lost), file)),
    )
    for file, write in reports:
        try:
            lines += write(file).splitlines() if file else []
        except Exception as error:  # noqa: BLE001 - a failed report must not take the session's verdicts with it
            errors.append(f"ERROR {file}: not written: {type(error).__name__}: {error}")
    return lines + errors, not errors


def write_report(report: Report, file: Path) -> Path:
    """Write the page to ``file``, which is returned.

    Raises:
        OSError: The file can't be written.
    """
    # Sessions without a report need no jinja2.
    from pytest_aorta.report.page.render import render

    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, render(report))
    return file


def _append_step_summary(text: str, file: Path) -> list[str]:
    try:
        # Without O_NONBLOCK, a FIFO would wait forever for a reader.
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
        with os.fdopen(fd, "w", encoding="utf-8") as summary:
            summary.write(text)
    except OSError as error:
        return [f"WARNING: {STEP_SUMMARY}: {file} can't be written: {error.strerror or error}"]
    return []


def _write_markdown(found: Findings, quality: list[dict[str, object]] | None, file: Path) -> str:
    """Write the Markdown, the same findings as data and, in a job of GitLab, where they are; return a line on it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, markdown(found, max_bytes=MAX_COMMENT_BYTES))
    write_text(file.with_suffix(FINDINGS_SUFFIX), f"{to_json(found)}\n")
    if quality is not None:
        write_text(file.with_suffix(CODE_QUALITY_SUFFIX), f"{to_json(quality)}\n")
    return f"markdown: {file}"


def _write_page(report: Report, file: Path) -> str:
    return "\n".join([*(f"WARNING: {text}" for text in report.warnings), f"report: {write_report(report, file)}"])
