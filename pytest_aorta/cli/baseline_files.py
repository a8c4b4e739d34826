"""Stored baselines as files: all of a folder, one by its path or of a commit, and moves to a test's new node id."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_aorta.common.errors import BaselineError, SpecError, UsageError
from pytest_aorta.common.text import counted
from pytest_aorta.plan.reference import git
from pytest_aorta.verdict.baseline import (
    Baseline,
    baseline_path,
    outside,
    parse_baseline,
    read_baseline_file,
    write_baseline,
)
from pytest_aorta.verdict.comparison import StoredComparison
from pytest_aorta.verdict.metrics import Direction, Metric
from pytest_aorta.verdict.noise import StoredCase, prior_variance
from pytest_aorta.verdict.statistics.variance import Estimate

_SEPARATOR = "::"
_MAX_MATCHES = 5


@dataclass(frozen=True)
class StoredFile:
    """A baseline with the name of its file.

    ``others`` are the other baselines of the platform, from which the prior of the variance is taken.
    """

    name: str
    baseline: Baseline
    others: tuple[StoredCase, ...]

    def estimate(self, metric: Metric) -> Estimate | None:
        """Return the baseline estimate of a metric, or None if the baseline has none."""
        device = self.baseline.center_launches[-1].device
        comparison = StoredComparison(
            self.baseline.case,
            self.baseline.config,
            self.baseline,
            marked={},
            priors=lambda asked: prior_variance(asked, device, self.others),
        )
        return None if metric.direction is Direction.EXACT else comparison.estimate(metric)


def stored_files(folder: Path, platform: str | None) -> tuple[list[StoredFile], list[str]]:
    """Return a folder's baselines of one platform, or of all platforms, and a line for each unreadable file.

    Raises:
        UsageError: The folder does not exist, or has no such platform.
    """
    folders = _platform_folders(folder, platform)
    found: list[StoredFile] = []
    problems: list[str] = []
    for platform_folder in folders:
        read, unreadable = _read_all(sorted(platform_folder.glob("*.json")))
        cases = list(map(StoredCase, read.values()))
        found += [_stored(str(path), read[path], cases) for path in read]
        problems += unreadable
    return found, problems


def file_or_blob(name: str, others: Sequence[StoredCase] = ()) -> StoredFile:
    """Return a file, or with ``REF:PATH`` the file of a commit of the current folder's repository.

    Raises:
        UsageError: The file does not exist, or git finds no such commit or path.
    """
    if Path(name).is_file():
        return _stored_file(Path(name))
    ref, colon, path = name.partition(":")
    if not colon:
        raise UsageError(f"{name!r} is not a file; a file of a commit is given as REF:PATH")
    if ref.startswith("-"):
        raise UsageError(f"{name!r}: a git ref does not begin with '-'")
    try:
        text = git(Path.cwd(), "cat-file", "blob", f"{ref}:{path}")
    except SpecError as error:
        raise UsageError(
            f"{name!r}: {error}; PATH is relative to the repository's root, or to this folder if it starts with ./"
        ) from None
    return _stored(name, parse_baseline(text, name), others)


def require_folder(folder: Path) -> None:
    """Check the option ``--folder``.

    Raises:
        UsageError: The folder does not exist.
    """
    if not folder.is_dir():
        raise UsageError(
            f"{folder}: there is no such folder of baselines; name it with --folder, or record baselines with "
            f"pytest --update-baselines"
        )


@dataclass(frozen=True)
class Move:
    """A baseline and the same baseline under its new case.

    Attributes:
        old_path: The present file.
        new_path: The file to write.
        old: The stored baseline.
        new: The baseline with the new case and test.
    """

    old_path: Path
    new_path: Path
    old: Baseline
    new: Baseline

    def __str__(self) -> str:
        """Return one line for the output of the command."""
        return f"{self.old.platform}: {self.old.case} -> {self.new.case}"


def planned_moves(files: Sequence[StoredFile], old: str, new: str, folder: Path) -> list[Move]:
    """Return the moves of all baselines whose case is ``old`` or begins with it.

    ``old`` is a folder, a file, a class, a test or a full case; ``new`` is the same part of the new node id. All
    checks are made here, before any file is changed.

    Raises:
        UsageError: No case begins with ``old``, both names are equal, or a new case would have no test.
        BaselineError: A file of a new case exists already, or a file is not named after its case.
    """
    old, new = old.rstrip("/"), new.rstrip("/")
    if old == new:
        raise UsageError(f"OLD and NEW are both {old!r}")
    matches = [file for file in files if _begins_with(file.baseline.case, old)]
    if not matches:
        raise UsageError(f"OLD {old!r} matches none of {counted(len(files), 'case')} in {folder}{_similar(old, files)}")
    found = [_move(file, old, new, folder) for file in matches]
    for move in found:
        if os.path.lexists(move.new_path):
            raise BaselineError(
                f"{move.new_path}: exists already, so nothing was moved; delete the file or choose another NEW"
            )
    return found


def move_files(found: Sequence[Move], folder: Path) -> None:
    """Write all new files, then delete the old ones. After an error the folder is as it was before.

    Raises:
        BaselineError: A file could not be written or deleted.
    """
    written: list[Path] = []
    deleted: list[Move] = []
    try:
        for move in found:
            written.append(write_baseline(folder, move.new))
        for move in found:
            move.old_path.unlink()
            deleted.append(move)
    except (BaselineError, OSError) as error:
        for move in deleted:
            write_baseline(folder, move.old)
        for path in written:
            path.unlink(missing_ok=True)
        raise BaselineError(f"nothing was moved: {error}") from None


def _stored_file(path: Path) -> StoredFile:
    """Return one file together with the other baselines of its platform.

    Raises:
        BaselineError: The file is unreadable.
    """
    read, _ = _read_all([other for other in sorted(path.parent.glob("*.json")) if other.name != path.name])
    return _stored(str(path), read_baseline_file(path), list(map(StoredCase, read.values())))


def _stored(name: str, baseline: Baseline, cases: Sequence[StoredCase]) -> StoredFile:
    of_platform = (case for case in cases if case.baseline.platform == baseline.platform)
    return StoredFile(name, baseline, tuple(other for other in of_platform if other.baseline.case != baseline.case))


def _platform_folders(folder: Path, platform: str | None) -> list[Path]:
    require_folder(folder)
    folders = sorted(path for path in folder.iterdir() if path.is_dir())
    chosen = [path for path in folders if platform in (None, path.name)]
    if platform is not None and not chosen:
        raise UsageError(f"--platform {platform}: is not in {folder}; allowed are {[path.name for path in folders]}")
    return chosen


def _read_all(paths: Sequence[Path]) -> tuple[dict[Path, Baseline], list[str]]:
    read: dict[Path, Baseline] = {}
    problems = []
    for path in paths:
        try:
            read[path] = read_baseline_file(path)
        except BaselineError as error:
            problems.append(str(error))
    return read, problems


def _move(file: StoredFile, old: str, new: str, folder: Path) -> Move:
    baseline, path = file.baseline, Path(file.name)
    if path != baseline_path(folder, baseline.platform, baseline.case):
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
    moved = baseline.replace(case=case, test=test)
    return Move(path, baseline_path(folder, baseline.platform, case), baseline, moved)


def _begins_with(case: str, old: str) -> bool:
    """Return True if ``old`` is a beginning of ``case`` that ends with a folder, file, class, test or label."""
    return case == old or case.startswith((f"{old}/", old + _SEPARATOR, f"{old}["))


def _similar(old: str, files: Sequence[StoredFile]) -> str:
    names = {name for file in files for name in (file.baseline.test.split(_SEPARATOR)[0], file.baseline.test)}
    names |= {file.baseline.case for file in files}
    matches = difflib.get_close_matches(old, sorted(names), n=_MAX_MATCHES)
    return "".join(["; similar are:", *(f"\n  {name}" for name in matches)]) if matches else ""
