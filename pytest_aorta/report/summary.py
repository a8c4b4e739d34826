"""The document ``summary.json`` of a report."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from statistics import geometric_mean
from typing import Any

from pytest_aorta.report.data import Case, Report
from pytest_aorta.session.record import TestRecord
from pytest_aorta.verdict.metrics import METRICS, measured_values

SCHEMA = "report_summary.schema.json"
SCHEMA_VERSION = 2


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
            "geometric_mean": geometric_mean(values),
            "lowest": min(values),
            "highest": max(values),
            "cases": len(values),
        }
        for name, values in found.items()
    }
