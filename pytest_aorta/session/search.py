"""The search for the commit of a regression, and its log, from which it goes on."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from pytest_aorta.common.documents import UnreadableFile, parse_json, read_bytes
from pytest_aorta.common.errors import AortaError, ComparisonFailed, LaunchError, ResultError, SpecError, WorkloadFailed
from pytest_aorta.common.files import write_text
from pytest_aorta.common.model import convert, to_builtins
from pytest_aorta.common.schema import violation
from pytest_aorta.common.text import brief
from pytest_aorta.plan.reference import CommitReference, References
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.verdict.commit_search import CommitSearch, NextLaunch, Probe, ProbedCommit, SearchEnd, SearchOutcome
from pytest_aorta.verdict.comparison import PairedComparison
from pytest_aorta.verdict.metrics import METRICS
from pytest_aorta.verdict.verdicts import Verdicts

LOG_FILE = "log.jsonl"
SCHEMA = "bisect_log.schema.json"
SCHEMA_VERSION = 1
MAX_BYTES = 64 << 20
_KINDS = ("search", "probe", "skip", "end")
_REMEDY = "delete the folder to search from the beginning"


@dataclass(frozen=True)
class SearchRequest:
    """The request for a search.

    Attributes:
        commits: Full hashes, from the good commit to the bad one.
        pytest: Arguments of pytest, which select one test.
        setup: Words of each command that prepares the worktree of a commit.
        environments: Folder of prepared worktrees.
        tolerances: Metric -> tolerance, as text of a marker.
        metric: The only metric to search; None for all metrics that the test compares.
    """

    commits: tuple[str, ...]
    pytest: tuple[str, ...]
    setup: tuple[tuple[str, ...], ...] = ()
    environments: str = "environments"
    tolerances: dict[str, str] = field(default_factory=dict)
    metric: str | None = None


@dataclass(frozen=True)
class Skip:
    """A commit that can't be probed, by its number, and the reason."""

    commit: int
    reason: str


@dataclass(frozen=True)
class LoggedEnd:
    """The end of a search as logged; ``verdicts`` are the lines of the comparison of the ends."""

    case: str
    end: SearchEnd
    verdicts: tuple[str, ...]


Event: TypeAlias = Probe | Skip


class SearchLog:
    """The log of one search. Each addition replaces the file as a whole, so a killed search leaves no partial line.

    An addition raises SpecError if the file can't be written.
    """

    def __init__(self, path: Path, request: SearchRequest, entries: Sequence[dict[str, Any]] = ()) -> None:
        self.path = path
        self.request = request
        self._numbers = {commit: number for number, commit in enumerate(request.commits)}
        self._entries = list(entries)

    @classmethod
    def create(cls, path: Path, request: SearchRequest) -> SearchLog:
        """Create a log without launches.

        Raises:
            SpecError: The file can't be written.
        """
        log = cls(path, request)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpecError(f"{path.parent}: can't be created: {error.strerror or error}") from None
        log._add({"kind": "search", "schema_version": SCHEMA_VERSION, **asdict(request)})
        return log

    @classmethod
    def read(cls, path: Path) -> SearchLog:
        """Read a log.

        Raises:
            SpecError: The file can't be read, or a line is not valid. The message names the line and what is allowed.
        """
        try:
            lines = read_bytes(path, max_bytes=MAX_BYTES).decode("utf-8").splitlines()
        except (UnreadableFile, UnicodeDecodeError) as error:
            raise SpecError(f"{path}: can't be read: {error}; {_REMEDY}") from None
        entries = [_checked(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
        kinds = [entry["kind"] for entry in entries]
        if kinds[:1] != ["search"] or kinds.count("search") != 1:
            raise SpecError(f"{path}: the first line, and no other, has to describe the search; {_REMEDY}")
        log = cls(path, _request(entries[0]), entries)
        for number, entry in enumerate(entries, 1):
            log._check_values(entry, f"{path}, line {number}")
        return log

    def events(self, case: str) -> list[Event]:
        """Return the probes and skipped commits of a comparison, in order."""
        entries = [entry for entry in self._entries if entry.get("case") == case and entry["kind"] != "end"]
        return [self._event(entry) for entry in entries]

    def all_events(self) -> list[Event]:
        """Return the probes and skipped commits of all comparisons, in order."""
        return [self._event(entry) for entry in self._entries if entry["kind"] in ("probe", "skip")]

    def started(self) -> set[int]:
        """Return the numbers of the commits that were launched with a result; the good commit is always among them."""
        entries = [entry for entry in self._entries if entry["kind"] == "probe"]
        named = (entry[key] for entry in entries for key in ("commit", "before") if key in entry)
        return {0, *(self._numbers[commit] for commit in named)}

    def replay(self, case: str, search: CommitSearch) -> bool:
        """Give a search the logged probes of its comparison; return True if there are any.

        Raises:
            SpecError: The search asks for other launches than those that were logged.
        """
        events = self.events(case)
        for event in events:
            step = search.next()
            if isinstance(step, SearchEnd) or not _is_asked_for(event, step):
                raise SpecError(
                    f"{self.path}: the logged launch of {self.request.commits[event.commit][:12]} is not what the "
                    f"search asks for; the test, the baselines or pytest-aorta have changed; {_REMEDY}"
                )
            give(search, event)
        return bool(events)

    def ends(self) -> list[LoggedEnd]:
        """Return the end of the search of each comparison that has ended."""
        return [_end(entry) for entry in self._entries if entry["kind"] == "end"]

    def add(self, case: str, event: Event) -> None:
        """Add a probe, or a commit that can't be probed."""
        entry = {"case": case, "commit": self.request.commits[event.commit]}
        if isinstance(event, Skip):
            self._add({"kind": "skip", **entry, "reason": event.reason})
            return
        reference = None if event.reference is None else to_builtins(event.reference)
        before = {} if event.before is None else {"before": self.request.commits[event.before]}
        self._add(
            {"kind": "probe", **entry, **before, "candidate": to_builtins(event.candidate), "reference": reference}
        )

    def add_end(self, case: str, end: SearchEnd) -> None:
        """Add the end of the search of a comparison."""
        values = asdict(end) | {"outcome": end.outcome.value, "verdicts": [str(row) for row in end.verdicts]}
        self._add({"kind": "end", "case": case, **values})

    def _add(self, entry: dict[str, Any]) -> None:
        self._entries.append(json.loads(json.dumps(entry, allow_nan=False)))
        try:
            write_text(self.path, "".join(json.dumps(one, sort_keys=True) + "\n" for one in self._entries))
        except OSError as error:
            raise SpecError(f"{self.path}: can't be written: {error.strerror or error}") from None

    def _event(self, entry: dict[str, Any]) -> Event:
        commit = self._numbers[entry["commit"]]
        if entry["kind"] == "skip":
            return Skip(commit, entry["reason"])
        reference = entry["reference"]
        return Probe(
            commit,
            convert(entry["candidate"], LaunchFacts, str(self.path)),
            None if reference is None else convert(reference, LaunchFacts, str(self.path)),
            self._numbers[entry["before"]] if "before" in entry else None,
        )

    def _check_values(self, entry: dict[str, Any], where: str) -> None:
        if "commit" in entry and self._numbers.get(entry["commit"], 0) == 0:
            raise SpecError(f"{where}: $.commit: got {entry['commit']!r}, allowed is a commit of the search; {_REMEDY}")
        if entry.get("before") not in (None, *self._numbers):
            raise SpecError(f"{where}: $.before: got {entry['before']!r}, allowed is a commit of the search; {_REMEDY}")
        named = [*entry.get("suspects", ()), *(row["commit"] for row in entry.get("probed", ()))]
        if wrong := [number for number in named if number not in range(1, len(self._numbers))]:
            most = len(self._numbers) - 1
            raise SpecError(f"{where}: got {wrong[0]}, allowed is the number of a commit, 1 to {most}; {_REMEDY}")
        if entry.get("metric") not in (None, "", *METRICS):
            raise SpecError(f"{where}: $.metric: got {entry['metric']!r}, allowed is a metric; {_REMEDY}")


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


def _checked(line: str, where: str) -> dict[str, Any]:
    try:
        entry = parse_json(line, where)
    except UnreadableFile as error:
        raise SpecError(f"{error}; {_REMEDY}") from None
    kind = entry.get("kind") if isinstance(entry, dict) else None
    if kind not in _KINDS:
        raise SpecError(f"{where}: kind is {kind!r}, allowed is one of {', '.join(_KINDS)}; {_REMEDY}")
    problem = violation(entry, SCHEMA, kind)
    if kind == "probe" and problem is None:
        launches = [entry["candidate"], *([entry["reference"]] if entry["reference"] is not None else [])]
        problem = next(filter(None, map(_violation_of_launch, launches)), None)
    if problem is not None:
        raise SpecError(f"{where}: {problem}; {_REMEDY}")
    checked: dict[str, Any] = entry
    return checked


def _violation_of_launch(launch: dict[str, Any]) -> str | None:
    try:
        convert(launch, LaunchFacts, "launch")
    except UnreadableFile as error:
        return str(error)
    return None


def _request(entry: dict[str, Any]) -> SearchRequest:
    return SearchRequest(
        commits=tuple(entry["commits"]),
        pytest=tuple(entry["pytest"]),
        setup=tuple(tuple(command) for command in entry["setup"]),
        environments=entry["environments"],
        tolerances=entry["tolerances"],
        metric=entry["metric"],
    )


def _end(entry: dict[str, Any]) -> LoggedEnd:
    end = SearchEnd(
        outcome=SearchOutcome(entry["outcome"]),
        reason=entry["reason"],
        suspects=tuple(entry["suspects"]),
        probability=entry["probability"],
        metric=entry["metric"],
        change=entry["change"],
        low=entry["low"],
        high=entry["high"],
        num_confirming=entry.get("num_confirming", 0),
        probed=tuple(ProbedCommit(**row) for row in entry["probed"]),
        notes=tuple(entry["notes"]),
    )
    return LoggedEnd(entry["case"], end, tuple(entry["verdicts"]))


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
        if case not in [logged.case for logged in self.log.ends()]:
            self.log.add_end(case, end)
        if end.outcome is SearchOutcome.ABSENT:
            return Verdicts(case, end.verdicts)
        names = ", ".join(self.commits[number][:12] for number in end.suspects)
        raise ComparisonFailed(f"{case}: {end.outcome.value}: {end.reason or names}")

    def _end_failed(self, number: int, error: AortaError) -> LaunchError:
        side = "bad" if number else "good"
        return LaunchError(f"aorta bisect: the {side} commit {self.commits[number][:12]} does not start: {error}")
