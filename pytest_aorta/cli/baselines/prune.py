"""Thins stored baselines out: old launches that only tell the spread, and files whose test file is gone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_aorta.cli.baselines.find import StoredFile
from pytest_aorta.common.errors import AortaError, BaselineError, UsageError
from pytest_aorta.verdict.baseline import Baseline, baseline_path, has_test_file, write_baseline


@dataclass(frozen=True)
class Pruning:
    """What to do.

    Attributes:
        folder: of the baselines.
        keep: launches that are no anchor, the newest.
        rootdir: of pytest; None keeps files whose test is gone.
        dry_run: whether to tell only.
    """

    folder: Path
    keep: int
    rootdir: Path | None
    dry_run: bool


def prune(files: Sequence[StoredFile], pruning: Pruning) -> tuple[list[str], list[str]]:
    """Do it; returns what was done, and what could not be.

    Raises:
        UsageError: ``rootdir`` has the test file of none of them, so that it is hardly pytest's.
    """
    gone = _orphans(files, pruning.rootdir)
    done: list[str] = []
    problems: list[str] = []
    for file in files:
        try:
            done += _removed(file, pruning) if file in gone else _thinned(file, pruning)
        except AortaError as error:
            problems.append(str(error))
    return done, problems


def pruned(baseline: Baseline, keep: int) -> Baseline:
    """The baseline without launches that are no anchor, but for the newest ``keep``."""
    loose = [number for number, stored in enumerate(baseline.launches) if not stored.anchor]
    dropped = set(loose[: max(0, len(loose) - keep)])
    kept = tuple(stored for number, stored in enumerate(baseline.launches) if number not in dropped)
    epochs = {str(stored.epoch) for stored in kept}
    # Reasons belong to epochs that are there.
    forced = {epoch: reason for epoch, reason in baseline.forced.items() if epoch in epochs}
    return replace(baseline, launches=kept, forced=forced) if dropped else baseline


def _orphans(files: Sequence[StoredFile], rootdir: Path | None) -> list[StoredFile]:
    if rootdir is None:
        return []
    gone = [file for file in files if not has_test_file(file.baseline, rootdir)]
    if gone and len(gone) == len(files):
        raise UsageError(
            f"{rootdir} has the test file of none of the {len(files)} baselines, e.g. {gone[0].baseline.test}; "
            f"--rootdir names pytest's root folder. If all are to go, delete their folder"
        )
    return gone


def _removed(file: StoredFile, pruning: Pruning) -> list[str]:
    path = _own_path(file, pruning.folder)
    if not pruning.dry_run:
        try:
            path.unlink()
        except OSError as error:
            raise BaselineError(f"{path}: not deleted: {error.strerror or error}") from None
    return [f"{_verb('deleted', pruning)} {path}: {file.baseline.test} is gone"]


def _thinned(file: StoredFile, pruning: Pruning) -> list[str]:
    baseline = pruned(file.baseline, pruning.keep)
    count = len(file.baseline.launches) - len(baseline.launches)
    if not count:
        return []
    path = _own_path(file, pruning.folder)
    if not pruning.dry_run:
        write_baseline(pruning.folder, baseline)
    return [f"{_verb('dropped', pruning)} {count} of {len(file.baseline.launches)} launches of {path}"]


def _own_path(file: StoredFile, folder: Path) -> Path:
    """The file's path, which has to be that of its case, inside the folder."""
    path = Path(file.name)
    if path != baseline_path(folder, file.baseline.platform, file.baseline.case):
        raise BaselineError(f"{path}: left as it is: not the file name of its case {file.baseline.case!r}")
    if not Path(os.path.realpath(path.parent)).is_relative_to(os.path.realpath(folder)):
        raise BaselineError(f"{path}: left as it is: the platform's folder leads out of {folder}")
    return path


def _verb(verb: str, pruning: Pruning) -> str:
    return f"would have {verb}" if pruning.dry_run else verb
