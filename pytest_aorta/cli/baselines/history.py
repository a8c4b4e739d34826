"""Where a case's launches changed in the course of time, by Apache Otava's change points."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from pytest_aorta.cli.baselines.find import StoredFile
from pytest_aorta.common.errors import UsageError
from pytest_aorta.common.text import counted, table, wrapped
from pytest_aorta.verdict.metrics import METRICS, Metric, format_value
from pytest_aorta.verdict.verdicts import format_change

# Of a change point, by Otava's t-test; its own default.
MAX_P_VALUE = 0.001
_COLUMNS = ("launches", "epochs", "from", "to", "median", "change")


def history_lines(file: StoredFile, name: str, width: int) -> list[str]:
    """One line a stretch of launches that are alike, oldest first.

    Raises:
        UsageError: there is no such metric, it is no positive number in some launch, or Otava is not installed.
    """
    if name not in METRICS:
        raise UsageError(f"no such metric {name!r}; there are {sorted(METRICS)}")
    metric = METRICS[name]
    values = _values(file, metric)
    bounds = [0, *change_points(values), len(values)]
    rows: list[tuple[str, ...]] = []
    before = None
    for begin, end in pairwise(bounds):
        level = median(values[begin:end])
        change = "-" if before is None else format_change(level / before - 1)
        rows.append((*_stretch(file, begin, end), format_value(level, metric.unit), change))
        before = level
    head = f"{file.baseline.case}, {name}: {counted(len(bounds) - 2, 'change')} in {counted(len(values), 'launch')}"
    return [*wrapped(head, width), *table([_COLUMNS, *rows], width, indent="  ")]


def change_points(values: Sequence[float]) -> list[int]:
    """Where values begin to be others: E-divisive means with Student's test, as Hunter has it.

    Raises:
        UsageError: Otava is not installed.
    """
    try:
        from otava.analysis import compute_change_points  # an extra, and slow to import
    except ImportError as error:
        raise UsageError(f"history takes Apache Otava ({error}): pip install 'pytest-aorta[history]'") from None
    points, _ = compute_change_points(list(values), max_pvalue=MAX_P_VALUE)
    return [int(point.index) for point in points]


def _values(file: StoredFile, metric: Metric) -> list[float]:
    values = [metric.measure(stored.facts) for stored in file.baseline.launches]
    numbers = [float(value) for value in values if isinstance(value, float | int) and value > 0]
    if len(numbers) < len(values):
        raise UsageError(f"{file.name}: {metric.name} is a positive number in {len(numbers)} of {len(values)} launches")
    return numbers


def _stretch(file: StoredFile, begin: int, end: int) -> tuple[str, ...]:
    launches = file.baseline.launches[begin:end]
    first, last = launches[0], launches[-1]
    epochs = str(first.epoch) if first.epoch == last.epoch else f"{first.epoch}-{last.epoch}"
    return f"{begin + 1}-{end}", epochs, first.facts.recorded_at, last.facts.recorded_at
