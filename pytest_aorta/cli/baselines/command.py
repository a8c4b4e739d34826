"""``aorta baselines``: the arguments of its actions, and a function for each action."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pytest_aorta.cli.baselines.diff import diff_lines
from pytest_aorta.cli.baselines.find import file_or_blob, find_file, require_folder, stored_files
from pytest_aorta.cli.baselines.history import history_lines
from pytest_aorta.cli.baselines.prune import Pruning, prune
from pytest_aorta.cli.baselines.rename import rename_files, renamings
from pytest_aorta.cli.baselines.show import list_lines, show_lines
from pytest_aorta.common.text import counted, emit, output_width, printable
from pytest_aorta.verdict.baseline import locked_baselines

KEPT_LAUNCHES = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions and their arguments to ``parser``."""
    ways = parser.add_subparsers(metavar="ACTION", required=True)
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument(
        "--folder", type=Path, default=Path("baselines"), help="folder of the baselines (default: baselines)"
    )
    where.add_argument("--platform", help="only this platform, e.g. nvidia-h200-x8-nccl")
    listed = ways.add_parser("list", parents=[where], help="list all cases")
    listed.set_defaults(run=list_all)
    shown = ways.add_parser("show", parents=[where], help="show one baseline")
    shown.add_argument("name", metavar="PATH|CASE", help="file of the baseline, or an unambiguous part of its case")
    shown.set_defaults(run=show)
    compared = ways.add_parser("diff", help="show the differences between two baselines")
    compared.add_argument("first", metavar="A", help="a file, or REF:PATH, a file of a commit")
    compared.add_argument("second", metavar="B", help="the same")
    compared.set_defaults(run=diff)
    _add_rename(ways.add_parser("rename", parents=[where], help="move baselines to the new node id of a test"))
    changed = ways.add_parser("history", parents=[where], help="show change points over time; needs Apache Otava")
    changed.add_argument("name", metavar="PATH|CASE", help="as for show")
    changed.add_argument(
        "--metric", default="step_time_p50", help="metric to search for changes (default: step_time_p50)"
    )
    changed.set_defaults(run=history)
    _add_prune(
        ways.add_parser("prune", parents=[where], help="drop old launches, and files whose test file was deleted")
    )


def _add_rename(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", metavar="OLD", help="node id of a test, its file or folder, or a full case")
    parser.add_argument("new", metavar="NEW", help="the same part of the new node id")
    parser.add_argument("--dry-run", action="store_true", help="print what would be renamed, and change nothing")
    parser.set_defaults(run=rename)


def _add_prune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="print what would be done, and change nothing")
    parser.add_argument(
        "--keep",
        type=_count,
        default=KEPT_LAUNCHES,
        metavar="N",
        help=f"number of launches outside the center to keep in each file, the newest (default: {KEPT_LAUNCHES})",
    )
    parser.add_argument("--orphans", action="store_true", help="also delete files whose test file does not exist")
    parser.add_argument(
        "--rootdir", type=Path, default=Path(), help="pytest's root folder, for --orphans (default: the current folder)"
    )
    parser.set_defaults(run=thin_out)


def list_all(arguments: argparse.Namespace) -> int:
    """Run ``aorta baselines list``."""
    files, problems = stored_files(arguments.folder, arguments.platform)
    emit(list_lines(files, output_width()))
    return _report(problems)


def show(arguments: argparse.Namespace) -> int:
    """Run ``aorta baselines show``."""
    emit(show_lines(find_file(arguments.name, arguments.folder, arguments.platform), output_width()))
    return 0


def diff(arguments: argparse.Namespace) -> int:
    """Run ``aorta baselines diff``."""
    second = file_or_blob(arguments.second)
    first = file_or_blob(arguments.first, second.others)
    emit(diff_lines(first, second, output_width()))
    return 0


def history(arguments: argparse.Namespace) -> int:
    """Run ``aorta baselines history``."""
    file = find_file(arguments.name, arguments.folder, arguments.platform)
    emit(history_lines(file, arguments.metric, output_width()))
    return 0


def rename(arguments: argparse.Namespace) -> int:
    """Run ``aorta baselines rename``."""
    with _locked_unless_dry(arguments):
        files, problems = stored_files(arguments.folder, arguments.platform)
        if problems:
            return _report([*problems, "nothing was renamed, since an unreadable file may contain one of the cases"])
        found = renamings(files, arguments.old, arguments.new, arguments.folder)
        if not arguments.dry_run:
            rename_files(found, arguments.folder)
    verb = "would be renamed" if arguments.dry_run else "renamed"
    emit([*map(str, found), f"{len(found)} of {counted(len(files), 'baseline')} {verb}"])
    return 0


def thin_out(arguments: argparse.Namespace) -> int:
    """Run ``aorta baselines prune``."""
    rootdir = arguments.rootdir if arguments.orphans else None
    with _locked_unless_dry(arguments):
        files, problems = stored_files(arguments.folder, arguments.platform)
        done, failed = prune(files, Pruning(arguments.folder, arguments.keep, rootdir, arguments.dry_run))
    emit([*done, f"{len(done)} of {counted(len(files), 'file')} {'would change' if arguments.dry_run else 'changed'}"])
    return _report([*problems, *failed])


@contextmanager
def _locked_unless_dry(arguments: argparse.Namespace) -> Iterator[None]:
    """Hold the lock of ``--folder`` while files are read and written, so that no session writes in between."""
    require_folder(arguments.folder)
    if arguments.dry_run:
        yield
        return
    with locked_baselines(arguments.folder):
        yield


def _report(problems: Sequence[str]) -> int:
    """Print problems to stderr and return the exit code."""
    for problem in problems:
        print(f"aorta: {printable(problem)}", file=sys.stderr)
    return 1 if problems else 0


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed is an integer of 0 or more")
    return int(text)
