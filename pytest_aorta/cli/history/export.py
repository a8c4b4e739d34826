"""``aorta history export``: files for Apache Otava and for Prometheus."""

from __future__ import annotations

import calendar
import csv
import io
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from pytest_aorta.cli.history.series import CaseHistory, case_histories
from pytest_aorta.common.files import slug, write_text
from pytest_aorta.result.provenance import UTC_FORMAT
from pytest_aorta.session.history.entries import HistoryEntry
from pytest_aorta.verdict.metrics import METRICS, Direction

OTAVA_CONFIG = "otava.yaml"
_ATTRIBUTES = ("commit", "branch", "dirty", "torch", "accelerator")
_UNIT_SUFFIXES = {"ms": "_milliseconds", "B": "_bytes", "1/s": "_per_second", "TFLOP/s": ""}


def write_otava(entries: Sequence[HistoryEntry], folder: Path) -> list[Path]:
    """Write Otava's configuration and one CSV file per case and metric, and return the files.

    A file has one row per version. Each metric has a file of its own, because Otava does not read empty cells.

    Raises:
        OSError: A file can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tests: dict[str, Any] = {}
    files = []
    for history in case_histories(entries):
        for metric in _numeric(history):
            name = f"{slug(history.case)}-{history.platform}-{metric}"
            file = folder / f"{name}.csv"
            write_text(file, _csv(history, metric))
            files.append(file)
            tests[name] = _otava_test(file, metric)
    config = folder / OTAVA_CONFIG
    write_text(config, yaml.safe_dump({"tests": tests}))
    return [config, *files]


def _numeric(history: CaseHistory) -> list[str]:
    return [name for name in history.metrics if any(row.numbers(name) for row in history.versions)]


def _otava_test(file: Path, metric: str) -> dict[str, Any]:
    direction = -1 if METRICS[metric].direction is not Direction.HIGHER else 1
    return {
        "type": "csv",
        "file": str(file),
        "time_column": "time",
        "attributes": list(_ATTRIBUTES),
        "metrics": {metric: {"column": metric, "direction": direction, "scale": 1}},
    }


def _csv(history: CaseHistory, metric: str) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["time", *_ATTRIBUTES, metric])
    for row in history.versions:
        if numbers := row.numbers(metric):
            branch = row.launches[0].branch
            dirty = str(row.dirty).lower()
            cells = [row.measured_at, row.commit, branch, dirty, row.torch, row.accelerator, repr(median(numbers))]
            writer.writerow(["" if cell is None else cell for cell in cells])
    return text.getvalue()


def openmetrics(entries: Sequence[HistoryEntry]) -> str:
    """Return the text of OpenMetrics 1.0: a gauge per metric, and the version that was measured.

    Samples of one metric and case are in the order of their time. Samples at the same second are joined by their
    median, because a series may have only one sample at a time.
    """
    samples: dict[str, dict[str, dict[int, list[float]]]] = {}
    versions: dict[str, dict[int, list[float]]] = {}
    for history, labels in _labelled(entries):
        for row in history.versions:
            time_s = calendar.timegm(time.strptime(row.measured_at, UTC_FORMAT))
            for name in history.metrics:
                if numbers := row.numbers(name):
                    samples.setdefault(name, {}).setdefault(labels, {}).setdefault(time_s, []).append(median(numbers))
            facts = {"commit": row.commit, "torch": row.torch, "accelerator": row.accelerator, "dirty": str(row.dirty)}
            info = ",".join([labels, *(f'{key}="{_escaped(value or "")}"' for key, value in facts.items())])
            versions.setdefault(info, {})[time_s] = [1.0]
    lines = [line for name in METRICS if name in samples for line in _gauge(name, samples[name])]
    if versions:
        lines += ["# TYPE aorta_version info", "# HELP aorta_version Version of the code that was measured."]
        lines += _sample_lines("aorta_version_info", versions)
    return "\n".join([*lines, "# EOF", ""])


def _labelled(entries: Sequence[HistoryEntry]) -> Iterator[tuple[CaseHistory, str]]:
    """Yield the histories of each branch, with the labels of their series."""
    branches = sorted({entry.launches[0].branch or "" for entry in entries})
    for branch in branches:
        for history in case_histories([row for row in entries if (row.launches[0].branch or "") == branch]):
            labels = {"case": history.case, "platform": history.platform, "branch": branch}
            yield history, ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items())


def _gauge(name: str, series: dict[str, dict[int, list[float]]]) -> Iterator[str]:
    full = metric_name(name)
    yield f"# TYPE {full} gauge"
    yield f"# HELP {full} {_escaped(METRICS[name].help)}"
    yield from _sample_lines(full, series)


def _sample_lines(name: str, series: dict[str, dict[int, list[float]]]) -> Iterator[str]:
    for labels, moments in series.items():
        for time_s, values in sorted(moments.items()):
            yield f"{name}{{{labels}}} {median(values)!r} {time_s}"


def metric_name(name: str) -> str:
    """Return the name of a metric with its unit, as Prometheus names metrics."""
    suffix = _UNIT_SUFFIXES.get(METRICS[name].unit, "")
    base = name.removesuffix("_per_s") if suffix == "_per_second" else name
    return f"aorta_{base}" if suffix.strip("_") in base.split("_") else f"aorta_{base}{suffix}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
