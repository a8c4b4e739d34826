"""``aorta history``: the arguments of its actions, and a function for each action."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from pytest_aorta.cli.exit_codes import ExitCode
from pytest_aorta.cli.history.changes import change_lines, new_changes
from pytest_aorta.cli.history.export import openmetrics, write_otava
from pytest_aorta.cli.history.links import checked_template, remote_template
from pytest_aorta.cli.history.series import case_histories, of_branch
from pytest_aorta.common.errors import AortaError, UsageError
from pytest_aorta.common.files import write_text
from pytest_aorta.common.text import emit, output_width, printable
from pytest_aorta.session.history.entries import read_history

_PACKAGES = ("jinja2", "otava")
_OTAVA, _OPENMETRICS = "otava", "openmetrics"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions and their arguments to ``parser``."""
    ways = parser.add_subparsers(metavar="ACTION", required=True)
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument("folder", type=Path, metavar="DIR", help="folder of the history (pytest's --aorta-history)")
    where.add_argument("--branch", metavar="NAME", help="only this branch; HEAD for a detached head (the only one)")
    site = ways.add_parser("site", parents=[where], help="write static pages; needs Apache Otava and jinja2")
    site.add_argument("-o", "--output", type=Path, required=True, metavar="SITE", help="folder of the pages")
    site.add_argument(
        "--commit-url",
        metavar="URL",
        help="address of a commit, with {commit} for its hash (from the remote origin of this folder's repository)",
    )
    site.set_defaults(run=write_pages)
    changed = ways.add_parser("changes", parents=[where], help="exit with 1 if a metric has a new change point")
    changed.add_argument(
        "--since",
        metavar="COMMIT",
        help="change points are new if the versions measured until this commit do not show them (all but the newest)",
    )
    changed.set_defaults(run=report_changes)
    exported = ways.add_parser("export", parents=[where], help="write files for Apache Otava or Prometheus")
    exported.add_argument(
        "--format", choices=(_OTAVA, _OPENMETRICS), required=True, help="CSV files with Otava's configuration, or text"
    )
    exported.add_argument(
        "-o", "--output", type=Path, required=True, metavar="PATH", help="folder for otava, file for openmetrics"
    )
    exported.set_defaults(run=export)


def write_pages(arguments: argparse.Namespace) -> int:
    """Run ``aorta history site``."""
    if lacking := [name for name in _PACKAGES if find_spec(name) is None]:
        raise UsageError(f"history site needs {' and '.join(lacking)}; run pip install 'pytest-aorta[history]'")
    from pytest_aorta.cli.history.site.write import write_site  # needs jinja2

    given = arguments.commit_url
    template = remote_template(Path()) if given is None else checked_template(given)
    entries, problems = read_history(arguments.folder)
    histories = case_histories(of_branch(entries, arguments.branch))
    try:
        written = write_site(histories, arguments.output, template)
    except OSError as error:
        raise AortaError(f"{arguments.output}: not written: {error.strerror or error}") from None
    emit([str(written[0])])
    return _report(problems)


def report_changes(arguments: argparse.Namespace) -> int:
    """Run ``aorta history changes``; return 1 for a new change point or a line that can't be read."""
    entries, problems = read_history(arguments.folder)
    histories = case_histories(of_branch(entries, arguments.branch))
    found = new_changes(histories, arguments.since)
    emit(change_lines(found, histories, output_width()))
    return max(_report(problems), ExitCode.PROBLEM if found else ExitCode.OK)


def export(arguments: argparse.Namespace) -> int:
    """Run ``aorta history export``."""
    entries, problems = read_history(arguments.folder)
    try:
        if arguments.format == _OTAVA:
            written = write_otava(of_branch(entries, arguments.branch), arguments.output)
        else:
            chosen = entries if arguments.branch is None else of_branch(entries, arguments.branch)
            write_text(arguments.output, openmetrics(chosen))
            written = [arguments.output]
    except OSError as error:
        raise AortaError(f"{arguments.output}: not written: {error.strerror or error}") from None
    emit([str(written[0])])
    return _report(problems)


def _report(problems: Sequence[str]) -> int:
    """Print problems to stderr and return the exit code."""
    for problem in problems:
        print(f"aorta: left out: {printable(problem)}", file=sys.stderr)
    return ExitCode.PROBLEM if problems else ExitCode.OK
