"""``aorta history``: what the newest version of what --aorta-history has kept shows first, with the causes.

That is change points, and tests that began to fail.
"""

from __future__ import annotations

import argparse
import shlex
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np

from pytest_aorta.cli import ExitCode, report_problems
from pytest_aorta.common.errors import UsageError
from pytest_aorta.common.files import raised_as
from pytest_aorta.common.model import to_json
from pytest_aorta.common.text import counted, emit, table
from pytest_aorta.report.export import FORMATS
from pytest_aorta.result.facts import Launches, LaunchFacts
from pytest_aorta.result.provenance import version_text
from pytest_aorta.session.history import HistoryEntry, read_history
from pytest_aorta.session.record import Side
from pytest_aorta.verdict.attribution import SPEED_CASE, Sides, judged_otherwise
from pytest_aorta.verdict.metrics import METRICS, Direction, Value, format_value, measured_values
from pytest_aorta.verdict.verdicts import format_change

# With later values, the same change point can move by a few versions.
_MOVED = 2
# Each new version tests the same series again, so the p-value is a hundredth of Otava's, and several versions have to
# confirm a change. `benchmarks/report/history_alarms.py` counts the false alarms.
_MAX_P_VALUE = 0.00001
# Otava looks for candidates at ten times its default. At its default, a step up and down again hides the step up.
_CANDIDATES_P_VALUE = 0.01
CONFIRMING_VERSIONS = 3
# Versions on each side of a change that are compared in other tests, and the parts of the change of which another test
# moved too, or did not.
_BESIDE, _MOVED_TOO, _STAYED = 5, 0.5, 0.25
# Beyond this relative change, the value before is nearly 0 and a percentage is meaningless.
_LARGEST_RELATIVE = 1e4
_COLUMNS = ("test", "metric", "last before", "first after", "before", "after", "change", "")
# Git's name for a head that is not on a branch.
_DETACHED = "HEAD"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the subcommand."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of the history (pytest's --aorta-history)")
    parser.add_argument("--branch", metavar="NAME", help="only this branch; HEAD for a detached head (the only one)")
    parser.add_argument(
        "--format", choices=FORMATS, help="print the newest run alone, for PyTorch's benchmark database or for Bencher"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the change points of the newest versions; return 1 for one, or for a line that can't be read."""
    entries, problems = read_history(arguments.folder)
    if arguments.format:
        newest = [entry for entry in entries if entry.run == entries[-1].run]
        emit([to_json(FORMATS[arguments.format](newest))])
        return report_problems(problems)
    entries = _of_branch(entries, arguments.branch)
    histories = case_histories(entries)
    changes = [change for history in histories for change in told_changes(history)]
    found = [change for change, is_new in changes if is_new]
    rows = [change.cells for change in found]
    causes = [line for change in found for line in change.cause(histories)]
    causes += _began_to_fail(entries, histories)
    total = f"{counted(len(rows), 'new change')}, {len(changes) - len(rows)} of earlier versions, in "
    total += f"{sum(len(history.points) for history in histories)} metrics of "
    needed = 2 * CONFIRMING_VERSIONS  # fewer versions show no change, however large it is
    noisy = [points for history in histories for name, points in history.points.items() if METRICS[name].has_noise]
    short = sum(len(points) < needed for points in noisy)
    left = f"; not searched: {counted(short, 'metric')} with fewer than the {needed} versions that a change needs"
    emit(table([_COLUMNS, *rows]) if rows else [])
    emit(causes)
    emit([f"{total}{counted(len(histories), 'case')}{left if short else ''}"])
    code = report_problems([f"left out: {problem}" for problem in problems])
    return max(code, ExitCode.PROBLEM if found else ExitCode.OK)


@dataclass(frozen=True)
class _CaseHistory:
    """The history of one case on one platform.

    Attributes:
        test: Node id of its test.
        versions: The launches of each version of the code, in the order in which versions were first measured. Of
            uncommitted changes, those of each run are a version of their own.
    """

    test: str
    case: str
    platform: str
    versions: Sequence[Launches]

    def change_at(self, launch: LaunchFacts, metric: str) -> float | None:
        """Return the relative change of a metric between the versions just before a launch and those from it on.

        None if too few versions have it to tell.
        """
        index = sum(launches[0].provenance.moment_s < launch.provenance.moment_s for launches in self.versions)
        known = [(number, value) for number, value in self.points.get(metric, []) if isinstance(value, float)]
        before = [value for number, value in known if number < index][-_BESIDE:]
        after = [value for number, value in known if number >= index][:_BESIDE]
        is_known = min(len(before), len(after)) >= CONFIRMING_VERSIONS and median(before) > 0
        return median(after) / median(before) - 1 if is_known else None

    @cached_property
    def points(self) -> dict[str, list[tuple[int, Value]]]:
        """Return, for each metric, the index and the median of each version that has the metric."""
        found: dict[str, list[tuple[int, Value]]] = defaultdict(list)
        for index, launches in enumerate(self.versions):
            for name, value in measured_values(launches).items():
                found[name].append((index, value))
        return found


@dataclass(frozen=True)
class _Change:
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
    before: Value
    after: Value

    @property
    def verdict(self) -> str:
        """Return ``worse`` or ``better``, or ``changed`` for a metric that has to be equal."""
        metric = METRICS[self.metric]
        if metric.direction is Direction.EXACT or not (
            isinstance(self.before, float) and isinstance(self.after, float)
        ):
            return "changed"
        return "worse" if (self.after - self.before) * metric.worse > 0 else "better"

    @property
    def cells(self) -> tuple[str, ...]:
        """Return a row of the table."""
        metric, sides = METRICS[self.metric], self._sides
        names = (version_text(side.provenance.commit, side.provenance.dirty) or "unknown" for side in sides)
        values = (format_value(value, metric.unit, exact=not metric.has_noise) for value in (self.before, self.after))
        change = "-"
        if isinstance(self.before, float) and isinstance(self.after, float) and self.before:
            relative = (self.after - self.before) / abs(self.before)
            change = format_change(relative) if abs(relative) < _LARGEST_RELATIVE else "-"
        return self.history.case, self.metric, *names, *values, change, self.verdict

    @property
    def _sides(self) -> tuple[LaunchFacts, LaunchFacts]:
        """The first launches of the last version before the change and of the first one after it."""
        return self.history.versions[self.last][0], self.history.versions[self.index][0]

    def cause(self, histories: Sequence[_CaseHistory]) -> list[str]:
        """Return a line on the cause with the command that settles it, if other values tell the cause."""
        before, after = self._sides
        own = self.history.change_at(after, self.metric) or 0.0
        peers = (one for one in histories if one.platform == self.history.platform and one.case != SPEED_CASE)
        found = (one.change_at(after, self.metric) for one in peers if one is not self.history)
        # The part of this change that each of the other tests shows.
        parts = [change / own for change in found if change is not None and own]
        blocks = [
            {launch.provenance.block for launches in part for launch in launches}
            for part in (self.history.versions[: self.index], self.history.versions[self.index :])
        ]
        sides = Sides(
            before,
            after,
            is_exact=not METRICS[self.metric].has_noise,
            are_next=True,
            checks=_checks_of(histories, self.history.platform),
            moved=sum(part >= _MOVED_TOO for part in parts),
            stayed=sum(abs(part) <= _STAYED for part in parts),
            other_machine=all(len(part) == 1 for part in blocks) and blocks[0] != blocks[1],
        )
        return _cause_line(f"{self.history.case}: {self.metric}", self.history.test, sides)

    def is_same(self, other: _Change) -> bool:
        """Return whether both, of one metric, are one change point, which further values have moved a little."""
        moved = 0 if self.verdict == "changed" else _MOVED
        return self.verdict == other.verdict and abs(self.index - other.index) <= moved


def _cause_line(what: str, test: str, sides: Sides) -> list[str]:
    line = sides.line(test, lambda *words: shlex.join(["pytest", test, *words]))
    return [f"{what}: {line}"] if line else []


def _checks_of(histories: Sequence[_CaseHistory], platform: str) -> list[LaunchFacts]:
    """Return the launches of the speed check of a platform's accelerators, with the number of ranks it mostly had."""
    model = platform.partition("-x")[0]
    checks = (one for one in histories if one.case == SPEED_CASE and one.platform.partition("-x")[0] == model)
    longest = max(checks, key=lambda one: len(one.versions), default=None)
    return [launch for launches in longest.versions for launch in launches] if longest else []


def _began_to_fail(entries: Sequence[HistoryEntry], histories: Sequence[_CaseHistory]) -> list[str]:
    """Return a line for each case that failed in its newest run and passed before, if a cause can be told."""
    cases: dict[tuple[str, str], list[HistoryEntry]] = defaultdict(list)
    for entry in entries:
        if entry.comparison.rows and entry.comparison.facts(Side.CANDIDATE):
            cases[entry.comparison.case, entry.comparison.platform].append(entry)
    ends = [(found[-2].comparison, found[-1]) for found in cases.values() if len(found) > 1]
    began = [(old, new) for old, new in ends if new.comparison.failing and not old.failing]
    lines = []
    for old, new in began:
        now = new.comparison
        rows = [row for row in now.rows if row.metric in now.failing]
        sides = Sides(
            old.facts(Side.CANDIDATE)[0],
            now.facts(Side.CANDIDATE)[0],
            judged=judged_otherwise(old.rows, rows),
            are_next=True,
            is_exact=any(not row.definition.has_noise for row in rows),
            checks=_checks_of(histories, now.platform),
            moved=sum(one.comparison.platform == now.platform for _, one in began) - 1,
            stayed=sum(one.comparison.platform == now.platform and not one.comparison.failing for _, one in ends),
        )
        lines += _cause_line(f"{now.case}: failed, and passed before", new.test, sides)
    return lines


def told_changes(history: _CaseHistory) -> list[tuple[_Change, bool]]:
    """Return the change points of all metrics, and whether the versions before the newest do not show them."""
    before, found = replace(history, versions=history.versions[:-1]), []
    for metric in history.points:
        # Most metrics have no change point, and looking for one in the earlier versions takes as long again.
        if now := find_changes(history, metric):
            known = find_changes(before, metric)
            found += [(change, not any(map(change.is_same, known))) for change in now]
    return found


def find_changes(history: _CaseHistory, metric: str) -> list[_Change]:
    """Return the change points of a metric.

    A metric that has to be equal changes wherever two neighboring versions differ. For any other metric, Otava finds
    the change points in the medians of the versions; at least :data:`CONFIRMING_VERSIONS` have to be on each side.
    """
    points = history.points.get(metric, [])
    if not METRICS[metric].has_noise:
        return [
            _Change(history, metric, index, last, before, after)
            for (last, before), (index, after) in pairwise(points)
            if before != after
        ]
    values = [value for _, value in points if isinstance(value, float)]
    if len(set(values)) < 2:  # nothing can have changed, and the t-test would divide by a variance of 0
        return []
    confirmed = range(CONFIRMING_VERSIONS, len(values) - CONFIRMING_VERSIONS + 1)
    bounds = [0, *(place for place in _change_points(values) if place in confirmed), len(values)]
    segments = [median(values[begin:end]) for begin, end in pairwise(bounds)]
    return [
        _Change(history, metric, points[place][0], points[place - 1][0], before, after)
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
        points = merge(candidates, series, _MAX_P_VALUE, 0.0)
    return [int(point.index) for point in points]


def _of_branch(entries: Sequence[HistoryEntry], branch: str | None) -> list[HistoryEntry]:
    """Return the entries of one branch.

    Raises:
        UsageError: The branch has no entry, or there are several branches and none was named.
    """
    rows = [(entry.comparison.launches[0].facts.provenance.branch or _DETACHED, entry) for entry in entries]
    allowed = sorted({name for name, _ in rows})
    if branch not in allowed and (branch is not None or len(allowed) > 1):
        raise UsageError(f"--branch: got {branch!r}, allowed is one of {allowed}: values of two are not one series")
    return [entry for name, entry in rows if branch in (None, name)]


def case_histories(entries: Sequence[HistoryEntry]) -> list[_CaseHistory]:
    """Return the history of each case and platform.

    Launches of an A/B reference and launches that a profiler slowed down are left out.
    """
    found: dict[tuple[str, str, str], dict[object, list[LaunchFacts]]] = defaultdict(lambda: defaultdict(list))
    for entry in entries:
        for facts in entry.comparison.facts(Side.CANDIDATE):
            if not facts.profiler:
                # Uncommitted changes of two runs may differ, as may two versions without a known commit.
                commit, dirty = facts.provenance.commit, facts.provenance.dirty
                version = commit, entry.run if commit is None or dirty else ""
                found[entry.test, entry.comparison.case, entry.comparison.platform][version].append(facts)
    return [
        _CaseHistory(*names, sorted(versions.values(), key=lambda launches: launches[0].provenance.measured_at))
        for names, versions in sorted(found.items())
    ]
