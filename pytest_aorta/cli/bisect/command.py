"""``aorta bisect``: starts the test as a search, follows its log, and prints the commit that was found."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pytest_aorta.cli.bisect.history import Commit, commits_between
from pytest_aorta.cli.bisect.show import end_lines, event_line
from pytest_aorta.cli.exit_codes import ExitCode
from pytest_aorta.cli.run.config import tolerance_texts
from pytest_aorta.common.errors import AortaError, UsageError
from pytest_aorta.common.files import locked, slug
from pytest_aorta.common.signals import terminable
from pytest_aorta.common.text import counted, emit
from pytest_aorta.plan.worktree import ENVIRONMENTS, cache_folder, git, setup_program
from pytest_aorta.session.search.log import LOG_FILE, SearchLog, SearchRequest
from pytest_aorta.verdict.commit_search import SearchOutcome
from pytest_aorta.verdict.metrics import METRICS, parse_tolerances

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
    parser.add_argument(
        "--results", metavar="DIR", type=Path, default=Path("results"),
        help="folder of the log and the launches (default: results)",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Search, and print the commit; return 0 if one was found.

    Raises:
        UsageError: The command line is wrong; nothing was launched.
        AortaError: The search could not be carried out.
    """
    commits = commits_between(Path.cwd(), arguments.good, arguments.bad)
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
    ends = log.ends()
    for logged in ends:
        emit(end_lines(logged, commits))
    outcomes = {logged.end.outcome for logged in ends}
    return ExitCode.OK if SearchOutcome.FOUND in outcomes else ExitCode.PROBLEM


def _log(path: Path, request: SearchRequest) -> SearchLog:
    if not path.exists():
        return SearchLog.create(path, request)
    log = SearchLog.read(path)
    if log.request != request:
        raise AortaError(f"{path}: is the log of another search; delete the folder, or give another --results")
    return log


def _is_complete(log: SearchLog) -> bool:
    """Return True if a comparison's search has ended with a commit or undecided; then the test has ended too."""
    return any(logged.end.outcome is not SearchOutcome.ABSENT for logged in log.ends())


def _request(arguments: argparse.Namespace, commits: Sequence[Commit]) -> SearchRequest:
    tolerances = tolerance_texts(arguments.tolerance)
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
    argv = [sys.executable, "-m", "pytest", *own, *request.pytest]
    shown = len(SearchLog.read(log).all_events())
    with (folder / OUTPUT_FILE).open("wb") as output, terminable():
        # pytest runs in its own session, so Ctrl-C reaches it only once: as SIGTERM, when this process ends pytest.
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            changed_ns = log.stat().st_mtime_ns
            while process.poll() is None:
                time.sleep(_POLL_S)
                # Reading the log only after it has changed leaves the processors to the ranks.
                if (now_ns := log.stat().st_mtime_ns) != changed_ns:
                    changed_ns = now_ns
                    shown += _print_events(log, commits, shown)
        finally:
            _end(process)
    _print_events(log, commits, shown)
    finished = SearchLog.read(log)
    if not _is_complete(finished) and (process.returncode or not finished.ends()):
        raise AortaError("\n".join(["pytest ended before the search:", *_last_lines(folder / OUTPUT_FILE)]))


def _print_events(path: Path, commits: Sequence[Commit], shown: int) -> int:
    """Print the events after the first ``shown`` and return their number."""
    events = SearchLog.read(path).all_events()[shown:]
    emit(event_line(event, commits) for event in events)
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


def _last_lines(path: Path) -> Iterator[str]:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    yield from lines[-_MAX_OUTPUT_LINES:]
    yield f"all output: {path}"
