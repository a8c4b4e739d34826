"""Finds stored baselines: all of a folder, one by its path or its case, one as it was in a commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_aorta.common.errors import BaselineError, SpecError, UsageError
from pytest_aorta.plan.worktree import git
from pytest_aorta.verdict.baseline import Baseline, parse_baseline, read_baseline_file
from pytest_aorta.verdict.comparison import StoredComparison
from pytest_aorta.verdict.metrics import Metric
from pytest_aorta.verdict.priors import places, prior_spread
from pytest_aorta.verdict.statistics.variance import Level


@dataclass(frozen=True)
class StoredFile:
    """A baseline and where it was read; ``others`` are the platform's, which stand in for what it does not know."""

    name: str
    baseline: Baseline
    others: tuple[Baseline, ...]

    def level(self, metric: Metric) -> Level | None:
        """Centre and spread of a metric; None where a launch of the anchor has none, or none on its scale."""
        anchor = self.baseline.anchor
        if metric.direction == "exact" or None in places(metric, anchor, anchor):
            return None
        device = self.baseline.anchor[-1].device
        comparison = StoredComparison(
            self.baseline.case,
            self.baseline.config,
            self.baseline,
            marked={},
            priors=lambda asked: prior_spread(asked, device, self.others),
        )
        return comparison.level(metric)


def stored_files(folder: Path, platform: str | None) -> tuple[list[StoredFile], list[str]]:
    """The baselines of a folder, of one platform or of all, and why others can't be read.

    Raises:
        UsageError: the folder, or the platform in it, is not there.
    """
    places = _platform_folders(folder, platform)
    found: list[StoredFile] = []
    problems: list[str] = []
    for place in places:
        read, unreadable = _read_all(sorted(place.glob("*.json")))
        found += [_stored(str(path), read[path], list(read.values())) for path in read]
        problems += unreadable
    return found, problems


def stored_file(path: Path) -> StoredFile:
    """One file, with its neighbours.

    Raises:
        BaselineError: it is unreadable.
    """
    read, _ = _read_all([other for other in sorted(path.parent.glob("*.json")) if other.name != path.name])
    return _stored(str(path), read_baseline_file(path), list(read.values()))


def find_file(name: str, folder: Path, platform: str | None) -> StoredFile:
    """The baseline at a path, or the only one whose case contains ``name``.

    Raises:
        UsageError: none does, or several do.
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
        raise UsageError(f"{name!r} is in {len(chosen)} cases; give more of one, its path or --platform:{listed}")
    unread = f", {len(problems)} more can't be read" if problems else ""
    raise UsageError(f"{name!r} is no file, and in none of the {len(files)} cases of {folder}{unread}")


def file_or_blob(name: str, others: Sequence[Baseline] = ()) -> StoredFile:
    """A file, or ``REF:PATH``, a file as it is in a commit of the current folder's repository.

    Raises:
        UsageError: there is no such file, or git knows no such commit or path.
    """
    if Path(name).is_file():
        return stored_file(Path(name))
    ref, colon, path = name.partition(":")
    if not colon:
        raise UsageError(f"{name!r} is no file; a file of a commit is given as REF:PATH")
    if ref.startswith("-"):
        raise UsageError(f"{name!r}: a git ref does not begin with '-'")
    try:
        text = git(Path.cwd(), "cat-file", "blob", f"{ref}:{path}")
    except SpecError as error:
        raise UsageError(f"{name!r}: {error}; a PATH is from the repository's root, from here with ./") from None
    return _stored(name, parse_baseline(text, name), others)


def _stored(name: str, baseline: Baseline, others: Sequence[Baseline]) -> StoredFile:
    return StoredFile(
        name, baseline, tuple(o for o in others if o.case != baseline.case and o.platform == baseline.platform)
    )


def _platform_folders(folder: Path, platform: str | None) -> list[Path]:
    if not folder.is_dir():
        raise UsageError(f"there is no folder {str(folder)!r}; --folder names that of the baselines")
    places = sorted(path for path in folder.iterdir() if path.is_dir())
    chosen = [place for place in places if platform in (None, place.name)]
    if platform is not None and not chosen:
        raise UsageError(f"{folder} has no platform {platform!r}; there are {[place.name for place in places]}")
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
