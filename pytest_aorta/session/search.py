"""The search for the commit of a regression, and its log, from which it goes on."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, field

from pytest_aorta.common.documents import UnreadableFile, read_bytes
from pytest_aorta.common.errors import AortaError, ComparisonFailed, LaunchError, ResultError, SpecError, WorkloadFailed
from pytest_aorta.common.files import write_text
from pytest_aorta.common.model import Commit, Model, Text, decode, to_json
from pytest_aorta.common.text import brief
from pytest_aorta.plan.reference import CommitReference, References
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.verdict.commit_search import CommitSearch, NextLaunch, Probe, SearchEnd, SearchOutcome
from pytest_aorta.verdict.comparison import PairedComparison
from pytest_aorta.verdict.verdicts import Verdicts

LOG_FILE = "log.jsonl"
MAX_BYTES = 64 << 20
_REMEDY = "delete the folder to search from the beginning"


class SearchRequest(Model, frozen=True):
    """The request for a search, which is the first line of its log.

    Attributes:
        commits: Full hashes, from the good commit to the bad one.
        pytest: Arguments of pytest, which select one test.
        setup: Words of each command that prepares the worktree of a commit.
        environments: Folder of prepared worktrees.
        tolerances: Metric -> tolerance, as text of a marker.
        metric: The only metric to search; None for all metrics that the test compares.
        schema_version: Version of the log.
    """

    commits: Annotated[tuple[Commit, ...], Meta(min_length=2)]
    pytest: tuple[str, ...]
    setup: tuple[tuple[str, ...], ...] = ()
    environments: str = "environments"
    tolerances: dict[str, str] = field(default_factory=dict)
    metric: str | None = None
    schema_version: Literal[2] = 2


class Skip(Model, frozen=True, tag_field="kind", tag="skip"):
    """A commit that can't be probed, by its number, and the reason."""

    commit: Annotated[int, Meta(ge=1)]
    reason: str


Event: TypeAlias = Probe | Skip


class Logged(Model, frozen=True):
    """A line of the log: what happened in the search of one comparison of the test."""

    case: Text
    event: Event | SearchEnd


class SearchLog:
    """The log of one search. Each addition replaces the file as a whole, so a killed search leaves no partial line.

    Attributes:
        path: The file.
        request: The request for the search.
        lines: The other lines, in order.
    """

    def __init__(self, path: Path, request: SearchRequest, lines: Iterable[Logged] = ()) -> None:
        self.path = path
        self.request = request
        self.lines = list(lines)

    @classmethod
    def create(cls, path: Path, request: SearchRequest) -> SearchLog:
        """Create a log without launches.

        Raises:
            SpecError: The file can't be written.
        """
        log = cls(path, request)
        log._write()
        return log

    @classmethod
    def read(cls, path: Path) -> SearchLog:
        """Read a log.

        Raises:
            SpecError: The file can't be read, or a line is not valid. The message names the line and what is allowed.
        """
        try:
            first, *others = read_bytes(path, max_bytes=MAX_BYTES).splitlines() or [b""]
            request = decode(first, SearchRequest, f"{path}, line 1", by_hand=False)
            lines = [
                decode(line, Logged, f"{path}, line {number}", by_hand=False) for number, line in enumerate(others, 2)
            ]
        except UnreadableFile as error:
            raise SpecError(f"{error}; {_REMEDY}") from None
        return cls(path, request, lines)

    def events(self, case: str | None = None) -> list[Event]:
        """Return the probes and skipped commits of a comparison, or of all comparisons, in order."""
        lines = [line for line in self.lines if case in (None, line.case)]
        return [line.event for line in lines if not isinstance(line.event, SearchEnd)]

    def ends(self) -> dict[str, SearchEnd]:
        """Return the case of each comparison whose search has ended -> the end."""
        return {line.case: line.event for line in self.lines if isinstance(line.event, SearchEnd)}

    def started(self) -> set[int]:
        """Return the numbers of the commits that were launched with a result; the good commit is always among them."""
        probes = [event for event in self.events() if isinstance(event, Probe)]
        return {0, *(number for probe in probes for number in (probe.commit, probe.before or 0))}

    def replay(self, case: str, search: CommitSearch) -> bool:
        """Give a search the logged probes of its comparison; return True if there are any.

        Raises:
            SpecError: The search asks for other launches than those that were logged.
        """
        events = self.events(case)
        for number, event in enumerate(events, 1):
            step = search.next()
            if isinstance(step, SearchEnd) or not _is_asked_for(event, step):
                raise SpecError(
                    f"{self.path}: logged launch {number} of {case} is not what the search asks for; the test, the "
                    f"baselines or pytest-aorta have changed; {_REMEDY}"
                )
            give(search, event)
        return bool(events)

    def add(self, case: str, event: Event | SearchEnd) -> None:
        """Add a probe, a commit that can't be probed, or the end of a comparison's search.

        Raises:
            SpecError: The file can't be written.
        """
        self.lines.append(Logged(case, event))
        self._write()

    def _write(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, "".join(f"{to_json(line)}\n" for line in (self.request, *self.lines)))
        except OSError as error:
            raise SpecError(f"{self.path}: can't be written: {error.strerror or error}") from None


def give(search: CommitSearch, event: Event) -> None:
    """Pass a probe or a skipped commit to a search."""
    if isinstance(event, Skip):
        search.skip(event.commit, event.reason)
    else:
        search.add(event)


def _is_asked_for(event: Event, step: NextLaunch) -> bool:
    if isinstance(event, Skip):
        return event.commit in (step.commit, step.before)
    return (event.commit, event.reference is not None, event.before) == (step.commit, step.paired, step.before)


# Errors that count as a commit that does not start.
_UNTESTABLE = (LaunchError, ResultError, SpecError, WorkloadFailed)
_MAX_REASON = 300


class Bisection:
    """A search: its log, and the commits that are checked out."""

    def __init__(self, log: SearchLog, rootdir: Path) -> None:
        """Prepare the search that ``log`` requests, for a pytest run in ``rootdir``."""
        self.log = log
        self.commits = log.request.commits
        self._references = References(None, rootdir, log.request.setup, Path(log.request.environments))

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
        if case not in self.log.ends():
            self.log.add(case, end)
        if end.outcome is SearchOutcome.ABSENT:
            return Verdicts(case, end.verdicts)
        names = ", ".join(self.commits[number][:12] for number in end.suspects)
        raise ComparisonFailed(f"{case}: {end.outcome.value}: {end.reason or names}")

    def _end_failed(self, number: int, error: AortaError) -> LaunchError:
        side = "bad" if number else "good"
        return LaunchError(f"aorta bisect: the {side} commit {self.commits[number][:12]} does not start: {error}")
