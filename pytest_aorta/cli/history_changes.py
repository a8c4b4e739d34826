"""``aorta history changes``: change points of every metric, and which of them are new."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from pytest_aorta.cli.history_series import CaseHistory, Point, Version
from pytest_aorta.common.errors import UsageError
from pytest_aorta.common.text import counted, table
from pytest_aorta.verdict.metrics import METRICS, Direction, format_value
from pytest_aorta.verdict.verdicts import format_change

# With later values, the same change point can move by a few versions.
_MOVED = 2
_MIN_COMMIT = 7
# Beyond this relative change, the value before is nearly 0 and a percentage is meaningless.
_LARGEST_RELATIVE = 1e4
# Each new version tests the same series again, so the p-value is a hundredth of Otava's, and several versions have to
# confirm a change. `benchmarks/report/history_alarms.py` counts the false alarms.
MAX_P_VALUE = 0.00001
# Otava looks for candidates at ten times its default. At its default, a step up and down again hides the step up.
_CANDIDATES_P_VALUE = 0.01
CONFIRMING_VERSIONS = 3
_COLUMNS = ("test", "metric", "last before", "first after", "before", "after", "change", "")


@dataclass(frozen=True)
class Change:
    """A change point of a metric.

    Attributes:
        history: The case.
        metric: Name of the metric.
        index: Index of the first version after the change.
        last: Index of the last version before the change that has the metric.
        before, after: Medians of the segments on both sides; for a metric that has to be equal, the values.
    """

    history: CaseHistory
    metric: str
    index: int
    last: int
    before: float | str
    after: float | str

    @property
    def first_after(self) -> Version:
        """Return the first version after the change."""
        return self.history.versions[self.index]

    @property
    def last_before(self) -> Version:
        """Return the last version before the change."""
        return self.history.versions[self.last]

    @property
    def relative(self) -> float | None:
        """Return the change as a fraction of the value before; None for texts, and where that value is nearly 0."""
        if isinstance(self.before, str) or isinstance(self.after, str) or self.before == 0:
            return None
        relative = (self.after - self.before) / abs(self.before)
        return relative if abs(relative) < _LARGEST_RELATIVE else None

    @property
    def verdict(self) -> str:
        """Return ``worse`` or ``better``, or ``changed`` for a metric that has to be equal."""
        metric = METRICS[self.metric]
        if metric.direction is Direction.EXACT or isinstance(self.before, str) or isinstance(self.after, str):
            return "changed"
        return "worse" if (self.after - self.before) * metric.worse > 0 else "better"

    @property
    def values(self) -> tuple[str, str, str]:
        """Return the value before, the value after, and the change, as text."""
        metric = METRICS[self.metric]
        is_exact = metric.direction is Direction.EXACT
        texts = (format_value(value, metric.unit, exact=is_exact) for value in (self.before, self.after))
        return *texts, "-" if self.relative is None else format_change(self.relative)  # type: ignore[return-value]

    def is_same(self, other: Change) -> bool:
        """Return whether both are the same change point, which further values have moved a little."""
        places = (self.history.case, self.history.platform, self.metric)
        if places != (other.history.case, other.history.platform, other.metric):
            return False
        if self.verdict == "changed":
            return self.index == other.index
        return self.verdict == other.verdict and abs(self.index - other.index) <= _MOVED


def find_changes(history: CaseHistory) -> list[Change]:
    """Return the change points of every metric of a case, the newest last.

    A metric that has to be equal changes wherever two neighboring versions differ. For any other metric, Otava finds
    the change points in the medians of the versions; at least :data:`CONFIRMING_VERSIONS` have to be on each side.
    """
    found = [change for metric in history.metrics for change in _changes(history, metric)]
    return sorted(found, key=lambda change: change.index)


def _changes(history: CaseHistory, metric: str) -> list[Change]:
    points = history.points(metric)
    if METRICS[metric].direction is Direction.EXACT:
        return [
            Change(history, metric, here.version, before.version, before.value, here.value)
            for before, here in pairwise(points)
            if here.value != before.value
        ]
    return _found_by_otava(history, metric, points)


def _found_by_otava(history: CaseHistory, metric: str, points: Sequence[Point]) -> list[Change]:
    values = [point.value for point in points if isinstance(point.value, float)]
    if len(set(values)) < 2:  # nothing can have changed, and the t-test would divide by a variance of 0
        return []
    last = len(values) - CONFIRMING_VERSIONS
    found = (place for place in change_points(values) if CONFIRMING_VERSIONS <= place <= last)
    bounds = [0, *found, len(values)]
    segments = [median(values[begin:end]) for begin, end in pairwise(bounds)]
    return [
        Change(history, metric, points[place].version, points[place - 1].version, before, after)
        for place, (before, after) in zip(bounds[1:-1], pairwise(segments), strict=True)
    ]


def change_points(values: Sequence[float]) -> list[int]:
    """Return the indices at which the values change.

    The method is Hunter's (Fleming et al., ICPE 2023): E-divisive means with Student's test, here with more candidates
    and a stricter test than Otava's defaults.

    Raises:
        UsageError: Otava is not installed.
    """
    import numpy as np  # other commands do without

    try:
        from otava.analysis import compute_change_points, merge  # an extra, and slow to import
    except ImportError as error:
        raise UsageError(f"history needs Apache Otava ({error}); run pip install 'pytest-aorta[history]'") from None
    series = list(values)
    # Otava also computes relative changes, which overflow where a value is nearly 0; they are not used.
    with np.errstate(all="ignore"):
        _, candidates = compute_change_points(series, max_pvalue=_CANDIDATES_P_VALUE)
        points = merge(candidates, series, MAX_P_VALUE, 0.0)
    return [int(point.index) for point in points]


def new_changes(histories: Sequence[CaseHistory], since: str | None) -> list[Change]:
    """Return the change points that an earlier history does not show.

    Args:
        histories: The cases.
        since: A commit; the earlier history contains the versions measured up to this commit. If None, the earlier
            history contains all versions of each case but the newest.

    Raises:
        UsageError: The commit is not in the history.
    """
    moment = None if since is None else _moment_of(histories, since)
    found = []
    for history in histories:
        before = history.until(moment) if moment else replace(history, versions=history.versions[:-1])
        if len(before.versions) < len(history.versions):
            now = find_changes(history)
            # Most metrics have no change point, and looking for one in the earlier versions takes as long again.
            known = [change for metric in {change.metric for change in now} for change in _changes(before, metric)]
            found += [change for change in now if not any(map(change.is_same, known))]
    return found


def _moment_of(histories: Sequence[CaseHistory], commit: str) -> str:
    moments = [
        row.measured_at
        for history in histories
        for row in history.versions
        if len(commit) >= _MIN_COMMIT and row.commit is not None and row.commit.startswith(commit.lower())
    ]
    if not moments:
        raise UsageError(
            f"--since: got {commit!r}, allowed is a commit of the history, or at least its first {_MIN_COMMIT} digits"
        )
    return max(moments)


def change_lines(changes: Sequence[Change], histories: Sequence[CaseHistory], width: int) -> list[str]:
    """Return a table of change points, and the total."""
    rows = [
        (
            change.history.case,
            change.metric,
            change.last_before.name,
            change.first_after.name,
            *change.values,
            ", ".join([change.verdict, *_other_reasons(change)]),
        )
        for change in changes
    ]
    num_series = sum(len(history.metrics) for history in histories)
    total = f"{counted(len(changes), 'new change')} in {num_series} metrics of {counted(len(histories), 'case')}"
    if short := sum(map(_num_too_short, histories)):
        needed = 2 * CONFIRMING_VERSIONS
        total += f"; not searched: {counted(short, 'metric')} with fewer than the {needed} versions that a change needs"
    return [*(table([_COLUMNS, *rows], width) if rows else []), total]


def _num_too_short(history: CaseHistory) -> int:
    """Return the number of metrics that have too few versions to find a change, however large it is."""
    lengths = [len(history.points(name)) for name in history.metrics if METRICS[name].direction is not Direction.EXACT]
    return sum(length < 2 * CONFIRMING_VERSIONS for length in lengths)


def _other_reasons(change: Change) -> list[str]:
    """Return the differences between both versions besides the code."""
    before, after = change.last_before, change.first_after
    return [
        f"{name} {old or 'unknown'} -> {new or 'unknown'}"
        for name, old, new in (
            ("torch", before.torch, after.torch),
            ("accelerator", before.accelerator, after.accelerator),
        )
        if old != new
    ]
