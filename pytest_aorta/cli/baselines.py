"""``aorta baselines``: rewrite stored baselines in their places, and add those that another job recorded."""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from pytest_aorta.cli import ExitCode, report_problems
from pytest_aorta.common.errors import BaselineError, UsageError
from pytest_aorta.common.text import emit
from pytest_aorta.session.baselines import change_lines
from pytest_aorta.verdict.baseline import Baseline, locked_baselines, read_baseline, read_baseline_file, write_baseline


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions and their arguments to ``parser``."""
    ways = parser.add_subparsers(metavar="ACTION", required=True)
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument("--folder", type=Path, default=Path("baselines"), help="folder (default: baselines)")
    upgraded = ways.add_parser(
        "upgrade",
        parents=[where],
        help="rewrite files of the version before, and move files to the place of their case",
    )
    upgraded.set_defaults(action=_upgrade)
    added = ways.add_parser("add", parents=[where], help="check the baselines of another folder and add them")
    added.add_argument("source", metavar="SOURCE", type=Path, help="folder of baselines that another job recorded")
    added.set_defaults(action=_add)


def run(arguments: argparse.Namespace) -> int:
    """Run the action."""
    return int(arguments.action(arguments))


def _upgrade(arguments: argparse.Namespace) -> int:
    """Run ``aorta baselines upgrade``; no stored case is overwritten by another file."""
    folder = _existing(arguments.folder)
    with locked_baselines(folder):
        paths = sorted(folder.glob("*/*.json"))
        found, problems = _read(paths, lambda path: read_baseline_file(path, upgrades=True))
        for path, baseline in found:
            place = baseline.path(folder)
            if path != place and os.path.lexists(place):
                problems.append(f"{path}: stays as it is, since {place}, the place of its case, exists already")
                continue
            emit([str(write_baseline(folder, baseline.condensed()))])
            if path != place:
                path.unlink()
    return report_problems(problems)


def _add(arguments: argparse.Namespace) -> int:
    """Run ``aorta baselines add``, which writes nothing if a file of SOURCE is not a baseline in its place."""
    source, folder = _existing(arguments.source), arguments.folder

    def checked(path: Path) -> Baseline:
        # Opening a link would follow it.
        if path.is_symlink() or not path.is_file():
            raise BaselineError(f"{path}: is not a regular file")
        baseline = read_baseline_file(path)
        if path != baseline.path(source):
            raise BaselineError(f"{path}: the baseline's place is {baseline.path(source)}")
        return baseline

    found, problems = _read(
        [path for path in sorted(source.rglob("*")) if path.is_symlink() or not path.is_dir()], checked
    )
    if problems:
        return report_problems([*problems, "nothing was added"])
    lines: list[str] = []
    with locked_baselines(folder):
        for _, new in found:
            old = read_baseline(folder, new.platform, new.case)
            if new != old:
                write_baseline(folder, new)
                lines += change_lines(old, new)
    has = f"{folder} has every baseline of {source}" if found else f"{source} has no baseline"
    emit(lines or [f"nothing was added: {has}"])
    return ExitCode.OK


def _read(paths: Sequence[Path], read: Callable[[Path], Baseline]) -> tuple[list[tuple[Path, Baseline]], list[str]]:
    """Return the baselines in files, and a line for each unreadable file."""
    found, problems = [], []
    for path in paths:
        try:
            found.append((path, read(path)))
        except BaselineError as error:
            problems.append(str(error))
    return found, problems


def _existing(folder: Path) -> Path:
    """Return a folder of baselines.

    Raises:
        UsageError: It does not exist.
    """
    if not folder.is_dir():
        raise UsageError(
            f"{folder}: there is no such folder of baselines; name it with --folder, or record baselines with "
            f"pytest --update-baselines"
        )
    return folder
