"""Builds a report from the records that the tests of a session left."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from pytest_aorta.common.errors import BaselineError
from pytest_aorta.report.data import AB_REFERENCE, Case, Report, Test, read_launches
from pytest_aorta.result.folder import RESULT_FILE
from pytest_aorta.result.provenance import UTC_FORMAT
from pytest_aorta.session.record import Comparison, Side, TestRecord
from pytest_aorta.verdict.baseline import Baseline, read_baseline_file
from pytest_aorta.verdict.verdicts import ReferenceKind


def session_report(records: Sequence[TestRecord], *, title: str, lost: Sequence[TestRecord] = ()) -> Report:
    """Return the report of a session; results and baselines that can't be read become warnings.

    ``lost`` are records that are part of the report although nothing is known of their launches.
    """
    warnings: list[str] = []
    tests = tuple(_test(record, warnings) for record in (*reported(records), *lost))
    created_at = time.strftime(UTC_FORMAT, time.gmtime())
    return Report(
        title,
        created_at,
        "candidate",
        "baseline",
        tests,
        tuple(warnings),
        num_launches=sum(len(record.launches) for record in records),
        num_failed_launches=sum(record.num_failed_launches for record in records),
    )


def reported(records: Sequence[TestRecord]) -> list[TestRecord]:
    """Return the records of tests that launched something, lacked devices for a launch, or failed before a launch."""
    return [record for record in records if record.is_reported]


def _test(record: TestRecord, warnings: list[str]) -> Test:
    cases = tuple(_case(record, comparison, warnings) for comparison in record.comparisons)
    reason = record.failure or record.lacked_devices or ""
    return Test(
        record.nodeid,
        record.outcome,
        reason,
        (*record.traces, *record.notes),
        cases,
        attempt=record.attempt,
        label=record.attempt_label,
        failed_before_launch=record.failed_before_launch,
        lacked_devices=record.is_skipped,
        num_failed_launches=record.num_failed_launches,
    )


def _case(record: TestRecord, comparison: Comparison, warnings: list[str]) -> Case:
    sides = []
    for side in Side:
        launches, problems = read_launches([Path(folder) / RESULT_FILE for folder in comparison.folders(side)])
        warnings += problems
        sides.append(launches)
    verdicts = comparison.rows
    name = comparison.case.removeprefix(f"{record.nodeid}::")
    # If the baseline belongs to another config, no verdict has a value of the baseline.
    is_compared = any(row.baseline is not None and row.reference.kind is ReferenceKind.BASELINE for row in verdicts)
    baseline = _baseline(comparison.baseline, warnings) if is_compared else None
    versions = {row.reference.name for row in verdicts if row.is_by_ab}
    reference_name = f"{AB_REFERENCE} {' '.join(versions)}".rstrip()
    return Case(name, verdicts, sides[0], sides[1], baseline, reference_name)


def _baseline(file: str, warnings: list[str]) -> Baseline | None:
    if not file:
        return None
    try:
        return read_baseline_file(Path(file))
    except BaselineError as error:
        warnings.append(f"baseline left out of the report: {error}")
        return None
