"""``aorta history``: new change points of what --aorta-history has kept, and a page that draws it."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from itertools import pairwise, starmap
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from pytest_aorta.cli import ExitCode, report_problems
from pytest_aorta.common.errors import AortaError, UsageError
from pytest_aorta.common.files import raised_as, write_text
from pytest_aorta.common.model import Fact
from pytest_aorta.common.text import counted, emit, output_width, table
from pytest_aorta.report.page.rows import encoded
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.provenance import Provenance, version_text
from pytest_aorta.session.history import HistoryEntry, read_history
from pytest_aorta.session.record import Side
from pytest_aorta.verdict.metrics import METRICS, Direction, format_value, measured_values
from pytest_aorta.verdict.verdicts import ReferenceKind, format_change

_PACKAGES = ("jinja2", "otava")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions and their arguments to ``parser``."""
    ways = parser.add_subparsers(metavar="ACTION", required=True)
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument("folder", type=Path, metavar="DIR", help="folder of the history (pytest's --aorta-history)")
    where.add_argument("--branch", metavar="NAME", help="only this branch; HEAD for a detached head (the only one)")
    page = ways.add_parser("page", parents=[where], help="write one HTML page; needs Apache Otava and jinja2")
    page.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.html", help="file of the page")
    page.set_defaults(run=_write_page)
    changed = ways.add_parser("changes", parents=[where], help="exit with 1 if a metric has a new change point")
    changed.add_argument(
        "--since",
        metavar="COMMIT",
        help="change points are new if the versions measured until this commit do not show them (all but the newest)",
    )
    changed.set_defaults(run=_report_changes)


def _write_page(arguments: argparse.Namespace) -> int:
    """Run ``aorta history page``."""
    if lacking := [name for name in _PACKAGES if find_spec(name) is None]:
        raise UsageError(f"history page needs {' and '.join(lacking)}; run pip install 'pytest-aorta[history]'")
    histories, problems = _read(arguments)
    page = render(histories)
    with raised_as(AortaError, f"{arguments.output}: not written: "):
        write_text(arguments.output, page)
    emit([str(arguments.output)])
    return report_problems(problems)


def _report_changes(arguments: argparse.Namespace) -> int:
    """Run ``aorta history changes``; return 1 for a new change point or a line that can't be read."""
    histories, problems = _read(arguments)
    found = new_changes(histories, arguments.since)
    emit(_change_lines(found, histories, output_width()))
    return max(report_problems(problems), ExitCode.PROBLEM if found else ExitCode.OK)


def _read(arguments: argparse.Namespace) -> tuple[list[_CaseHistory], list[str]]:
    """Return the cases of the branch, and a line for each line of the history that can't be read."""
    entries, problems = read_history(arguments.folder)
    return case_histories(_of_branch(entries, arguments.branch)), [f"left out: {problem}" for problem in problems]


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
# What can change the values of a version beside the code: a label -> its name in the environment.
_SURROUNDINGS = {"torch": "torch", "accelerator": "device_name"}
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

    history: _CaseHistory
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
        is_exact = not metric.has_noise
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


def find_changes(history: _CaseHistory) -> list[Change]:
    """Return the change points of every metric of a case, the newest last.

    A metric that has to be equal changes wherever two neighboring versions differ. For any other metric, Otava finds
    the change points in the medians of the versions; at least :data:`CONFIRMING_VERSIONS` have to be on each side.
    """
    found = [change for metric in history.metrics for change in _changes(history, metric)]
    return sorted(found, key=lambda change: change.index)


def _changes(history: _CaseHistory, metric: str) -> list[Change]:
    points = history.points(metric)
    if not METRICS[metric].has_noise:
        return [
            Change(history, metric, index, last, before, after)
            for (last, before), (index, after) in pairwise(points)
            if before != after
        ]
    return _found_by_otava(history, metric, points)


def _found_by_otava(history: _CaseHistory, metric: str, points: Sequence[tuple[int, float | str]]) -> list[Change]:
    values = [value for _, value in points if isinstance(value, float)]
    if len(set(values)) < 2:  # nothing can have changed, and the t-test would divide by a variance of 0
        return []
    confirmed = range(CONFIRMING_VERSIONS, len(values) - CONFIRMING_VERSIONS + 1)
    bounds = [0, *(place for place in _change_points(values) if place in confirmed), len(values)]
    segments = [median(values[begin:end]) for begin, end in pairwise(bounds)]
    return [
        Change(history, metric, points[place][0], points[place - 1][0], before, after)
        for place, (before, after) in zip(bounds[1:-1], pairwise(segments), strict=True)
    ]


def _change_points(values: Sequence[float]) -> list[int]:
    """Return the indices at which the values change.

    The method is Hunter's (Fleming et al., ICPE 2023): E-divisive means with Student's test, here with more candidates
    and a stricter test than Otava's defaults.

    Raises:
        UsageError: Otava is not installed.
    """
    remedy = "); run pip install 'pytest-aorta[history]'"
    with raised_as(UsageError, "history needs Apache Otava (", ImportError, remedy):
        from otava.analysis import compute_change_points, merge  # an extra, and slow to import
    series = list(values)
    # Otava also computes relative changes, which overflow where a value is nearly 0; they are not used.
    with np.errstate(all="ignore"):
        _, candidates = compute_change_points(series, max_pvalue=_CANDIDATES_P_VALUE)
        points = merge(candidates, series, MAX_P_VALUE, 0.0)
    return [int(point.index) for point in points]


def new_changes(histories: Sequence[_CaseHistory], since: str | None) -> list[Change]:
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
        earlier = [row for row in history.versions if moment and row.provenance.measured_at <= moment]
        before = replace(history, versions=earlier if moment else history.versions[:-1])
        if len(before.versions) < len(history.versions):
            now = find_changes(history)
            # Most metrics have no change point, and looking for one in the earlier versions takes as long again.
            known = [change for metric in {change.metric for change in now} for change in _changes(before, metric)]
            found += [change for change in now if not any(map(change.is_same, known))]
    return found


def _moment_of(histories: Sequence[_CaseHistory], commit: str) -> str:
    rows = [row for history in histories for row in history.versions]
    measured = [row.provenance for row in rows]
    moments = [one.measured_at for one in measured if (one.commit or "").startswith(commit.lower())]
    if not moments or len(commit) < _MIN_COMMIT:
        raise UsageError(
            f"--since: got {commit!r}, allowed are {_MIN_COMMIT} or more digits of a commit of the history"
        )
    return max(moments)


def _change_lines(changes: Sequence[Change], histories: Sequence[_CaseHistory], width: int) -> list[str]:
    """Return a table of change points, and the total."""
    rows = list(map(_cells, changes))
    num_series = sum(len(history.metrics) for history in histories)
    total = f"{counted(len(changes), 'new change')} in {num_series} metrics of {counted(len(histories), 'case')}"
    needed = 2 * CONFIRMING_VERSIONS  # fewer versions show no change, however large it is
    noisy = [(case, name) for case in histories for name in case.metrics if METRICS[name].has_noise]
    if short := sum(len(case.points(name)) < needed for case, name in noisy):
        total += f"; not searched: {counted(short, 'metric')} with fewer than the {needed} versions that a change needs"
    return [*(table([_COLUMNS, *rows], width) if rows else []), total]


def _cells(change: Change) -> tuple[str, ...]:
    """Return a row of the table, which ends with what else differs between both versions besides the code."""
    before, after = change.last_before, change.first_after
    sides = before.environment, after.environment
    pairs = ((label, *(side.get(name) for side in sides)) for label, name in _SURROUNDINGS.items())
    others = [f"{label} {old or 'unknown'} -> {new or 'unknown'}" for label, old, new in pairs if old != new]
    verdict = ", ".join([change.verdict, *others])
    return change.history.case, change.metric, before.name, after.name, *change.values, verdict


# Git's name for a head that is not on a branch.
DETACHED = "HEAD"


@dataclass(frozen=True)
class Version:
    """A version of the code: a commit, or the uncommitted changes of one run, which are a version of their own.

    Attributes:
        launches: Facts of the launches, oldest first.
        revision: Revision of the baseline that the version was last compared with; None without one.
        baselines: Metric -> baseline center that the version was last compared with.
    """

    launches: Sequence[LaunchFacts]
    revision: int | None
    baselines: dict[str, float]

    @property
    def provenance(self) -> Provenance:
        """Return the time and the code of the first launch."""
        return self.launches[0].provenance

    @property
    def environment(self) -> dict[str, Fact]:
        """Return the environment of the last launch."""
        return self.launches[-1].environment

    @property
    def name(self) -> str:
        """Return the short commit, and whether the code differed from the commit."""
        return version_text(self.provenance.commit, self.provenance.dirty) or "unknown"

    @cached_property
    def values(self) -> list[dict[str, float | str]]:
        """Return metric -> value of each launch."""
        return [measured_values([launch]) for launch in self.launches]

    def numbers(self, metric: str) -> list[float]:
        """Return the metric's value in each launch in which the value is a number."""
        return [value for launch in self.values if isinstance(value := launch.get(metric), float)]


@dataclass(frozen=True)
class _CaseHistory:
    """The history of one case on one platform; versions are in the order in which they were first measured."""

    case: str
    test: str
    platform: str
    versions: Sequence[Version]

    @property
    def metrics(self) -> list[str]:
        """Return the metrics that any launch has, in the order of the table of metrics."""
        found = {name for version in self.versions for launch in version.values for name in launch}
        return [name for name in METRICS if name in found]

    @property
    def revisions(self) -> list[tuple[int, int]]:
        """Return, for each baseline revision after the first, the index of its first version and its number."""
        known = [(index, row.revision) for index, row in enumerate(self.versions) if row.revision is not None]
        return [here for before, here in pairwise(known) if here[1] != before[1]]

    @property
    def num_launches(self) -> int:
        """Return the number of launches of all versions."""
        return sum(len(version.launches) for version in self.versions)

    def points(self, metric: str) -> list[tuple[int, float | str]]:
        """Return the index of each version that has the metric, and the median over its launches or the last text."""
        found: list[tuple[int, float | str]] = []
        for index, version in enumerate(self.versions):
            if numbers := version.numbers(metric):
                found.append((index, median(numbers)))
            elif texts := [launch[metric] for launch in version.values if metric in launch]:
                found.append((index, texts[-1]))
        return found

    def has_numbers(self, metric: str) -> bool:
        """Return whether a metric is a number in some version."""
        return any(version.numbers(metric) for version in self.versions)


def _of_branch(entries: Sequence[HistoryEntry], branch: str | None) -> list[HistoryEntry]:
    """Return the entries of one branch.

    Args:
        entries: Entries of any branch.
        branch: Name of the branch, or :data:`DETACHED` for a detached head; None if there is only one branch.

    Raises:
        UsageError: The branch has no entry, or there are several branches and none was named.
    """
    found = sorted({_branch(entry) for entry in entries})
    if branch is None and len(found) > 1:
        raise UsageError(
            f"--branch: the history is of {len(found)} branches, and values of two branches are not one series; "
            f"give one of {found}"
        )
    if branch is not None and branch not in found:
        raise UsageError(f"--branch: got {branch!r}, allowed is one of {found}")
    return [entry for entry in entries if branch is None or _branch(entry) == branch]


def _branch(entry: HistoryEntry) -> str:
    return entry.comparison.launches[0].facts.provenance.branch or DETACHED


def case_histories(entries: Sequence[HistoryEntry]) -> list[_CaseHistory]:
    """Return the history of each case and platform.

    Launches of an A/B reference and launches that a profiler slowed down are left out.
    """
    grouped: dict[tuple[str, str], list[HistoryEntry]] = defaultdict(list)
    for entry in entries:
        grouped[entry.comparison.case, entry.comparison.platform].append(entry)
    histories = (
        _CaseHistory(case, group[0].test, platform, _versions(group))
        for (case, platform), group in sorted(grouped.items())
    )
    return [history for history in histories if history.versions]


def _versions(entries: Sequence[HistoryEntry]) -> list[Version]:
    found: dict[tuple[str | None, str], list[tuple[LaunchFacts, HistoryEntry]]] = defaultdict(list)
    for entry in entries:
        for launch in entry.comparison.launches:
            if launch.side is Side.CANDIDATE and not launch.facts.profiler:
                # Uncommitted changes of two runs may differ, as may two versions without a known commit.
                is_commit = launch.facts.provenance.commit is not None and not launch.facts.provenance.dirty
                found[launch.facts.provenance.commit, "" if is_commit else entry.run].append((launch.facts, entry))
    return sorted(map(_version, found.values()), key=lambda version: version.provenance.measured_at)


def _version(measured: Sequence[tuple[LaunchFacts, HistoryEntry]]) -> Version:
    revisions = [entry.revision for _, entry in measured if entry.revision is not None]
    every = [row for _, entry in measured for row in entry.comparison.rows]
    rows = [row for row in every if row.reference.kind is ReferenceKind.BASELINE]
    return Version(
        sorted((facts for facts, _ in measured), key=lambda facts: facts.provenance.measured_at),
        revisions[-1] if revisions else None,
        {row.metric: float(row.baseline) for row in rows if isinstance(row.baseline, float | int)},
    )


# Rows of a table of versions; the charts show all versions.
MAX_ROWS = 100
# Characters of a commit on the axis of a chart.
_SHORT = 7
_MIB = 2.0**20


def render(histories: Sequence[_CaseHistory]) -> str:
    """Return the HTML of the page; cases with the newest changes come first.

    Raises:
        UsageError: Otava is not installed.
    """
    from pytest_aorta.report.page.render import rendered  # needs jinja2

    found = [(history, find_changes(history)[::-1]) for history in histories]
    found.sort(key=lambda case: case[1][0].first_after.provenance.measured_at if case[1] else "", reverse=True)
    data = list(starmap(_chart_data, found))
    return rendered("history", ["history.js"], cases=found, max_rows=MAX_ROWS, metrics=METRICS, data=data)


def _chart_data(history: _CaseHistory, changes: Sequence[Change]) -> dict[str, Any]:
    """Return the values that the page's script draws; long lists are little-endian numbers in base64."""
    versions = history.versions
    at = [index for index, version in enumerate(versions) for _ in version.launches]
    return {
        "names": [(version.provenance.commit or "?")[:_SHORT] for version in versions],
        "dirty": [index for index, version in enumerate(versions) if version.provenance.dirty],
        "times": [version.provenance.measured_at for version in versions],
        "at": encoded(at, "<u4"),
        "revisions": history.revisions,
        "charts": {name: _chart(history, changes, name) for name in history.metrics},
    }


def _chart(history: _CaseHistory, changes: Sequence[Change], name: str) -> dict[str, Any]:
    versions = history.versions
    is_bytes = METRICS[name].unit == "B"
    unit = _MIB if is_bytes else 1.0
    medians = [float(np.median(numbers)) / unit if (numbers := row.numbers(name)) else np.nan for row in versions]
    launches = (launch.get(name) for version in versions for launch in version.values)
    values = [float(value) / unit if isinstance(value, float | int) else np.nan for value in launches]
    return {
        "unit": "MiB" if is_bytes else METRICS[name].unit,
        "medians": encoded(medians, "<f8"),
        "launches": encoded(values, "<f8"),
        "baseline": encoded([version.baselines.get(name, np.nan) / unit for version in versions], "<f8"),
        "changes": [[change.index, change.verdict] for change in changes if change.metric == name],
    }
