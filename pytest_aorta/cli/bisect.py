"""``aorta bisect``: runs a test as a search for the commit that changed a metric."""

import argparse
import os
import shlex
import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from pytest_aorta.cli import ExitCode
from pytest_aorta.common.errors import AortaError, SpecError, UsageError
from pytest_aorta.common.files import raised_as
from pytest_aorta.common.model import to_json
from pytest_aorta.common.processes import start_apart, terminable
from pytest_aorta.common.text import counted, emit
from pytest_aorta.plan.reference import commit_of, first_parents, setup_program
from pytest_aorta.session.search import SearchRequest
from pytest_aorta.verdict.metrics import METRICS, parse_tolerances

PLUGIN = "pytest_aorta.plugin.bisecting"
OUTPUT_FILE = "pytest.log"
_END_S = 60.0
_MAX_OUTPUT_LINES = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    parser.usage = "aorta bisect [options] GOOD BAD -- NODE_ID [PYTEST OPTION ...]"
    parser.add_argument("good", metavar="GOOD", help="commit before the change")
    parser.add_argument("bad", metavar="BAD", help="commit with the change")
    parser.add_argument("pytest", nargs="+", metavar="NODE_ID", help="after --: one test, and options of pytest")
    parser.add_argument(
        "--setup", metavar="COMMAND", type=_command, action="append", default=[],
        help="program with arguments that prepares the worktree of each commit, in its root folder; may be repeated; "
        "{packages} is a folder that comes first on the search path of the commit's launches",
    )  # fmt: skip
    parser.add_argument("--metric", metavar="NAME", help="search this metric (default: the clearest change)")
    parser.add_argument(
        "--tolerance", metavar="METRIC=VALUE", type=_tolerance, action="append", default=[],
        help="tolerance instead of the test's, e.g. step_time_p50=1%% to search for a smaller change",
    )  # fmt: skip
    parser.add_argument(
        "--result", metavar="FILE", type=Path,
        help="write the commits that were found and the message as JSON; the exit code is that of pytest, so a search "
        "that finds a commit ends with 1",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Search, and return pytest's exit code: the test fails with the commit, and passes if the ends do not differ.

    Raises:
        UsageError: The command line is wrong; nothing was launched.
        AortaError: The search could not be carried out.
    """
    here = Path.cwd()
    good, bad = (_commit(here, name, side) for name, side in ((arguments.good, "GOOD"), (arguments.bad, "BAD")))
    with raised_as(UsageError, f"GOOD ({arguments.good}): ", SpecError):
        commits = first_parents(here, good, bad)
    tolerances = dict(arguments.tolerance)
    parse_tolerances(tolerances, "--tolerance")
    if arguments.metric is not None and arguments.metric not in METRICS:
        raise UsageError(f"--metric: got {arguments.metric!r}, allowed is one of {', '.join(METRICS)}")
    if arguments.result and (arguments.result.is_dir() or not os.access(arguments.result.absolute().parent, os.W_OK)):
        raise UsageError(f"--result: got {str(arguments.result)!r}, allowed is a file in a folder that can be written")
    result = str(arguments.result.absolute()) if arguments.result else ""
    request = SearchRequest((good, bad), tuple(arguments.setup), tolerances, arguments.metric, result)
    emit([f"{counted(len(commits), 'commit')} after {good[:12]}, up to {bad[:12]}"])
    sys.stdout.flush()
    with running_pytest(["-p", PLUGIN, f"--aorta-bisect={to_json(request)}", *arguments.pytest]) as process:
        process.wait()
    if process.returncode not in (ExitCode.OK, ExitCode.PROBLEM):
        raise AortaError(f"pytest ended before the search, with exit code {process.returncode}")
    return process.returncode


def _commit(folder: Path, name: str, side: str) -> str:
    if name.startswith("-"):
        raise UsageError(f"{side}: got {name!r}, allowed is a branch, tag or commit")
    with raised_as(UsageError, f"{side}: ", SpecError):
        return commit_of(folder, name)


def _tolerance(text: str) -> tuple[str, str]:
    metric, equals, value = text.partition("=")
    if not (metric and equals):
        raise ArgumentTypeError(f"got {text!r}, allowed is METRIC=VALUE, e.g. step_time_p50=5%")
    return metric, value


def _command(text: str) -> tuple[str, ...]:
    allowed = f"got {text!r}, allowed is a command, quoted as for a shell ("
    with raised_as(ArgumentTypeError, allowed, ValueError, ")"):
        words = tuple(shlex.split(text))
    if not words:
        raise ArgumentTypeError("got an empty text, allowed is a program with its arguments")
    if setup_program(words) is None:
        raise ArgumentTypeError(f"{words[0]!r} is not a program on the path; no shell runs the command")
    return words


@contextmanager
def running_pytest(
    arguments: Sequence[str], folder: Path | None = None, environ: Mapping[str, str] = os.environ
) -> Iterator[subprocess.Popen[bytes]]:
    """Run pytest while the body runs, with its output in a file of a folder if one is given."""
    with (folder / OUTPUT_FILE).open("wb") if folder else nullcontext() as output, terminable():
        # Ctrl-C reaches pytest only once: as SIGTERM, when this process ends pytest.
        process = start_apart([sys.executable, "-m", "pytest", *arguments], output, environ)
        try:
            yield process
        finally:
            _end(process)


def ended_early(before: str, folder: Path) -> AortaError:
    """Return the error that pytest has ended too early, with the end of its output."""
    lines = [f"pytest ended before {before}:", *end_of_output(folder), f"all output: {folder / OUTPUT_FILE}"]
    return AortaError("\n".join(lines))


def end_of_output(folder: Path) -> list[str]:
    """Return the last lines that pytest has printed."""
    return (folder / OUTPUT_FILE).read_text(encoding="utf-8", errors="replace").splitlines()[-_MAX_OUTPUT_LINES:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to pytest if it still runs, so that pytest removes its worktrees and ends its ranks."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
