"""``aorta baselines``: list and move stored baselines, and add those that another job recorded."""

import argparse
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TypeAlias

from pytest_aorta.cli import ExitCode, report_problems
from pytest_aorta.common.errors import BaselineError, UsageError
from pytest_aorta.common.files import raised_as
from pytest_aorta.common.text import counted, did_you_mean, emit, output_width, table
from pytest_aorta.session.baselines import change_lines
from pytest_aorta.verdict.baseline import (
    Baseline,
    locked_baselines,
    outside,
    read_baseline,
    read_baseline_file,
    write_baseline,
)
from pytest_aorta.verdict.metrics import METRICS, format_value, middle
from pytest_aorta.verdict.noise import blocks

_HEADLINE = METRICS["step_time_p50"]
_LIST_COLUMNS = ("platform", "case", "baseline", "used/all", "sessions", "recorded", _HEADLINE.name)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions and their arguments to ``parser``."""
    ways = parser.add_subparsers(metavar="ACTION", required=True)
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument("--folder", type=Path, default=Path("baselines"), help="folder (default: baselines)")
    where.add_argument("--platform", help="only this platform, e.g. nvidia-h200-x8-nccl")
    listed = ways.add_parser("list", parents=[where], help="list all cases")
    listed.set_defaults(run=_list_all)
    moved = ways.add_parser("move", parents=[where], help="move baselines to the new node id of a test")
    moved.add_argument("old", metavar="OLD", help="node id of a test, its file or folder, or a full case")
    moved.add_argument("new", metavar="NEW", help="the same part of the new node id")
    moved.add_argument("--dry-run", action="store_true", help="print what would be moved, and change nothing")
    moved.set_defaults(run=_move)
    upgraded = ways.add_parser("upgrade", parents=[where], help="rewrite files of the version before")
    upgraded.set_defaults(run=_upgrade)
    added = ways.add_parser("add", parents=[where], help="check the baselines of another folder and add them")
    added.add_argument("source", metavar="SOURCE", type=Path, help="folder of baselines that another job recorded")
    added.set_defaults(run=_add)


def _list_all(arguments: argparse.Namespace) -> int:
    """Run ``aorta baselines list``."""
    files, problems = _stored_files(arguments.folder, arguments.platform)
    emit(_list_lines(list(files.values()), output_width()))
    return report_problems(problems)


def _move(arguments: argparse.Namespace) -> int:
    """Run ``aorta baselines move``."""
    _require_folder(arguments.folder)
    # No session may write between the reading and the writing of files.
    with nullcontext() if arguments.dry_run else locked_baselines(arguments.folder):
        files, problems = _stored_files(arguments.folder, arguments.platform)
        if problems:
            problems.append("nothing was moved, since an unreadable file may contain one of the cases")
            return report_problems(problems)
        found = _planned_moves(files, arguments.old, arguments.new, arguments.folder)
        if not arguments.dry_run:
            _move_files(found, arguments.folder)
    verb = "would be moved" if arguments.dry_run else "moved"
    lines = [f"{new.platform}: {files[path].case} -> {new.case}" for path, new in found.items()]
    emit([*lines, f"{len(found)} of {counted(len(files), 'baseline')} {verb}"])
    return 0


def _add(arguments: argparse.Namespace) -> int:
    """Run ``aorta baselines add``, which writes nothing if a file of SOURCE is not a baseline in its place."""
    source, folder = arguments.source, arguments.folder
    _require_folder(source)
    found, problems = [], []
    for path in (path for path in sorted(source.rglob("*")) if path.is_symlink() or not path.is_dir()):
        try:
            # Opening a link would follow it.
            if path.is_symlink() or not path.is_file():
                raise BaselineError(f"{path}: is not a regular file")
            baseline = read_baseline_file(path)
            if path != baseline.path(source):
                raise BaselineError(f"{path}: the baseline's place is {baseline.path(source)}")
            if arguments.platform in (None, baseline.platform):
                found.append(baseline)
        except BaselineError as error:
            problems.append(str(error))
    if problems:
        return report_problems([*problems, "nothing was added"])
    lines: list[str] = []
    with locked_baselines(folder):
        for new in found:
            old = read_baseline(folder, new.platform, new.case)
            if new != old:
                write_baseline(folder, new)
                lines += change_lines(old, new)
    emit(lines or [f"nothing was added: {folder} has every baseline of {source}"])
    return ExitCode.OK


def _upgrade(arguments: argparse.Namespace) -> int:
    """Run ``aorta baselines upgrade``."""
    _require_folder(arguments.folder)
    with locked_baselines(arguments.folder):
        files, problems = _stored_files(arguments.folder, arguments.platform, upgrades=True)
        emit(str(write_baseline(arguments.folder, baseline.condensed())) for baseline in files.values())
    return report_problems(problems)


def _list_lines(baselines: Sequence[Baseline], width: int) -> list[str]:
    """Return a table with one line per case, followed by the totals."""
    rows = list(map(_list_row, baselines))
    lines = table([_LIST_COLUMNS, *rows], width, flexible=1) if rows else []
    num_launches = sum(len(baseline.launches) for baseline in baselines)
    platforms = {baseline.platform for baseline in baselines}
    return [
        *lines,
        f"{counted(len(rows), 'case')} on {counted(len(platforms), 'platform')}, {counted(num_launches, 'launch')}",
    ]


def _list_row(baseline: Baseline) -> tuple[str, ...]:
    center, launches = baseline.center_launches, [stored.facts for stored in baseline.launches]
    days = sorted({facts.provenance.measured_at[:10] for facts in launches})
    recorded = f"{days[0]} to {days[-1]}" if len(days) > 1 else days[0]
    used, sessions = f"{len(center)}/{len(launches)}", str(len(set(blocks(launches))))
    value = format_value(middle(_HEADLINE, center), _HEADLINE.unit)
    return baseline.platform, baseline.case, str(baseline.revision), used, sessions, recorded, value


_SEPARATOR = "::"


def _stored_files(
    folder: Path, platform: str | None, *, upgrades: bool = False
) -> tuple[dict[Path, Baseline], list[str]]:
    """Return a folder's baselines of one platform, or of all platforms, and a line for each unreadable file.

    Raises:
        UsageError: The folder does not exist, or has no such platform.
    """
    _require_folder(folder)
    folders = sorted(path for path in folder.iterdir() if path.is_dir())
    chosen = [path for path in folders if platform in (None, path.name)]
    if platform is not None and not chosen:
        raise UsageError(f"--platform {platform}: is not in {folder}; allowed are {[path.name for path in folders]}")
    found: dict[Path, Baseline] = {}
    problems = []
    for path in (path for platform_folder in chosen for path in sorted(platform_folder.glob("*.json"))):
        try:
            found[path] = read_baseline_file(path, upgrades=upgrades)
        except BaselineError as error:
            problems.append(str(error))
    return found, problems


def _require_folder(folder: Path) -> None:
    """Check the option ``--folder``.

    Raises:
        UsageError: The folder does not exist.
    """
    if not folder.is_dir():
        raise UsageError(
            f"{folder}: there is no such folder of baselines; name it with --folder, or record baselines with "
            f"pytest --update-baselines"
        )


_Moves: TypeAlias = dict[Path, Baseline]


def _planned_moves(files: Mapping[Path, Baseline], old: str, new: str, folder: Path) -> _Moves:
    """Return each baseline whose case is ``old`` or begins with it, and the baseline with the new case and test.

    ``old`` is a folder, a file, a class, a test or a full case; ``new`` is the same part of the new node id. All
    checks are made here, before any file is changed.

    Raises:
        UsageError: No case begins with ``old``, both names are equal, or a new case would have no test.
        BaselineError: A file of a new case exists already, or a file is not named after its case.
    """
    old, new = old.rstrip("/"), new.rstrip("/")
    if old == new:
        raise UsageError(f"OLD and NEW are both {old!r}")
    matches = {path: baseline for path, baseline in files.items() if _begins_with(baseline.case, old)}
    if not matches:
        known = sorted({name for baseline in files.values() for name in (baseline.test, baseline.case)})
        hint = did_you_mean([old], known)
        raise UsageError(f"OLD {old!r} matches none of {counted(len(files), 'case')} in {folder}{hint}")
    found = {path: _moved(path, baseline, old, new, folder) for path, baseline in matches.items()}
    for moved in found.values():
        path = moved.path(folder)
        if os.path.lexists(path):
            raise BaselineError(f"{path}: exists already, so nothing was moved; delete the file or choose another NEW")
    return found


def _move_files(found: _Moves, folder: Path) -> None:
    """Write all new files, then delete the old ones.

    Raises:
        BaselineError: A file could not be written or deleted; the message says what git can undo.
    """
    after = f"; git status shows which files of {folder} are new"
    with raised_as(BaselineError, "moved in part: ", (BaselineError, OSError), after):
        for moved in found.values():
            write_baseline(folder, moved)
        for path in found:
            path.unlink()


def _moved(path: Path, baseline: Baseline, old: str, new: str, folder: Path) -> Baseline:
    if path != baseline.path(folder):
        raise BaselineError(
            f"{path}: the file name is not that of its case {baseline.case!r}, so nothing was moved; "
            f"delete or rename the file"
        )
    if problem := outside(folder, path.parent):
        raise BaselineError(f"{path}: nothing was moved: {problem}")
    case, label = new + baseline.case.removeprefix(old), baseline.case.removeprefix(baseline.test)
    # NEW contains a label of its own if OLD is a full case.
    test = case.removesuffix(label) if case.endswith(label) else case.rpartition(_SEPARATOR)[0]
    if _SEPARATOR not in test:
        raise UsageError(f"NEW {new!r}: the case {case!r} would have no test; give NEW the same parts as OLD")
    return baseline.replace(case=case, test=test)


def _begins_with(case: str, old: str) -> bool:
    """Return True if ``old`` is a beginning of ``case`` that ends with a folder, file, class, test or label."""
    return case == old or case.startswith((f"{old}/", old + _SEPARATOR, f"{old}["))
