"""``aorta bisect``: runs a test as a search for the commit, packages, variables or release that changed a metric."""

import argparse
import os
import sys
from argparse import ArgumentTypeError
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_aorta.cli.pytest_run import run_pytest
from pytest_aorta.common.errors import SpecError, UsageError
from pytest_aorta.common.files import raised_as, temporary_folder, write_json
from pytest_aorta.common.model import to_builtins
from pytest_aorta.common.text import counted, emit
from pytest_aorta.plan.options import shell_words
from pytest_aorta.plan.reference import check_side, commit_of, first_parents, setup_program
from pytest_aorta.plan.side import SideSpec, Span, parse_side, parse_span
from pytest_aorta.session.axes import Over
from pytest_aorta.session.search import SearchRequest
from pytest_aorta.verdict.metrics import METRICS, parse_tolerances

# What of the sides may differ, by what is searched: each with what it is without.
_PARTS: dict[Over, dict[str, Any]] = {
    Over.COMMITS: {"commit": ""},
    Over.PACKAGES: {"python": "", "lock": "", "requirements": ()},
    Over.VARIABLES: {"variables": {}},
}
_ALLOWED_OVER = (
    "commits, packages or variables, which are to differ between GOOD and BAD; or NAME@GOOD..BAD, two releases of a "
    "package, or tags, branches or commits of its repository, which NAME@git+URL@GOOD..BAD names"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    parser.usage = (
        "aorta bisect [options] GOOD BAD -- NODE_ID [PYTEST OPTION ...]\n"
        "       aorta bisect [options] --over NAME@GOOD..BAD [SIDE] -- NODE_ID [PYTEST OPTION ...]"
    )
    sides = (
        "GOOD and BAD, the commits, or sides, before the change and with it; with --over NAME@GOOD..BAD, what both "
        "ends have beside the package"
    )
    parser.add_argument("sides", metavar="SIDE", nargs="*", type=parse_side, help=sides)
    over = f"what to search: {_ALLOWED_OVER} (default: %(default)s)"
    parser.add_argument("--over", metavar="KIND", type=_over, default=Over.COMMITS, help=over)
    parser.add_argument(
        "--setup",
        metavar="COMMAND",
        type=_command,
        action="append",
        default=[],
        help="program with arguments that prepares the worktree of each commit, in its root folder; may be repeated; "
        "{packages} is a folder that comes first on the search path of the commit's launches",
    )
    parser.add_argument(
        "--metric", metavar="NAME", choices=METRICS, help="search this metric (default: the clearest change)"
    )
    parser.add_argument(
        "--tolerance",
        metavar="METRIC=VALUE",
        type=_tolerance,
        action="append",
        default=[],
        help="tolerance instead of the test's, e.g. step_time_p50=1%% to search for a smaller change",
    )
    parser.add_argument(
        "--result",
        metavar="FILE",
        type=_new_file,
        help="write the commits, packages or variables that were found and the message as JSON; the exit code is that "
        "of pytest, so a search that finds something ends with 1",
    )


def run(arguments: argparse.Namespace) -> int:
    """Search, and return pytest's exit code: the test fails with what was found, and passes if the ends do not differ.

    Raises:
        UsageError: The command line is wrong; nothing was launched.
        AortaError: The search could not be carried out.
    """
    here, over = Path.cwd(), arguments.over
    given = [_checked(side, here) for side in arguments.sides]
    if isinstance(over, Span):
        allowed, ends = "at most one side beside --over NAME@GOOD..BAD", [*given, SideSpec("")][:1] * 2
        is_allowed = len(given) < 2
    else:
        allowed, ends = f"GOOD and BAD, which differ in {over} alone; see --over", given
        same = [replace(side, text="", **_PARTS[over]) for side in given]
        is_allowed = (
            len(given) == 2 and same[0] == same[1] and (over is not Over.COMMITS or all(side.commit for side in given))
        )
    if not is_allowed:
        raise UsageError(f"SIDE: got {[side.text for side in given]}, allowed is {allowed}")
    good, bad = ends
    tolerances = dict(arguments.tolerance)
    parse_tolerances(tolerances, "--tolerance")
    if over is Over.COMMITS:
        with raised_as(UsageError, f"GOOD ({good.text}): ", SpecError):
            commits = first_parents(here, good.commit, bad.commit)
        emit([f"{counted(len(commits), 'commit')} after {good.commit[:12]}, up to {bad.commit[:12]}"])
        sys.stdout.flush()
    search = SearchRequest((good, bad), tuple(arguments.setup), arguments.metric, over)
    with temporary_folder("aorta-bisect-") as folder:
        code, found = run_pytest(arguments.args, folder, shows_output=True, search=search, tolerances=tolerances)
    if arguments.result:
        write_json(arguments.result, to_builtins(found.search))
    return code


def _checked(side: SideSpec, here: Path) -> SideSpec:
    """Return a side of which everything exists, with the full hash of its commit."""
    with raised_as(UsageError, f"SIDE {side.text}: ", SpecError):
        check_side(side, here)
        return replace(side, commit=commit_of(here, side.commit)) if side.commit else side


def _over(text: str) -> Over | Span:
    over = Over(text) if text in [*Over] else parse_span(text)
    if over is None:
        raise ArgumentTypeError(f"got {text!r}, allowed is {_ALLOWED_OVER}")
    return over


def _tolerance(text: str) -> tuple[str, str]:
    metric, equals, value = text.partition("=")
    if not (metric and equals):
        raise ArgumentTypeError(f"got {text!r}, allowed is METRIC=VALUE, e.g. step_time_p50=5%")
    return metric, value


def _new_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise ArgumentTypeError(f"got {text!r}, allowed is a file in a folder that can be written")
    return path


def _command(text: str) -> tuple[str, ...]:
    words = tuple(shell_words(text))
    if not words:
        raise ArgumentTypeError("got an empty text, allowed is a program with its arguments")
    if setup_program(words) is None:
        raise ArgumentTypeError(f"{words[0]!r} is not a program on the path; no shell runs the command")
    return words
