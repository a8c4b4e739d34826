"""``aorta baselines history``: change points in a case's launches over time, found by Apache Otava."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

from pytest_aorta.cli.baselines.find import StoredFile
from pytest_aorta.cli.history.change_points import change_points
from pytest_aorta.common.errors import UsageError
from pytest_aorta.common.text import counted, did_you_mean, table, wrapped
from pytest_aorta.verdict.metrics import METRICS, Metric, format_value
from pytest_aorta.verdict.verdicts import format_change

_COLUMNS = ("launches", "revisions", "from", "to", "median", "change")


def history_lines(file: StoredFile, name: str, width: int) -> list[str]:
    """Return a table with one line per segment between change points, oldest first.

    Raises:
        UsageError: The metric is unknown or not positive in some launch, or Otava is not installed.
    """
    if name not in METRICS:
        raise UsageError(f"--metric {name}: is unknown{did_you_mean([name], METRICS)}; allowed are {sorted(METRICS)}")
    metric = METRICS[name]
    values = _values(file, metric)
    bounds = [0, *change_points(values), len(values)]
    rows: list[tuple[str, ...]] = []
    before = None
    for begin, end in pairwise(bounds):
        segment_median = median(values[begin:end])
        change = "-" if before is None else format_change(segment_median / before - 1)
        rows.append((*_stretch(file, begin, end), format_value(segment_median, metric.unit), change))
        before = segment_median
    head = f"{file.baseline.case}, {name}: {counted(len(bounds) - 2, 'change')} in {counted(len(values), 'launch')}"
    return [*wrapped(head, width), *table([_COLUMNS, *rows], width, indent="  ")]


def _values(file: StoredFile, metric: Metric) -> list[float]:
    values = [metric.measure(stored.facts) for stored in file.baseline.launches]
    numbers = [float(value) for value in values if isinstance(value, float | int) and value > 0]
    if len(numbers) < len(values):
        raise UsageError(
            f"{file.name}: {metric.name} is a positive number in only {len(numbers)} of "
            f"{len(values)} launches; choose another --metric"
        )
    return numbers


def _stretch(file: StoredFile, begin: int, end: int) -> tuple[str, ...]:
    launches = file.baseline.launches[begin:end]
    first, last = launches[0], launches[-1]
    revisions = str(first.revision) if first.revision == last.revision else f"{first.revision}-{last.revision}"
    return f"{begin + 1}-{end}", revisions, first.facts.recorded_at, last.facts.recorded_at
