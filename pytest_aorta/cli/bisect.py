"""``aorta bisect``: starts the test as a search, follows its log, and prints the commit that was found."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pytest_aorta.cli import ExitCode, add_folder
from pytest_aorta.common.errors import AortaError, SpecError, UsageError
from pytest_aorta.common.files import locked, slug
from pytest_aorta.common.processes import terminable
from pytest_aorta.common.text import brief, counted, emit, table
from pytest_aorta.plan.reference import ENVIRONMENTS, cache_folder, commit_of, git, setup_program
from pytest_aorta.session.search import LOG_FILE, Event, SearchLog, SearchRequest, Skip
from pytest_aorta.verdict.commit_search import SearchEnd, SearchOutcome
from pytest_aorta.verdict.metrics import METRICS, metric_of, parse_tolerances
from pytest_aorta.verdict.verdicts import format_change

PLUGIN = "pytest_aorta.plugin.bisecting"
OUTPUT_FILE = "pytest.log"
LAUNCHES_FOLDER = "launches"
_POLL_S = 0.5
_END_S = 60.0
_MAX_OUTPUT_LINES = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    parser.usage = "aorta bisect [options] GOOD BAD -- NODE_ID [PYTEST OPTION ...]"
    parser.add_argument("good", metavar="GOOD", help="commit before the change")
    parser.add_argument("bad", metavar="BAD", help="commit with the change")
    parser.add_argument(
        "pytest", nargs="+", metavar="NODE_ID", help="after --: node id of one test, and options of pytest"
    )
    parser.add_argument(
        "--setup", metavar="COMMAND", action="append", default=[],
        help="program with arguments that prepares the worktree of each commit, in its root folder; may be repeated; "
        "{packages} is a folder that comes first on the search path of the commit's launches",
    )  # fmt: skip
    parser.add_argument(
        "--environments", metavar="DIR", type=Path, default=None,
        help="folder of prepared worktrees (default: pytest-aorta/environments in the user's cache)",
    )  # fmt: skip
    parser.add_argument("--metric", metavar="NAME", help="search this metric (default: the clearest change)")
    parser.add_argument(
        "--tolerance", metavar="METRIC=VALUE", action="append", default=[],
        help="tolerance instead of the test's, e.g. step_time_p50=1%% to search for a smaller change",
    )  # fmt: skip
    add_folder(parser, "results", "folder of the log and the launches")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Search, and print the commit; return 0 if one was found.

    Raises:
        UsageError: The command line is wrong; nothing was launched.
        AortaError: The search could not be carried out.
    """
    commits = _commits_between(Path.cwd(), arguments.good, arguments.bad)
    request = _request(arguments, commits)
    folder = arguments.results / "bisect" / _name(request)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / "lock", limit_s=0.0):
            return _search(folder, request, commits)
    except TimeoutError:
        raise AortaError(f"{folder}: another aorta bisect is at work on this search") from None
    except OSError as error:
        raise AortaError(f"{folder}: can't be written: {error.strerror or error}") from None


def _search(folder: Path, request: SearchRequest, commits: Sequence[Commit]) -> int:
    log = _log(folder / LOG_FILE, request)
    emit([f"{counted(len(commits) - 1, 'commit')} after {commits[0]}, up to {commits[-1]}", f"log: {log.path}"])
    if not _is_complete(log):
        _run_pytest(folder, request, commits)
        log = SearchLog.read(log.path)
    for case, end in log.ends().items():
        emit([f"{case}:", *_end_lines(end, commits)])
    is_found = any(end.outcome is SearchOutcome.FOUND for end in log.ends().values())
    return ExitCode.OK if is_found else ExitCode.PROBLEM


def _log(path: Path, request: SearchRequest) -> SearchLog:
    if not path.exists():
        return SearchLog.create(path, request)
    log = SearchLog.read(path)
    if log.request != request:
        raise AortaError(f"{path}: is the log of another search; delete the folder, or give another --results")
    return log


def _is_complete(log: SearchLog) -> bool:
    """Return True if a comparison's search has ended with a commit or undecided; then the test has ended too."""
    return any(end.outcome is not SearchOutcome.ABSENT for end in log.ends().values())


def _request(arguments: argparse.Namespace, commits: Sequence[Commit]) -> SearchRequest:
    tolerances = _tolerance_texts(arguments.tolerance)
    parse_tolerances(tolerances, "--tolerance")
    if arguments.metric is not None and arguments.metric not in METRICS:
        raise UsageError(f"--metric: got {arguments.metric!r}, allowed is one of {', '.join(METRICS)}")
    setup = tuple(_command(text) for text in arguments.setup)
    environments = (arguments.environments or cache_folder() / ENVIRONMENTS).absolute()
    checkout = Path(git(Path.cwd(), "rev-parse", "--show-toplevel"))
    if environments.resolve().is_relative_to(checkout.resolve()):
        raise UsageError(f"--environments: {environments} is inside of {checkout}; allowed is a folder outside of it")
    return SearchRequest(
        tuple(commit.hash for commit in commits),
        tuple(arguments.pytest),
        setup,
        str(environments),
        tolerances,
        arguments.metric,
    )


def _tolerance_texts(given: Sequence[str]) -> dict[str, str]:
    """Return metric -> text from values of ``--tolerance``.

    Raises:
        UsageError: A value is not METRIC=VALUE.
    """
    pairs = [text.partition("=") for text in given]
    if wrong := [text for text, (key, equals, _) in zip(given, pairs, strict=True) if not (key and equals)]:
        raise UsageError(f"--tolerance: got {wrong[0]!r}, allowed is METRIC=VALUE, e.g. step_time_p50=5%")
    return {key: value for key, _, value in pairs}


def _command(text: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"--setup: got {text!r}, allowed is a command, quoted as for a shell ({error})") from None
    if not words:
        raise UsageError("--setup: got an empty text, allowed is a program with its arguments")
    if setup_program(words) is None:
        raise UsageError(f"--setup: {words[0]!r} is not a program on the path; no shell runs the command")
    return words


def _name(request: SearchRequest) -> str:
    ends = f"{request.commits[0][:8]}-{request.commits[-1][:8]}"
    asked = [list(request.pytest), request.setup, request.tolerances, request.metric]
    return f"{ends}-{slug(json.dumps(asked), max_length=40)}"


def _run_pytest(folder: Path, request: SearchRequest, commits: Sequence[Commit]) -> None:
    """Run the test until its search ends, and print its probes.

    Raises:
        AortaError: pytest has ended before the search.
    """
    log, launches = folder / LOG_FILE, folder / LAUNCHES_FOLDER
    own = ["-rs", "-p", PLUGIN, f"--aorta-bisect={log.absolute()}", f"--aorta-results={launches.absolute()}"]
    shown = len(SearchLog.read(log).events())
    with running_pytest([*own, *request.pytest], folder) as process:
        changed_ns = log.stat().st_mtime_ns
        while process.poll() is None:
            time.sleep(_POLL_S)
            # Reading the log only after it has changed leaves the processors to the ranks.
            if (now_ns := log.stat().st_mtime_ns) != changed_ns:
                changed_ns = now_ns
                shown += _print_events(log, commits, shown)
    _print_events(log, commits, shown)
    finished = SearchLog.read(log)
    if not _is_complete(finished) and (process.returncode or not finished.ends()):
        raise ended_early("the search", folder)


@contextmanager
def running_pytest(arguments: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run pytest, with its output in a file of a folder, while the body runs."""
    with (folder / OUTPUT_FILE).open("wb") as output, terminable():
        # pytest runs in its own session, so Ctrl-C reaches it only once: as SIGTERM, when this process ends pytest.
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            _end(process)


def ended_early(before: str, folder: Path) -> AortaError:
    """Return the error that pytest has ended too early, with the end of its output."""
    path = folder / OUTPUT_FILE
    printed = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return AortaError(
        "\n".join([f"pytest ended before {before}:", *printed[-_MAX_OUTPUT_LINES:], f"all output: {path}"])
    )


def _print_events(path: Path, commits: Sequence[Commit], shown: int) -> int:
    """Print the events after the first ``shown`` and return their number."""
    events = SearchLog.read(path).events()[shown:]
    emit(_event_line(event, commits) for event in events)
    sys.stdout.flush()
    return len(events)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to pytest if it still runs, so that pytest removes its worktrees and ends its ranks."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


_MAX_SUBJECT = 50
_HEADS = ("commit", "launches", "change", "has the change", "")


def _event_line(event: Event, commits: Sequence[Commit]) -> str:
    """Return a line about a probe or a skipped commit."""
    commit = commits[event.commit]
    if isinstance(event, Skip):
        return f"  skipped {commit}: {event.reason}"
    if event.before is not None:
        return f"  pair with {commits[event.before].hash[:12]}: {commit}"
    kind = "pair with the good commit" if event.reference is not None else "launch"
    return f"  {kind}: {commit}"


def _end_lines(end: SearchEnd, commits: Sequence[Commit]) -> list[str]:
    """Return the result of a search, with the table of its probes."""
    rows = [
        (
            f"{commits[row.commit].hash[:12]} {brief(commits[row.commit].subject, _MAX_SUBJECT)}",
            str(row.launches),
            "-" if row.change is None else format_change(row.change, metric_of(end.metric).scale),
            f"{row.probability:.1%}",
            row.detail,
        )
        for row in end.probed
    ]
    shown = table([_HEADS, *rows], indent="  ") if rows else [f"  {verdict}" for verdict in end.verdicts]
    return [*_result(end, commits), *shown, *(f"  note: {note}" for note in end.notes)]


def _result(end: SearchEnd, commits: Sequence[Commit]) -> list[str]:
    if end.outcome is SearchOutcome.ABSENT:
        return [f"  not found: {end.reason}"]
    change = _change(end)
    if end.outcome is SearchOutcome.UNDECIDED:
        likeliest = [
            f"  likeliest, with probability {end.probability:.3g}: {commits[number]}" for number in end.suspects
        ]
        return [f"  undecided: {end.reason}", *likeliest]
    found = [commits[number] for number in end.suspects]
    if len(found) == 1:
        lines = [f"  found: {found[0]}", f"  {change}"]
        if len(found[0].parents) > 1:
            base, tip = (parent[:12] for parent in found[0].parents[:2])
            branch = f"$(git merge-base {base} {tip}) {tip}"
            lines.append(f"  this is a merge; to search its branch: aorta bisect {branch} ...")
        return lines
    first = f"  found: one of {counted(len(found), 'commit')}, of which only the last starts"
    return [first, *(f"    {commit}" for commit in found), f"  {change}"]


def _change(end: SearchEnd) -> str:
    """Return the metric, its change and the probability of the named commits."""
    probability = f"probability {min(end.probability, 0.9999):.2%}" + (" or more" if end.probability > 0.9999 else "")
    if end.change is None or end.low is None or end.high is None:
        return f"{end.metric} differs from that of the good commit; {probability}"
    if end.num_confirming:
        probability += f", confirmed in {counted(end.num_confirming, 'pair')} with the commit before"
    scale = metric_of(end.metric).scale
    low, high = (format_change(edge, scale) for edge in (end.low, end.high))
    return f"{end.metric} {format_change(end.change, scale)} [{low}, {high}]; {probability}"


_FIELDS = "%H%x00%P%x00%s"


@dataclass(frozen=True)
class Commit:
    """A commit.

    Attributes:
        hash: Full hash.
        parents: Full hashes of the parents, the first parent first.
        subject: First line of the message.
    """

    hash: str
    parents: tuple[str, ...]
    subject: str

    def __str__(self) -> str:
        """Return the short hash and the subject."""
        return f"{self.hash[:12]} {self.subject}".rstrip()


def _commits_between(folder: Path, good: str, bad: str) -> list[Commit]:
    """Return the commits from ``good`` to ``bad`` on the line of first parents.

    Each of these commits was the state of the branch at some time. Commits of merged branches are left out: they were
    based on older states, so they may lack a change that an earlier commit of the line introduced.

    Raises:
        UsageError: A name is not a commit, or ``good`` is not before ``bad`` on that line.
    """
    hashes = [_commit(folder, name, side) for name, side in ((good, "GOOD"), (bad, "BAD"))]
    if hashes[0] == hashes[1]:
        raise UsageError(f"GOOD and BAD are the same commit, {hashes[0][:12]}")
    line = _logged(folder, "--first-parent", "--reverse", f"{hashes[0]}..{hashes[1]}")
    if not line or line[0].parents[:1] != (hashes[0],):
        raise UsageError(
            f"GOOD ({good}) is not on the line of first parents of BAD ({bad}); "
            f"git log --first-parent {bad} lists the commits that can be GOOD"
        )
    return [*_logged(folder, "-1", hashes[0]), *line]


def _commit(folder: Path, name: str, side: str) -> str:
    if name.startswith("-"):
        raise UsageError(f"{side}: got {name!r}, allowed is a branch, tag or commit")
    try:
        return commit_of(folder, name)
    except SpecError as error:
        raise UsageError(f"{side}: {error}") from None


def _logged(folder: Path, *arguments: str) -> list[Commit]:
    # splitlines() would also split at other characters that a subject may contain.
    rows = git(folder, "log", "--no-show-signature", f"--format={_FIELDS}", *arguments).split("\n")
    fields = (row.split("\0") for row in rows if row)
    return [Commit(name, tuple(parents.split()), subject) for name, parents, subject in fields]
