"""Writes a run's comparisons to the folder of the history, when the session ends."""

from __future__ import annotations

import json
import secrets
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from pytest_aorta.common.errors import AortaError, BaselineError
from pytest_aorta.common.files import write_text
from pytest_aorta.common.schema import violation
from pytest_aorta.common.text import brief
from pytest_aorta.plan.options import Options
from pytest_aorta.session.history.entries import SCHEMA, SUFFIX, HistoryEntry, HistoryVerdict, MeasuredLaunch
from pytest_aorta.session.record import Comparison, TestRecord
from pytest_aorta.verdict.baseline import read_baseline
from pytest_aorta.verdict.verdicts import ReferenceKind

# A command line may name thousands of tests.
MAX_COMMAND = 4096
# Files are read in the order of their names, so the names contain fractions of a second.
_RUN_FORMAT = "%Y%m%dT%H%M%S.%fZ"


def keep_history(records: Sequence[TestRecord], arguments: Sequence[str], options: Options) -> list[str]:
    """Write a file with one line per comparison of this run, and return lines for the summary.

    The file's name contains random digits, and the file is written atomically, so several runs can use one folder. A
    run that compared nothing writes no file.

    Args:
        records: The records of the tests.
        arguments: pytest's command line, without the program.
        options: The options of the run, with the folder.

    Raises:
        AortaError: The file can't be written, or a value does not fit the schema.
    """
    if options.history is None:
        return []
    run = f"{datetime.now(UTC).strftime(_RUN_FORMAT)}-{secrets.token_hex(4)}"
    command = brief(shlex.join(["pytest", *arguments]), MAX_COMMAND)
    entries = history_entries(records, run, command, options.baselines_dir)
    if not entries:
        return []
    file = options.history / f"{run}{SUFFIX}"
    documents = [entry.to_json() for entry in entries]
    if problem := next(filter(None, (violation(document, SCHEMA) for document in documents)), None):
        raise AortaError(f"--aorta-history: {file}: not written: a line violates its own schema: {problem}")
    try:
        options.history.mkdir(parents=True, exist_ok=True)
        write_text(file, "".join(f"{json.dumps(document, allow_nan=False)}\n" for document in documents))
    except OSError as error:
        raise AortaError(f"--aorta-history: {file}: not written: {error.strerror or error}") from None
    return [f"history: {file}"]


def history_entries(records: Sequence[TestRecord], run: str, command: str, baselines_dir: Path) -> list[HistoryEntry]:
    """Return one entry per comparison."""
    return [
        HistoryEntry(
            run=run,
            command=command,
            test=record.nodeid,
            case=comparison.case,
            outcome=record.outcome,
            platform=comparison.platform,
            workload=comparison.workload,
            revision=_revision(comparison, baselines_dir),
            launches=tuple(MeasuredLaunch.of(launch.facts, launch.side) for launch in comparison.launches),
            verdicts=tuple(map(HistoryVerdict.of, comparison.rows)),
        )
        for record in records
        for comparison in record.comparisons
    ]


def _revision(comparison: Comparison, baselines_dir: Path) -> int | None:
    """Return the revision that the verdicts name, or that the launches of ``--update-baselines`` now belong to."""
    revisions = [row.reference.revision for row in comparison.rows if row.reference.kind is ReferenceKind.BASELINE]
    if known := [revision for revision in revisions if revision is not None]:
        return known[0]
    if comparison.new is None:
        return None
    try:
        baseline = read_baseline(baselines_dir, comparison.platform, comparison.case)
    except BaselineError:  # reported when the baseline could not be written
        return None
    return None if baseline is None else baseline.revision
