"""A comparison that searches for a commit: it asks for launches of commits until it names one."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

from pytest_aorta.common.errors import AortaError, ComparisonFailed, LaunchError, ResultError, SpecError, WorkloadFailed
from pytest_aorta.common.text import brief
from pytest_aorta.plan.reference import CommitReference, References
from pytest_aorta.plan.worktree import Setup
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.session.search.log import SearchLog, Skip, give
from pytest_aorta.verdict.commit_search import CommitSearch, NextLaunch, Probe, SearchEnd, SearchOutcome
from pytest_aorta.verdict.comparison import PairedComparison
from pytest_aorta.verdict.verdicts import Verdicts

# Errors that count as a commit that does not start.
_UNTESTABLE = (LaunchError, ResultError, SpecError, WorkloadFailed)
_MAX_REASON = 300


class Bisection:
    """A search: its log, and the commits that are checked out."""

    def __init__(self, log: SearchLog, rootdir: Path) -> None:
        """Prepare the search that ``log`` requests, for a pytest run in ``rootdir``."""
        self.log = log
        self.commits = log.request.commits
        setup = Setup(log.request.setup, Path(log.request.environments))
        self._references = References(None, rootdir, setup)

    def commit(self, number: int) -> CommitReference:
        """Return a commit as a version to launch, counted from the good commit, which is number 0.

        Raises:
            SpecError: The commit can't be checked out, or a setup command fails.
        """
        commit = self.commits[number]
        return self._references.commit(commit, commit[:12])

    def end(self, number: int) -> CommitReference:
        """Return the good or the bad commit as a version to launch.

        Raises:
            LaunchError: The commit can't be checked out, or a setup command fails.
        """
        try:
            return self.commit(number)
        except SpecError as error:
            raise self._end_failed(number, error) from None

    def search(self, comparison: PairedComparison, first: LaunchFacts) -> Generator[int, LaunchFacts, Verdicts]:
        """Ask for launches of commits, by number, like a comparison of :mod:`pytest_aorta.session.rounds`.

        ``first`` is a launch of the good commit.

        Returns:
            The comparison of the ends, if they do not differ.

        Raises:
            ComparisonFailed: The search ended in any other way. The log contains the end.
            LaunchError: The good or the bad commit does not start.
        """
        case, search = comparison.case, CommitSearch(len(self.commits) - 1, comparison)
        # The test's own launch ran the good commit, so this launch is one half of the first pair.
        given = None if self.log.replay(case, search) else first
        while isinstance(step := search.next(), NextLaunch):
            event = yield from self._probe(step, given)
            given = None
            give(search, event)
            self.log.add(case, event)
        return self._ended(case, step)

    def _probe(self, step: NextLaunch, first: LaunchFacts | None) -> Generator[int, LaunchFacts, Probe | Skip]:
        other = step.before or 0
        wanted = [step.commit, *([other] if step.paired and first is None else [])]
        launched: dict[int, LaunchFacts] = {} if first is None else {other: first}
        for number in wanted if step.candidate_first else reversed(wanted):
            try:
                launched[number] = yield from self._launched(number)
            except _UNTESTABLE as error:
                if number in (0, len(self.commits) - 1):
                    raise self._end_failed(number, error) from None
                return Skip(number, brief(" ".join(str(error).split()) or type(error).__name__, _MAX_REASON))
        return Probe(step.commit, launched[step.commit], launched[other] if step.paired else None, step.before)

    def _launched(self, number: int) -> Generator[int, LaunchFacts, LaunchFacts]:
        """Ask for a launch, and once more if a commit that started before fails: the machine can be the cause."""
        try:
            return (yield number)
        except _UNTESTABLE:
            if number not in self.log.started():
                raise
        return (yield number)

    def _ended(self, case: str, end: SearchEnd) -> Verdicts:
        if case not in [logged.case for logged in self.log.ends()]:
            self.log.add_end(case, end)
        if end.outcome is SearchOutcome.ABSENT:
            return Verdicts(case, end.verdicts)
        names = ", ".join(self.commits[number][:12] for number in end.suspects)
        raise ComparisonFailed(f"{case}: {end.outcome.value}: {end.reason or names}")

    def _end_failed(self, number: int, error: AortaError) -> LaunchError:
        side = "bad" if number else "good"
        return LaunchError(f"aorta bisect: the {side} commit {self.commits[number][:12]} does not start: {error}")
