"""``aorta history``: new change points of what --aorta-history has kept, and a page that draws it."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from pytest_aorta.cli.exit_codes import ExitCode, report_problems
from pytest_aorta.cli.history_changes import CaseHistory, case_histories, change_lines, new_changes, of_branch
from pytest_aorta.common.errors import AortaError, UsageError
from pytest_aorta.common.files import write_text
from pytest_aorta.common.text import emit, output_width
from pytest_aorta.session.history import read_history

_PACKAGES = ("jinja2", "otava")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions and their arguments to ``parser``."""
    ways = parser.add_subparsers(metavar="ACTION", required=True)
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument("folder", type=Path, metavar="DIR", help="folder of the history (pytest's --aorta-history)")
    where.add_argument("--branch", metavar="NAME", help="only this branch; HEAD for a detached head (the only one)")
    page = ways.add_parser("page", parents=[where], help="write one HTML page; needs Apache Otava and jinja2")
    page.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.html", help="file of the page")
    page.set_defaults(run=_write_page)
    changed = ways.add_parser("changes", parents=[where], help="exit with 1 if a metric has a new change point")
    changed.add_argument(
        "--since",
        metavar="COMMIT",
        help="change points are new if the versions measured until this commit do not show them (all but the newest)",
    )
    changed.set_defaults(run=_report_changes)


def _write_page(arguments: argparse.Namespace) -> int:
    """Run ``aorta history page``."""
    if lacking := [name for name in _PACKAGES if find_spec(name) is None]:
        raise UsageError(f"history page needs {' and '.join(lacking)}; run pip install 'pytest-aorta[history]'")
    from pytest_aorta.cli.history_page import render  # needs jinja2

    histories, problems = _read(arguments)
    try:
        write_text(arguments.output, render(histories))
    except OSError as error:
        raise AortaError(f"{arguments.output}: not written: {error.strerror or error}") from None
    emit([str(arguments.output)])
    return report_problems(problems)


def _report_changes(arguments: argparse.Namespace) -> int:
    """Run ``aorta history changes``; return 1 for a new change point or a line that can't be read."""
    histories, problems = _read(arguments)
    found = new_changes(histories, arguments.since)
    emit(change_lines(found, histories, output_width()))
    return max(report_problems(problems), ExitCode.PROBLEM if found else ExitCode.OK)


def _read(arguments: argparse.Namespace) -> tuple[list[CaseHistory], list[str]]:
    """Return the cases of the branch, and a line for each line of the history that can't be read."""
    entries, problems = read_history(arguments.folder)
    return case_histories(of_branch(entries, arguments.branch)), [f"left out: {problem}" for problem in problems]
