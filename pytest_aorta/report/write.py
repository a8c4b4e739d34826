"""Writes what a run or a comparison of results reports: the page, summary.json, timelines and Markdown."""

import math
import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.files import write_json, write_text
from pytest_aorta.common.model import to_json
from pytest_aorta.plan.options import FINDINGS_SUFFIX, Options
from pytest_aorta.report.data import Case, Report, session_report, version_values
from pytest_aorta.report.markdown import MAX_COMMENT_BYTES, findings, markdown
from pytest_aorta.report.timeline import compared_iterations
from pytest_aorta.result.provenance import code_version, provenance
from pytest_aorta.session.record import TestRecord
from pytest_aorta.verdict.metrics import METRICS, measured_values

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
    lines: list[str] = []
    errors: list[str] = []
    if launched and (step_summary := os.environ.get(STEP_SUMMARY)):
        lines += _append_step_summary(markdown(found), Path(step_summary))
    if options.markdown is not None:
        try:
            options.markdown.parent.mkdir(parents=True, exist_ok=True)
            write_text(options.markdown, markdown(found, max_bytes=MAX_COMMENT_BYTES))
            write_text(options.markdown.with_suffix(FINDINGS_SUFFIX), f"{to_json(found)}\n")
            lines.append(f"markdown: {options.markdown}")
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
    from pytest_aorta.report.page.render import render
    from pytest_aorta.report.timeline import draw_timelines, write_iterations

    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, render(report))
    table = file.parent / SUMMARY_FILE
    write_json(table, summary(report))
    return [file, table, *draw_timelines(report, file.parent), *write_iterations(report, file.parent)]


def _append_step_summary(text: str, file: Path) -> list[str]:
    try:
        # Without O_NONBLOCK, a FIFO would wait forever for a reader.
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
        with os.fdopen(fd, "w", encoding="utf-8") as summary:
            summary.write(text)
    except OSError as error:
        return [f"WARNING: {STEP_SUMMARY}: {file} can't be written: {error.strerror or error}"]
    return []


def _write_page(report: Report, file: Path, options: Options) -> list[str]:
    if not report.has_result:
        report = replace(report, run=version_values(provenance(options.rootdir), options.command))
    written = write_report(report, file)
    return [*(f"WARNING: {warning}" for warning in report.warnings), f"report: {', '.join(map(str, written))}"]


SCHEMA = "report_summary.schema.json"
SCHEMA_VERSION = 1


def summary(report: Report) -> dict[str, Any]:
    """Return the document, whose schema is ``common/schemas/report_summary.schema.json``."""
    cases = [(test.record, _case(test.record, case)) for test in report.tests for case in test.cases]
    return {
        "schema_version": SCHEMA_VERSION,
        "title": report.title,
        "created_at": report.created_at,
        "candidate": report.candidate,
        "reference": report.reference,
        "tests": dict(Counter(record.outcome for record in report.final)),
        "verdicts": dict(Counter(row.label for record in report.final for row in record.verdicts)),
        "cases": [case for _, case in cases],
        "ratios": _ratios([case for record, case in cases if not record.is_retried]),
    }


def _case(record: TestRecord, case: Case) -> dict[str, Any]:
    first = case.candidate[0].result if case.candidate else None
    return {
        "test": record.nodeid,
        "attempt": record.attempt,
        "case": case.name,
        "outcome": record.outcome,
        "workload": first and first.workload,
        "platform": first and first.platform,
        "num_launches": {"candidate": len(case.candidate), "reference": len(case.others)},
        "metrics": _metrics(case),
        "iterations": compared_iterations(case),
    }


def _metrics(case: Case) -> dict[str, Any]:
    here = measured_values([launch.facts for launch in case.candidate]) if case.candidate else {}
    there = measured_values(case.others) if case.others else {}
    verdicts = {row.metric: row.label for row in case.verdicts}
    return {
        name: {
            "unit": METRICS[name].unit,
            "candidate": here.get(name),
            "reference": there.get(name),
            "ratio": ratio(here.get(name), there.get(name)),
            "verdict": verdicts.get(name),
        }
        for name in METRICS
        if name in here or name in there
    }


def ratio(candidate: float | str | None, reference: float | str | None) -> float | None:
    """Return candidate divided by reference; None where either is missing or not a number, or the reference is 0."""
    if not isinstance(candidate, float | int) or not isinstance(reference, float | int) or not reference:
        return None
    quotient = candidate / reference
    return quotient if math.isfinite(quotient) else None


def _ratios(cases: list[dict[str, Any]]) -> dict[str, Mapping[str, float]]:
    """Return each metric's ratio over all cases.

    The mean is geometric, because swapping the sides then inverts the mean.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for case in cases:
        for name, row in case["metrics"].items():
            if row["ratio"] is not None and row["ratio"] > 0:
                found[name].append(row["ratio"])
    return {
        name: {
            "geometric_mean": math.exp(math.fsum(map(math.log, values)) / len(values)),
            "lowest": min(values),
            "highest": max(values),
            "cases": len(values),
        }
        for name, values in found.items()
    }
