"""Formats in which dashboards read what a run has measured. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from pytest_aorta.session.history import HistoryEntry
from pytest_aorta.session.record import Side
from pytest_aorta.verdict.metrics import METRICS, Metric, metric_of, middle_of, own_metrics
from pytest_aorta.verdict.statistics.decision import Scale

_Format: TypeAlias = Callable[[Sequence[HistoryEntry]], Any]


def _pytorch_records(entries: Sequence[HistoryEntry]) -> list[dict[str, Any]]:
    """Return records of PyTorch's benchmark database, one per comparison and metric, with the value of each launch."""
    return [
        {
            "benchmark": {
                "name": "pytest-aorta",
                "extra_info": {"test": entry.test, "case": entry.comparison.case, "outcome": entry.outcome},
            },
            "model": {"name": entry.comparison.workload},
            "metric": {
                "name": metric.name,
                "benchmark_values": values,
                "extra_info": {"unit": metric.unit, "platform": entry.comparison.platform} | _judged(entry, metric),
            },
        }
        for entry in entries
        for metric, values in _measured(entry)
    ]


def _judged(entry: HistoryEntry, metric: Metric) -> dict[str, Any]:
    row = next((row for row in entry.comparison.rows if row.metric == metric.name), None)
    return {} if row is None else {"verdict": row.label, "baseline": row.baseline}


def _bencher_metrics(entries: Sequence[HistoryEntry]) -> dict[str, dict[str, Mapping[str, float]]]:
    """Return Bencher's metric format: case -> metric -> median of the launches, between the least and the largest."""
    return {
        entry.comparison.case: {
            metric.name: {
                "value": middle_of(values, is_relative=metric.scale is Scale.RELATIVE),
                "lower_value": min(values),
                "upper_value": max(values),
            }
            for metric, values in _measured(entry)
        }
        for entry in entries
    }


def _measured(entry: HistoryEntry) -> Iterator[tuple[Metric, list[float]]]:
    """Yield each metric that is a number, with its value in each launch under test that has one."""
    launches = entry.comparison.facts(Side.CANDIDATE)
    for metric in map(metric_of, dict.fromkeys([*METRICS, *(name for one in launches for name in own_metrics(one))])):
        values = [value for one in launches if isinstance(value := metric.measure(one), int | float)]
        if values:
            yield metric, values


# The format's name for ``aorta history --format`` -> what it makes of the comparisons of a run.
FORMATS: dict[str, _Format] = {"pytorch": _pytorch_records, "bmf": _bencher_metrics}
