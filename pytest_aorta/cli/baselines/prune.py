"""``aorta baselines prune``: drops old launches outside the center, and files whose test file was deleted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_aorta.cli.baselines.find import StoredFile
from pytest_aorta.common.errors import AortaError, BaselineError, UsageError
from pytest_aorta.verdict.baseline import Baseline, baseline_path, has_test_file, outside, write_baseline


@dataclass(frozen=True)
class Pruning:
    """The arguments of a pruning.

    Attributes:
        folder: The folder of the baselines.
        keep: Number of launches outside the center to keep in each file, the newest ones.
        rootdir: pytest's root folder; None keeps files whose test file was deleted.
        dry_run: True to report what would be done without doing it.
    """

    folder: Path
    keep: int
    rootdir: Path | None
    dry_run: bool


def prune(files: Sequence[StoredFile], pruning: Pruning) -> tuple[list[str], list[str]]:
    """Prune the files and return two lists of lines: what was done, and what failed.

    Raises:
        UsageError: ``rootdir`` does not contain the test file of any baseline, so it is probably not pytest's root
            folder.
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
    """Return the baseline with only the newest ``keep`` launches outside the center."""
    loose = [number for number, stored in enumerate(baseline.launches) if not stored.center]
    dropped = set(loose[: max(0, len(loose) - keep)])
    kept = tuple(stored for number, stored in enumerate(baseline.launches) if number not in dropped)
    revisions = {str(stored.revision) for stored in kept}
    # A reason is kept as long as its revision has a launch.
    forced = {revision: reason for revision, reason in baseline.forced.items() if revision in revisions}
    return baseline.replace(launches=kept, forced=forced) if dropped else baseline


def _orphans(files: Sequence[StoredFile], rootdir: Path | None) -> list[StoredFile]:
    if rootdir is None:
        return []
    gone = [file for file in files if not has_test_file(file.baseline, rootdir)]
    if gone and len(gone) == len(files):
        raise UsageError(
            f"--rootdir {rootdir}: contains the test file of none of the {len(files)} baselines, e.g. "
            f"{gone[0].baseline.test}; give pytest's root folder, or delete the folder of the baselines to remove all"
        )
    return gone


def _removed(file: StoredFile, pruning: Pruning) -> list[str]:
    path = _own_path(file, pruning.folder)
    if not pruning.dry_run:
        try:
            path.unlink()
        except OSError as error:
            raise BaselineError(f"{path}: not deleted: {error.strerror or error}") from None
    return [f"{_verb('deleted', pruning)} {path}: the test file of {file.baseline.test} does not exist"]


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
    """Return the file's path after checking that it is the path of its case, inside the folder."""
    path = Path(file.name)
    if path != baseline_path(folder, file.baseline.platform, file.baseline.case):
        raise BaselineError(f"{path}: left unchanged: the file name is not that of its case {file.baseline.case!r}")
    if problem := outside(folder, path.parent):
        raise BaselineError(f"{path}: left unchanged: {problem}")
    return path


def _verb(verb: str, pruning: Pruning) -> str:
    return f"would have {verb}" if pruning.dry_run else verb
