"""Lookup of stored baselines: all of a folder, one by its path or its case, or one of a commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_aorta.common.errors import BaselineError, SpecError, UsageError
from pytest_aorta.common.text import counted
from pytest_aorta.plan.worktree import git
from pytest_aorta.verdict.baseline import Baseline, parse_baseline, read_baseline_file
from pytest_aorta.verdict.comparison import StoredComparison
from pytest_aorta.verdict.metrics import Direction, Metric
from pytest_aorta.verdict.noise import StoredCase, prior_variance
from pytest_aorta.verdict.statistics.variance import Estimate


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
        is_known = metric.direction is not Direction.EXACT and comparison.has_estimate(metric)
        return comparison.estimate(metric) if is_known else None


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


def stored_file(path: Path) -> StoredFile:
    """Return one file together with the other baselines of its platform.

    Raises:
        BaselineError: The file is unreadable.
    """
    read, _ = _read_all([other for other in sorted(path.parent.glob("*.json")) if other.name != path.name])
    return _stored(str(path), read_baseline_file(path), list(map(StoredCase, read.values())))


def find_file(name: str, folder: Path, platform: str | None) -> StoredFile:
    """Return the baseline at a path, or the only one whose case contains ``name``.

    Raises:
        UsageError: No case contains ``name``, or several do.
    """
    if Path(name).is_file():
        return stored_file(Path(name))
    files, problems = stored_files(folder, platform)
    matches = [file for file in files if name in file.baseline.case]
    exact = [file for file in matches if file.baseline.case == name]
    chosen = exact or matches
    if len(chosen) == 1:
        return chosen[0]
    if chosen:
        listed = "".join(f"\n  {file.name}: {file.baseline.case}" for file in chosen)
        raise UsageError(
            f"{name!r} matches {len(chosen)} cases; give a longer part, the path of the file or --platform:{listed}"
        )
    unread = f", {len(problems)} more can't be read" if problems else ""
    raise UsageError(f"{name!r} is not a file and not part of any of {counted(len(files), 'case')} in {folder}{unread}")


def file_or_blob(name: str, others: Sequence[StoredCase] = ()) -> StoredFile:
    """Return a file, or with ``REF:PATH`` the file of a commit of the current folder's repository.

    Raises:
        UsageError: The file does not exist, or git finds no such commit or path.
    """
    if Path(name).is_file():
        return stored_file(Path(name))
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


def _stored(name: str, baseline: Baseline, cases: Sequence[StoredCase]) -> StoredFile:
    of_platform = (case for case in cases if case.baseline.platform == baseline.platform)
    return StoredFile(name, baseline, tuple(other for other in of_platform if other.baseline.case != baseline.case))


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
