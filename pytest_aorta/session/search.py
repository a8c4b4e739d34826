"""The search for the commit that changed a metric: a bisection, each step of which is an A/B with the good commit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from pytest_aorta.common.errors import AortaError, ComparisonFailed, LaunchError, ResultError, SpecError, WorkloadFailed
from pytest_aorta.common.model import Commit, Model
from pytest_aorta.common.text import brief, counted
from pytest_aorta.plan.reference import Reference, References, first_parents, git
from pytest_aorta.plan.side import SideSpec
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.session.record import Side
from pytest_aorta.session.rounds import in_pairs, settle
from pytest_aorta.verdict.comparison import PairedComparison
from pytest_aorta.verdict.metrics import metric_of
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Verdict, Verdicts

# The most pairs of launches of one comparison.
MAX_PAIRS = 24
# Errors that count as a commit that does not start.
_UNTESTABLE = (LaunchError, ResultError, SpecError, WorkloadFailed)
_MAX_REASON = 300
Launch: TypeAlias = Callable[[int], LaunchFacts]


class SearchRequest(Model, frozen=True):
    """The request for a search, which ``aorta bisect`` passes to pytest.

    Attributes:
        commits: Full hashes of the good commit and the bad one.
        setup: Words of each command that prepares the worktree of a commit.
        metric: The only metric to search; None for all metrics that the test compares.
    """

    commits: tuple[Commit, Commit]
    setup: tuple[tuple[str, ...], ...]
    metric: str | None


class Finding(Model, frozen=True):
    """The end of a search.

    Attributes:
        commits: Full hashes of the commits one of which brought the change in; several if only the last of them starts,
            none if no commit was named.
        text: The message of the test's failure; empty if the ends do not differ.
    """

    commits: tuple[Commit, ...] = ()
    text: str = ""


class Bisection:
    """The search of one run of pytest, and the commits that it launches.

    Attributes:
        request: The request.
        commits: Full hashes, from the good commit to the bad one.
        finding: What the search has found so far.
    """

    def __init__(self, request: SearchRequest, rootdir: Path, say: Callable[[str], None]) -> None:
        self.request = request
        self.commits = [request.commits[0], *first_parents(rootdir, *request.commits)]
        self.finding = Finding()
        self._rootdir = rootdir
        self._references = References(None, rootdir, say, request.setup)

    def name(self, number: int) -> str:
        """Return the short hash and the subject of a commit."""
        return git(self._rootdir, "log", "-1", "--no-show-signature", "--format=%h %s", self.commits[number])

    def branch_of_merge(self, number: int) -> str:
        """Return the ends of the branch that a commit merged, as arguments of a further search; empty if none."""
        base, *tips = git(self._rootdir, "rev-list", "--parents", "-n1", self.commits[number]).split()[1:]
        return f"$(git merge-base {base[:12]} {tips[0][:12]}) {tips[0][:12]}" if tips else ""

    def commit(self, number: int) -> Reference:
        """Return a commit as a version to launch, counted from the good commit, which is number 0.

        Raises:
            SpecError: The commit can't be checked out, or a setup command fails.
        """
        commit = self.commits[number]
        return self._references.side(SideSpec(commit[:12], commit))

    def good(self) -> Reference:
        """Return the good commit as a version to launch.

        Raises:
            AortaError: The commit can't be checked out, or a setup command fails.
        """
        try:
            return self.commit(0)
        except SpecError as error:
            raise self.end_failed(0, error) from None

    def end_failed(self, number: int, error: AortaError) -> AortaError:
        """Return the error that the good or the bad commit does not start, which no search skips."""
        side = "bad" if number else "good"
        return AortaError(f"aorta bisect: the {side} commit {self.commits[number][:12]} does not start: {error}")


@dataclass
class CommitSearch:
    """The search for one comparison of a test.

    Attributes:
        bisection: The commits.
        comparison: The comparison of the ends.
        first: A launch of the good commit.
        launch: Launches a commit, given by its number.
        say: Shows a line to the user.
    """

    bisection: Bisection
    comparison: PairedComparison
    first: LaunchFacts
    launch: Launch
    say: Callable[[str], None]
    # The commits that started at least once.
    _started: set[int] = field(default_factory=lambda: {0})

    @property
    def _last(self) -> int:
        return len(self.bisection.commits) - 1

    def run(self) -> Verdicts:
        """Search, and return the comparison of the ends if they do not differ.

        Raises:
            ComparisonFailed: The search ended in any other way. The message names the commit, or why there is none.
            AortaError: The good or the bad commit does not start.
        """
        bad = self._launched(self._last)
        ends = self._in_pairs(self.comparison, self._last, 0, [bad], [self.first])
        aim = _aim_of(ends, [self.first, bad])
        if aim is None:
            if unclear := [row for row in ends.rows if row.outcome is not Outcome.PASS]:
                raise self._undecided("the ends can't be told apart", *unclear)
            self.say(f"{ends.case}: not found: the ends do not differ")
            return ends
        self.say(f"{ends.case}: {aim}")
        if _is_exact(aim) and _shows(aim, self._row(aim, 0)):
            raise self._undecided("launches of the good commit differ; run the test in its deterministic mode", aim)
        good, found, skipped = 0, self._last, set[int]()
        while between := [number for number in range(good + 1, found) if number not in skipped]:
            number = between[len(between) // 2]
            try:
                row = self._row(aim, number)
            except _UNTESTABLE as error:
                why = brief(" ".join(str(error).split()) or type(error).__name__, _MAX_REASON)
                self.say(f"skipped {self.bisection.name(number)}: {why}")
                skipped.add(number)
                continue
            self.say(f"{self.bisection.name(number)}: {row or 'unchanged'}")
            if row is not None and row.outcome is Outcome.NOT_APPLICABLE:
                skipped.add(number)
            elif row is not None and row.outcome is Outcome.INCONCLUSIVE:
                raise self._undecided(f"too noisy at {self.bisection.name(number)}; measure more steps", row)
            elif _shows(aim, row):
                found = number
            else:
                good = number
        raise self._found(aim, good, found)

    def _found(self, aim: Verdict, good: int, found: int) -> ComparisonFailed:
        """Return the end of a search that leaves the commits after ``good`` up to ``found``."""
        row = aim if (good, found) == (0, self._last) else self._row(aim, found, good)
        names = [self.bisection.name(number) for number in range(good + 1, found + 1)]
        if not _shows(aim, row):
            against = f"compared with the commit before, it does not show the change: {row or 'unchanged'}"
            return self._undecided(f"likeliest is {names[-1]}, but {against}", aim)
        lines = [names[0]]
        if len(names) > 1:
            lines = [f"one of {counted(len(names), 'commit')}, of which only the last starts", *names]
        elif branch := self.bisection.branch_of_merge(found):
            lines.append(f"this is a merge; to search its branch: aorta bisect {branch} ...")
        found_commits = tuple(self.bisection.commits[good + 1 : found + 1])
        return self._ended(f"found: {lines[0]}", *lines[1:], str(row), commits=found_commits)

    def _undecided(self, reason: str, *rows: Verdict) -> ComparisonFailed:
        return self._ended(f"undecided: {reason}", *map(str, rows))

    def _ended(self, *lines: str, commits: tuple[str, ...] = ()) -> ComparisonFailed:
        text = "\n  ".join([f"{self.comparison.case}: {lines[0]}", *lines[1:]])
        self.bisection.finding = Finding(commits, text)
        return ComparisonFailed(text)

    def _row(self, aim: Verdict, number: int, other: int = 0) -> Verdict | None:
        """Return the verdict of a commit against another one; None if both lack the metric."""
        name = self.bisection.commits[other][:12]
        if _is_exact(aim):
            reference = self._launched(other) if other else self.first
            rows = replace(self.comparison, version=name).judge([self._launched(number)], [reference]).rows
        else:
            only = replace(self.comparison, only=[aim.metric], version=name)
            rows = self._in_pairs(only, number, other).rows
        return next((row for row in rows if row.metric == aim.metric), None)

    def _in_pairs(
        self,
        comparison: PairedComparison,
        number: int,
        other: int,
        candidates: Sequence[LaunchFacts] = (),
        references: Sequence[LaunchFacts] = (),
    ) -> Verdicts:
        commits = {Side.CANDIDATE: number, Side.REFERENCE: other}
        pairs = in_pairs(comparison, candidates, references, reference_first=True)
        return settle(pairs, lambda side: self._launched(commits[side]))

    def _launched(self, number: int) -> LaunchFacts:
        """Launch a commit, and once more if one that started before fails: the machine can be the cause."""
        try:
            try:
                facts = self.launch(number)
            except _UNTESTABLE:
                if number not in self._started:
                    raise
                facts = self.launch(number)
        except _UNTESTABLE as error:
            if number in (0, self._last):
                raise self.bisection.end_failed(number, error) from None
            raise
        self._started.add(number)
        return facts


def _aim_of(ends: Verdicts, sides: Sequence[LaunchFacts]) -> Verdict | None:
    """Return the clearest change of the ends for the worse, or else for the better; None if there is none."""
    failing = [(row, metric_of(row.metric, row.tolerance.direction)) for row in ends.failing({Outcome.MISSING})]
    worse = [row for row, metric in failing if any(metric.measure(side) is not None for side in sides)]
    return max(worse or [row for row in ends.rows if row.outcome is Outcome.IMPROVED], key=_clearness, default=None)


def _clearness(row: Verdict) -> float:
    """Return a change in widths of its interval; infinite if the metric has no noise."""
    if _is_exact(row) or row.delta is None or row.low is None or row.high is None:
        return float("inf") if _is_exact(row) else 0.0
    return abs(row.delta) / max(row.high - row.low, 1e-12)


def _is_exact(row: Verdict) -> bool:
    """Return whether one launch of each side shows a change."""
    return row.outcome is Outcome.MISSING or row.tolerance.is_exact or not metric_of(row.metric).has_noise


def _shows(aim: Verdict, row: Verdict | None) -> bool:
    """Return whether a comparison shows the change of the ends."""
    return row is not None and (row.outcome, row.is_lost) == (aim.outcome, aim.is_lost)
