"""The result files of ``aorta run``, ``<results>/<name>/trial_<number>.json``, each written atomically."""

from __future__ import annotations

from pathlib import Path

from pytest_aorta.common.errors import ResultError, UsageError
from pytest_aorta.common.files import write_json
from pytest_aorta.common.text import counted
from pytest_aorta.result.measurements import WorkloadResult

REFUSE, APPEND, OVERWRITE = "refuse", "append", "overwrite"


def trial_paths(folder: Path, count: int, existing: str) -> list[Path]:
    """Return the files of ``count`` trials.

    Args:
        folder: Folder of the trials.
        count: Number of trials.
        existing: Treatment of existing trials: ``refuse``, ``append`` with the next numbers, ``overwrite``.

    Raises:
        UsageError: Trials exist, and ``existing`` is ``refuse``.
    """
    present = sorted(_number(path) for path in folder.glob("trial_*.json") if _number(path) >= 0)
    if present and existing == REFUSE:
        raise UsageError(
            f"{folder} has {counted(len(present), 'trial')}, up to {folder / f'trial_{present[-1]}.json'}; --append "
            f"adds to them, --overwrite replaces trials of the same number, --results names another folder"
        )
    first = present[-1] + 1 if present and existing == APPEND else 0
    return [folder / f"trial_{number}.json" for number in range(first, first + count)]


def write_trial(path: Path, result: WorkloadResult, existing: str = OVERWRITE) -> Path:
    """Write a result and return its file.

    Only ``overwrite`` replaces a file. Otherwise the result gets the next free number if another `aorta run` has
    written this trial since :func:`trial_paths` chose it.

    Raises:
        ResultError: The file can't be written.
    """
    document = result.to_json()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if existing == OVERWRITE:
            write_json(path, document)
            return path
        path = _reserved(path)
        try:
            write_json(path, document)
        except BaseException:
            path.unlink()
            raise
    except OSError as error:
        raise ResultError(f"{path}: can't be written: {error.strerror or error}") from None
    return path


def _reserved(path: Path) -> Path:
    """Create an empty file, which no other process then uses, and return it: ``path``, or the next free number."""
    while True:
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            path = path.with_name(f"trial_{_number(path) + 1}.json")
        else:
            return path


def _number(path: Path) -> int:
    text = path.stem.removeprefix("trial_")
    return int(text) if text.isascii() and text.isdigit() else -1
