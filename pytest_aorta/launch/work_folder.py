"""The folder that a script runs in: what the script writes there, and a copy without what runs wrote."""

import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePath

from pytest_aorta.common.errors import SpecError

# A copy is made for each launch, so it has to be small.
MAX_BYTES = 1 << 30
MAX_FILES = 50_000
# Folders that no script reads as its input: histories, caches, and packages that are installed elsewhere.
_LEFT_OUT = {".git", ".hg", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".tox", "__pycache__", "node_modules"}
_ENVIRONMENT = "pyvenv.cfg"


def files_of(root: Path, without: Collection[str] = ()) -> dict[str, tuple[int, int]]:
    """Return size and time of the last change of each file below ``root``, by its path from there.

    Args:
        root: The folder.
        without: Paths from ``root``, of files and of folders, that are left out.
    """
    return {str(path.relative_to(root)): (found.st_size, found.st_mtime_ns) for path, found in _walk(root, without)}


def changed(before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return the paths that are new or changed."""
    return [name for name, state in after.items() if before.get(name) != state]


def outermost(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the paths, with the outermost folder that holds no ``known`` file in place of the files below it."""
    folders = {str(parent) for name in known for parent in PurePath(name).parents} | {"."}
    return list(
        dict.fromkeys(
            next((str(folder) for folder in reversed(PurePath(name).parents) if str(folder) not in folders), name)
            for name in names
        )
    )


def copy_folder(root: Path, into: Path, without: Collection[str]) -> None:
    """Copy the files below ``root`` into the new folder ``into``, except ``without``; links stay links.

    Raises:
        SpecError: There are more files, or more bytes, than a launch may copy.
        OSError: A file can't be read or written.
    """
    into.mkdir(parents=True)
    num_bytes = num_files = 0
    for path, found in _walk(root, without):
        num_bytes, num_files = num_bytes + found.st_size, num_files + 1
        if num_bytes > MAX_BYTES or num_files > MAX_FILES:
            raise SpecError(
                f"fresh: {root} has more than {MAX_FILES:,} files or {MAX_BYTES >> 20:,} MiB, which a launch may copy; "
                f"add folders that the script does not need to fresh, or move data out of {root}"
            )
        copy = into / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy, follow_symlinks=False)


def _walk(root: Path, without: Collection[str]) -> Iterator[tuple[Path, os.stat_result]]:
    left_out = {PurePath(name) for name in without}
    for folder, folders, names in os.walk(root):
        here = Path(folder)
        at = here.relative_to(root)
        # A link to a folder is copied as a link.
        links = [name for name in folders if (here / name).is_symlink()]
        folders[:] = [
            name
            for name in sorted(folders)
            if name not in _LEFT_OUT
            and name not in links
            and at / name not in left_out
            and not (here / name / _ENVIRONMENT).exists()
        ]
        for name in sorted([*names, *links]):
            path = here / name
            with suppress(FileNotFoundError):  # another process has deleted it
                if at / name not in left_out and (path.is_symlink() or path.is_file()):
                    yield path, path.lstat()
