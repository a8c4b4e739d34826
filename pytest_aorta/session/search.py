"""The search for what changed a metric, each step of which is an A/B with the good side."""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias

from pytest_aorta.common.errors import AortaError, ComparisonFailed, LaunchError, ResultError, SpecError, WorkloadFailed
from pytest_aorta.common.files import write_text
from pytest_aorta.common.model import Model
from pytest_aorta.common.text import brief, counted
from pytest_aorta.plan.cache import cache_folder
from pytest_aorta.plan.reference import Reference, References
from pytest_aorta.plan.side import SideSpec, Span
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.session.axes import GOOD, Axis, Over, Point, make_axis
from pytest_aorta.session.record import Side
from pytest_aorta.session.rounds import in_pairs, settle
from pytest_aorta.verdict.comparison import PairedComparison
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Verdict, Verdicts

# The most pairs of launches of one comparison.
MAX_PAIRS = 24
# Errors that count as a point that does not start.
_UNTESTABLE = (LaunchError, ResultError, SpecError, WorkloadFailed)
_MAX_REASON = 300
# A search that was interrupted longer ago starts anew.
_RESUMED_S = 86400.0
Launch: TypeAlias = Callable[[Point], LaunchFacts]


class SearchRequest(Model, frozen=True):
    """The request for a search, which ``aorta bisect`` passes to pytest.

    Attributes:
        sides: The good side and the bad one; commits are full hashes.
        setup: Words of each command that prepares the worktree of a commit.
        metric: The only metric to search; None for all metrics that the test compares.
        over: What differs between the sides; or the versions of a package that both of them get.
    """

    sides: tuple[SideSpec, SideSpec]
    setup: tuple[tuple[str, ...], ...]
    metric: str | None
    over: Over | Span = Over.COMMITS


class Finding(Model, frozen=True):
    """The end of a search.

    Attributes:
        changes: Full hashes of the commits one of which brought the change in, several if only the last of them starts;
            or the packages or variables that carry it together. None if none was named.
        text: The message of the test's failure; empty if the ends do not differ.
    """

    changes: tuple[str, ...] = ()
    text: str = ""


class SearchLog:
    """The points of a search that have been decided, from which the same search goes on if it was interrupted.

    Attributes:
        file: The file, which is deleted when the search ends.
    """

    def __init__(self, *made_of: object) -> None:
        self.file = cache_folder() / "searches" / f"{sha256(repr(made_of).encode()).hexdigest()[:16]}.json"

    def read(self) -> dict[Point, bool | None]:
        """Return the points, and whether each carries the change; empty if the search was not interrupted lately."""
        with suppress(OSError, ValueError):
            if time.time() - self.file.stat().st_mtime < _RESUMED_S:
                return {Point(numbers): carries for numbers, carries in json.loads(self.file.read_text("utf-8"))}
        return {}

    def write(self, known: Mapping[Point, bool | None]) -> None:
        """Write the points that started."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        started = [(sorted(point), carries) for point, carries in known.items() if carries is not None]
        write_text(self.file, json.dumps(started), durable=False)


class Bisection:
    """The search of one run of pytest.

    Attributes:
        request: The request.
        axis: The changes between the ends, and their launches.
        finding: What the search has found so far.
    """

    def __init__(self, request: SearchRequest, rootdir: Path, say: Callable[[str], None]) -> None:
        self.request = request
        self.axis: Axis = make_axis(request.over, request.sides, References(None, rootdir, say, request.setup))
        self.finding: Finding = Finding()

    def log(self, comparison: PairedComparison, metric: str) -> SearchLog:
        """Return the log of the search for a metric, which is another one if the file of the test changes."""
        test = self.axis.references.rootdir / comparison.case.partition("::")[0]
        text = test.read_bytes() if test.is_file() else b""
        changes = tuple(self.axis.changes)
        return SearchLog(self.request, changes, comparison.case, comparison.marked, metric, sha256(text).hexdigest())

    def good(self) -> Reference:
        """Return the good side as a version to launch.

        Raises:
            AortaError: It can't be checked out or built, or a setup command fails.
        """
        try:
            return self.axis.reference(GOOD)
        except SpecError as error:
            raise self.end_failed(GOOD, error) from None

    def end_failed(self, point: Point, error: AortaError) -> AortaError:
        """Return the error that the good or the bad side does not start, which no search skips."""
        side = "bad" if point else "good"
        return AortaError(f"aorta bisect: the {side} side {self.axis.short(point)} does not start: {error}")


@dataclass
class Search:
    """The search for one comparison of a test.

    Attributes:
        bisection: The changes.
        comparison: The comparison of the ends.
        first: A launch of the good side.
        launch: Launches a point.
        say: Shows a line to the user.
    """

    bisection: Bisection
    comparison: PairedComparison
    first: LaunchFacts
    launch: Launch
    say: Callable[[str], None]
    # The points that started at least once.
    _started: set[Point] = field(default_factory=lambda: {GOOD})
    # Whether a point carries the change; None if it does not start.
    _known: dict[Point, bool | None] = field(default_factory=dict)
    _log: SearchLog | None = None

    @property
    def _axis(self) -> Axis:
        return self.bisection.axis

    def run(self) -> Verdicts:
        """Search, and return the comparison of the ends if they do not differ.

        Raises:
            ComparisonFailed: The search ended in any other way. The message names the change, or why there is none.
            AortaError: The good or the bad side does not start.
        """
        bad = self._launched(self._axis.bad)
        ends = self._in_pairs(self.comparison, self._axis.bad, GOOD, [bad], [self.first])
        aim = _aim_of(ends, [self.first, bad])
        if aim is None:
            unclear = ends.failing({Outcome.INCONCLUSIVE, Outcome.NOT_APPLICABLE, Outcome.MISSING})
            outcomes = {row.outcome for row in ends.rows}
            if Outcome.INCONCLUSIVE in outcomes or Outcome.PASS not in outcomes:
                raise self._undecided("the ends can't be told apart", *unclear)
            self.say("; ".join([f"{ends.case}: not found: the ends do not differ", *map(str, unclear)]))
            return ends
        self.say(f"{ends.case}: {aim}")
        self._log = self.bisection.log(self.comparison, aim.metric)
        if known := self._log.read():
            self._known |= known
            self.say(f"an interrupted search goes on after {counted(len(known), 'point')}; {self._log.file} has them")
        if _is_exact(aim) and _shows(aim, self._row(aim, GOOD)):
            raise self._undecided("launches of the good side differ; run the test in its deterministic mode", aim)
        raise self._found(aim, *(self._halved(aim) if self._axis.is_ordered else self._minimized(aim)))

    def _halved(self, aim: Verdict) -> tuple[Point, Point]:
        """Return the last point without the change and the first one with it, by bisection."""
        good, found = 0, len(self._axis.changes)
        points = [Point(range(number)) for number in range(found + 1)]
        while between := [each for each in range(good + 1, found) if self._known.get(points[each], True) is not None]:
            number = between[len(between) // 2]
            if self._carries(aim, points[number]):
                found = number
            elif self._known[points[number]] is not None:
                good = number
        return points[good], points[found]

    def _minimized(self, aim: Verdict) -> tuple[Point, Point]:
        """Return the good side and a set of changes that carries the change, and none of whose parts does.

        The algorithm is ddmin (Zeller and Hildebrandt, IEEE Trans. Softw. Eng. 28, 2002, figure 2).
        """
        found, parts = self._axis.bad, 2
        while len(found) > 1:
            numbers, size = sorted(found), math.ceil(len(found) / parts)
            sets = [Point(numbers[begin : begin + size]) for begin in range(0, len(numbers), size)]
            tried = [self._axis.closed(each) for each in (*sets, *(found - part for part in sets))]
            smaller = next((each for each in tried if each < found and self._carries(aim, each)), None)
            if smaller is not None:
                found, parts = smaller, 2
            elif size == 1:
                break
            else:
                parts = min(2 * parts, len(found))
        return GOOD, found

    def _carries(self, aim: Verdict, point: Point) -> bool | None:
        """Return whether a point shows the change; None if it does not start.

        Raises:
            ComparisonFailed: It is too noisy.
        """
        if point not in self._known:
            self._known[point] = self._tried(aim, point)
            if self._log:
                self._log.write(self._known)
        return self._known[point]

    def _tried(self, aim: Verdict, point: Point) -> bool | None:
        name = self._axis.name(point)
        try:
            row = self._row(aim, point)
        except _UNTESTABLE as error:
            why = brief(" ".join(str(error).split()) or type(error).__name__, _MAX_REASON)
            self.say(f"skipped {name}: {why}")
            return None
        self.say(f"{name}: {row or 'unchanged'}")
        if row is not None and row.outcome is Outcome.INCONCLUSIVE:
            raise self._undecided(f"too noisy at {name}; measure more steps", row)
        return None if row is not None and row.outcome is Outcome.NOT_APPLICABLE else _shows(aim, row)

    def _found(self, aim: Verdict, good: Point, found: Point) -> ComparisonFailed:
        """Return the end of a search that leaves the changes of ``found`` after those of ``good``."""
        axis, numbers = self._axis, sorted(found - good)
        row = aim if (good, found) == (GOOD, axis.bad) else self._row(aim, found, good)
        names = [axis.name(Point(range(number + 1)) if axis.is_ordered else Point({number})) for number in numbers]
        if not _shows(aim, row):
            against = f"compared with {axis.short(good)}, it does not show the change: {row or 'unchanged'}"
            return self._undecided(f"likeliest is {names[-1]}, but {against}", aim)
        lines = [names[0], *filter(None, [axis.advice(found)])]
        if len(names) > 1:
            count = counted(len(names), axis.over.removesuffix("s"))
            lines = [
                f"one of {count}, of which only the last starts" if axis.is_ordered else f"{count} together",
                *names,
            ]
        if not axis.is_ordered and (lost := sum(known is None for known in self._known.values())):
            lines.append(f"{counted(lost, 'set')} that did not start may carry it too")
        changes = tuple(axis.changes[number] for number in numbers)
        return self._ended(f"found: {lines[0]}", *lines[1:], str(row), changes=changes)

    def _undecided(self, reason: str, *rows: Verdict) -> ComparisonFailed:
        return self._ended(f"undecided: {reason}", *map(str, rows))

    def _ended(self, *lines: str, changes: tuple[str, ...] = ()) -> ComparisonFailed:
        text = "\n  ".join([f"{self.comparison.case}: {lines[0]}", *lines[1:]])
        self.bisection.finding = Finding(changes, text)
        if self._log:
            self._log.file.unlink(missing_ok=True)
        return ComparisonFailed(text)

    def _row(self, aim: Verdict, point: Point, other: Point = GOOD) -> Verdict | None:
        """Return the verdict of a point against another one; None if both lack the metric."""
        name = self._axis.short(other)
        if _is_exact(aim):
            reference = self._launched(other) if other else self.first
            rows = replace(self.comparison, version=name).judge([self._launched(point)], [reference]).rows
        else:
            only = replace(self.comparison, only=[aim.metric], version=name)
            rows = self._in_pairs(only, point, other).rows
        return next((row for row in rows if row.metric == aim.metric), None)

    def _in_pairs(
        self,
        comparison: PairedComparison,
        point: Point,
        other: Point,
        candidates: Sequence[LaunchFacts] = (),
        references: Sequence[LaunchFacts] = (),
    ) -> Verdicts:
        points = {Side.CANDIDATE: point, Side.REFERENCE: other}
        pairs = in_pairs(comparison, candidates, references, reference_first=True)
        return settle(pairs, lambda side: self._launched(points[side]))

    def _launched(self, point: Point) -> LaunchFacts:
        """Launch a point, and once more if one that started before fails: the machine can be the cause."""
        try:
            try:
                facts = self.launch(point)
            except _UNTESTABLE:
                if point not in self._started:
                    raise
                facts = self.launch(point)
        except _UNTESTABLE as error:
            if point in (GOOD, self._axis.bad):
                raise self.bisection.end_failed(point, error) from None
            raise
        self._started.add(point)
        return facts


def _aim_of(ends: Verdicts, sides: Sequence[LaunchFacts]) -> Verdict | None:
    """Return the clearest change of the ends for the worse, or else for the better; None if there is none."""
    failing = [row for row in ends.failing({Outcome.MISSING}) if row.outcome is not Outcome.NOT_APPLICABLE]
    worse = [row for row in failing if any(row.definition.measure(side) is not None for side in sides)]
    return max(worse or [row for row in ends.rows if row.outcome is Outcome.IMPROVED], key=_clearness, default=None)


def _clearness(row: Verdict) -> float:
    """Return a change in widths of its interval; infinite if the metric has no noise."""
    if _is_exact(row):
        return float("inf")
    if row.delta is None or row.low is None or row.high is None:
        return 0.0
    return abs(row.delta) / max(row.high - row.low, 1e-12)


def _is_exact(row: Verdict) -> bool:
    """Return whether one launch of each side shows a change."""
    return row.outcome is Outcome.MISSING or row.tolerance.is_exact or not row.definition.has_noise


def _shows(aim: Verdict, row: Verdict | None) -> bool:
    """Return whether a comparison shows the change of the ends."""
    return row is not None and (row.outcome, row.is_lost) == (aim.outcome, aim.is_lost)
