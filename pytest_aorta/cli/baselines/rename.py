"""``aorta baselines rename``: moves stored baselines to the new node id of a test."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_aorta.cli.baselines.find import StoredFile
from pytest_aorta.common.errors import BaselineError, UsageError
from pytest_aorta.common.text import counted
from pytest_aorta.verdict.baseline import Baseline, baseline_path, outside, write_baseline

_SEPARATOR = "::"
_MAX_MATCHES = 5


@dataclass(frozen=True)
class Renaming:
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


def renamings(files: Sequence[StoredFile], old: str, new: str, folder: Path) -> list[Renaming]:
    """Return the renamings of all baselines whose case is ``old`` or begins with it.

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
    found = [_renaming(file, old, new, folder) for file in matches]
    for renaming in found:
        if os.path.lexists(renaming.new_path):
            raise BaselineError(
                f"{renaming.new_path}: exists already, so nothing was renamed; delete the file or choose another NEW"
            )
    return found


def rename_files(found: Sequence[Renaming], folder: Path) -> None:
    """Write all new files, then delete the old ones. After an error the folder is as it was before.

    Raises:
        BaselineError: A file could not be written or deleted.
    """
    written: list[Path] = []
    deleted: list[Renaming] = []
    try:
        for renaming in found:
            written.append(write_baseline(folder, renaming.new))
        for renaming in found:
            renaming.old_path.unlink()
            deleted.append(renaming)
    except (BaselineError, OSError) as error:
        for renaming in deleted:
            write_baseline(folder, renaming.old)
        for path in written:
            path.unlink(missing_ok=True)
        raise BaselineError(f"nothing was renamed: {error}") from None


def _renaming(file: StoredFile, old: str, new: str, folder: Path) -> Renaming:
    baseline, path = file.baseline, Path(file.name)
    if path != baseline_path(folder, baseline.platform, baseline.case):
        raise BaselineError(
            f"{path}: the file name is not that of its case {baseline.case!r}, so nothing was renamed; "
            f"delete or rename the file"
        )
    if problem := outside(folder, path.parent):
        raise BaselineError(f"{path}: nothing was renamed: {problem}")
    case, label = new + baseline.case.removeprefix(old), baseline.case.removeprefix(baseline.test)
    # NEW contains a label of its own if OLD is a full case.
    test = case.removesuffix(label) if case.endswith(label) else case.rpartition(_SEPARATOR)[0]
    if _SEPARATOR not in test:
        raise UsageError(f"NEW {new!r}: the case {case!r} would have no test; give NEW the same parts as OLD")
    renamed = baseline.replace(case=case, test=test)
    return Renaming(path, baseline_path(folder, baseline.platform, case), baseline, renamed)


def _begins_with(case: str, old: str) -> bool:
    """Return True if ``old`` is a beginning of ``case`` that ends with a folder, file, class, test or label."""
    return case == old or case.startswith((f"{old}/", old + _SEPARATOR, f"{old}["))


def _similar(old: str, files: Sequence[StoredFile]) -> str:
    names = {name for file in files for name in (file.baseline.test.split(_SEPARATOR)[0], file.baseline.test)}
    names |= {file.baseline.case for file in files}
    matches = difflib.get_close_matches(old, sorted(names), n=_MAX_MATCHES)
    return "".join(["; similar are:", *(f"\n  {name}" for name in matches)]) if matches else ""
