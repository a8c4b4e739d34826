"""Builds ``summary.json``: the measurements of each side, case by case, and the ratios between the sides."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from pytest_aorta.report.data import Case, Report, Test
from pytest_aorta.report.iterations import compared_iterations
from pytest_aorta.verdict.metrics import METRICS, measured_values

SCHEMA = "report_summary.schema.json"
SCHEMA_VERSION = 1


def summary(report: Report) -> dict[str, Any]:
    """Return the document, whose schema is ``common/schemas/report_summary.schema.json``."""
    cases = [_case(test, case) for test in report.tests for case in test.cases]
    final = [_case(test, case) for test in report.final for case in test.cases]
    return {
        "schema_version": SCHEMA_VERSION,
        "title": report.title,
        "created_at": report.created_at,
        "candidate": report.candidate,
        "reference": report.reference,
        "tests": dict(Counter(test.outcome for test in report.final)),
        "verdicts": dict(Counter(row.label for test in report.final for row in test.verdicts)),
        "cases": cases,
        "ratios": _ratios(final),
    }


def _case(test: Test, case: Case) -> dict[str, Any]:
    first = case.candidate[0].result if case.candidate else None
    return {
        "test": test.nodeid,
        "attempt": test.attempt,
        "case": case.name,
        "outcome": test.outcome,
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
