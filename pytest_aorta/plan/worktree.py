"""A commit checked out beside the working tree under test, in a temporary folder, for as long as it is wanted."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.files import is_source_of
from pytest_aorta.common.programs import run_program

GIT_S = 60.0
# Filters may fetch large files while a tree is checked out.
CHECKOUT_S = 600.0
PREFIX = "aorta-ab-"
OWNER = "owner"
# Git sets them for its hooks; they would have it work on another repository than the folder's.
_SCRUBBED = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY"}
# Nothing of the user's runs at a checkout, and nothing goes on running after it.
_QUIET = ["core.hooksPath=/dev/null", "core.fsmonitor=false", "gc.auto=0", "maintenance.auto=false"]


@dataclass(frozen=True)
class Worktree:
    """A commit's files.

    Attributes:
        checkout: the working tree under test, as a whole.
        tree: the files of the commit.
        packages: an empty folder beside them.
    """

    checkout: Path
    commit: str
    tree: Path
    packages: Path

    def counterpart(self, path: Path) -> Path:
        """Where the commit has what is at ``path``; ``path`` itself where that is no source of the repository's."""
        if not is_source_of(self.checkout, path):
            return path
        return self.tree / path.resolve().relative_to(self.checkout)


@contextmanager
def open_worktree(folder: Path, ref: str) -> Iterator[Worktree]:
    """Check out ``ref`` of the repository that holds ``folder``; it is removed at the end.

    Raises:
        SpecError: there is no git, no repository or no such commit; with git's own words.
    """
    checkout = Path(git(folder, "rev-parse", "--show-toplevel"))
    commit = git(folder, "rev-parse", "--verify", f"{ref}^{{commit}}")
    _remove_abandoned(checkout)
    with _own_folder() as own:
        worktree = Worktree(checkout.resolve(), commit, own / "tree", own / "packages")
        worktree.packages.mkdir()
        try:
            git(checkout, "worktree", "add", "--detach", str(worktree.tree), commit, limit_s=CHECKOUT_S)
            yield worktree
        finally:
            _forget(checkout, worktree.tree)


def git(folder: Path, *arguments: str, limit_s: float = GIT_S) -> str:
    """What git says in ``folder``.

    Raises:
        SpecError: it is not installed, or fails.
    """
    program = shutil.which("git")
    if program is None:
        raise SpecError("git is not installed, or not on the path")
    environ = {name: value for name, value in os.environ.items() if name not in _SCRUBBED}
    settings = [part for setting in _QUIET for part in ("-c", setting)]
    argv = [program, "-C", str(folder), *settings, *arguments]
    status, output, complaint = run_program(argv, environ | {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"}, limit_s)
    if status:
        words = " ".join(complaint.split()) or f"exit code {status}"
        raise SpecError(f"git {' '.join(arguments[:2])} in {folder}: {words[-600:]}")
    return output.removesuffix("\n")


@contextmanager
def _own_folder() -> Iterator[Path]:
    """A temporary folder with a file in it that is locked for as long as this process wants the folder."""
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        with (folder / OWNER).open("wb") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX)
            yield folder


def _remove_abandoned(checkout: Path) -> None:
    """Remove the worktrees of sessions that were killed; `git worktree prune` keeps those whose folder is left."""
    for line in git(checkout, "worktree", "list", "--porcelain").splitlines():
        tree = Path(line.removeprefix("worktree "))
        if line.startswith("worktree ") and tree.parent.name.startswith(PREFIX) and _is_abandoned(tree.parent):
            _forget(checkout, tree)
            shutil.rmtree(tree.parent, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    try:
        with (folder / OWNER).open("rb") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError:  # somebody holds it, or it is another user's
        return False
    return True


def _forget(checkout: Path, tree: Path) -> None:
    # Where git can't, the next session takes it for abandoned. Twice: while git adds it, it is locked.
    with suppress(SpecError):
        git(checkout, "worktree", "remove", "--force", "--force", str(tree))
