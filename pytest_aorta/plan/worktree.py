"""Git worktrees: a commit checked out in a folder of its own, for one session or also for later sessions."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.files import is_source_of, locked
from pytest_aorta.common.programs import run_program
from pytest_aorta.common.signals import uninterrupted
from pytest_aorta.common.text import did_you_mean

GIT_S = 60.0
# Git filters may download large files during a checkout.
CHECKOUT_S = 600.0
PREFIX = "aorta-ab-"
# Entries of a session's folder: a locked file, the files of the commit, and links to packages.
OWNER, TREE, PACKAGES = "owner", "tree", "packages"
# Held in the repository's git folder during each git command that lists or changes worktrees.
LOCK_FILE = "aorta-worktrees.lock"
# Git sets these variables for its hooks; with them, git would use a repository other than the folder's.
_SCRUBBED = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY"}
# A checkout runs no hooks or monitors of the user, and starts no background maintenance.
_QUIET = ["core.hooksPath=/dev/null", "core.fsmonitor=false", "gc.auto=0", "maintenance.auto=false"]


@dataclass(frozen=True)
class Worktree:
    """The files of a commit.

    Attributes:
        checkout: Root of the working tree under test.
        commit: Full hash of the commit.
        tree: Folder with the files of the commit.
        packages: Empty folder beside ``tree``.
    """

    checkout: Path
    commit: str
    tree: Path
    packages: Path

    def counterpart(self, path: Path) -> Path:
        """Return the commit's version of ``path``, or ``path`` itself if it is not a source file of the repository."""
        if not is_source_of(self.checkout, path):
            return path
        return self.tree / path.resolve().relative_to(self.checkout)


@contextmanager
def open_worktree(folder: Path, ref: str) -> Iterator[Worktree]:
    """Check out ``ref`` of the repository that contains ``folder``, and remove the worktree at the end.

    Raises:
        SpecError: Git, the repository or the commit does not exist; the message contains git's output.
    """
    checkout = Path(git(folder, "rev-parse", "--show-toplevel"))
    commit = commit_of(folder, ref)
    _remove_abandoned(checkout)
    with _own_folder() as own:
        worktree = Worktree(checkout.resolve(), commit, own / TREE, own / PACKAGES)
        worktree.packages.mkdir()
        try:
            _check_out(checkout, worktree)
            yield worktree
        finally:
            with uninterrupted():
                _forget(checkout, worktree.tree)


def keep_worktree(folder: Path, commit: str, own: Path, *, anew: bool) -> Worktree:
    """Check out ``commit`` of the repository that contains ``folder`` below ``own``, where the worktree remains.

    A worktree that already exists there is used as it is, or replaced if ``anew`` is true.

    Raises:
        SpecError: Git, the repository or the commit does not exist; the message contains git's output.
        OSError: A folder can't be written.
    """
    checkout = Path(git(folder, "rev-parse", "--show-toplevel"))
    worktree = Worktree(checkout.resolve(), commit, own.resolve() / TREE, own.resolve() / PACKAGES)
    if anew or not worktree.tree.is_dir():
        _forget(checkout, worktree.tree)
        shutil.rmtree(own, ignore_errors=True)
        worktree.packages.mkdir(parents=True)
        _worktree(checkout, "prune")
        _check_out(checkout, worktree)
    return worktree


def commit_of(folder: Path, ref: str) -> str:
    """Return the full hash of the commit that ``ref`` names in the repository that contains ``folder``.

    Raises:
        SpecError: Git, the repository or the commit does not exist; the message says how to fetch a commit.
    """
    try:
        return git(folder, "rev-parse", "--verify", f"{ref}^{{commit}}")
    except SpecError:
        # Outside a repository this command fails too, and its message says so.
        shallow = ", which is shallow" * (git(folder, "rev-parse", "--is-shallow-repository") == "true")
        names = git(folder, "for-each-ref", "--format=%(refname:short)").split("\n")
        raise SpecError(
            f"{ref!r} is not a commit of this clone{shallow}{did_you_mean([ref], names)}; if it exists elsewhere, "
            f"fetch it first: git fetch, or fetch-depth: 0 in the checkout of CI"
        ) from None


def git(folder: Path, *arguments: str, limit_s: float = GIT_S) -> str:
    """Return the output of a git command in ``folder``.

    Raises:
        SpecError: Git is not installed, or the command fails or takes longer than ``limit_s`` seconds.
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


def _check_out(checkout: Path, worktree: Worktree) -> None:
    """Create the worktree, then its files, which can take minutes and does not need the lock of other sessions."""
    _worktree(checkout, "add", "--no-checkout", "--detach", str(worktree.tree), worktree.commit)
    git(worktree.tree, "reset", "--hard", "--no-recurse-submodules", limit_s=CHECKOUT_S)


def _worktree(checkout: Path, *arguments: str) -> str:
    """Return the output of ``git worktree``, which no other session runs in this repository at the same time.

    Git reads the entry of every worktree, and fails on an entry that another git is creating or removing.

    Raises:
        SpecError: As in :func:`git`, or the repository can't be locked.
    """
    lock = checkout / git(checkout, "rev-parse", "--git-common-dir") / LOCK_FILE
    with ExitStack() as held:
        try:
            held.enter_context(locked(lock, limit_s=CHECKOUT_S))
        except OSError as error:
            raise SpecError(f"{lock}: can't be locked: {error.strerror or error}") from None
        return git(checkout, "worktree", *arguments)


@contextmanager
def _own_folder() -> Iterator[Path]:
    """Yield a temporary folder, with a file in it that stays locked while this process uses the folder."""
    stack = ExitStack()
    try:
        with uninterrupted():
            folder = _new_folder(stack)
        yield folder
    finally:
        with uninterrupted():
            stack.close()


def _new_folder(stack: ExitStack) -> Path:
    while True:
        made = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
        folder = Path(stack.enter_context(made)).resolve()
        # Before the file is locked, another session takes the folder for abandoned and deletes it.
        with suppress(FileNotFoundError):
            stack.enter_context(locked(folder / OWNER))
            return folder


def _remove_abandoned(checkout: Path) -> None:
    """Remove worktrees of killed sessions, and folders of sessions killed before git listed their worktree."""
    # `git worktree prune` would keep a worktree whose folder still exists.
    for line in _worktree(checkout, "list", "--porcelain").splitlines():
        tree = Path(line.removeprefix("worktree "))
        if line.startswith("worktree ") and tree.parent.name.startswith(PREFIX) and _removed(tree.parent):
            _forget(checkout, tree)
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        # A folder of another user can't be listed, and a folder with other entries is not a session's.
        with suppress(OSError):
            if {OWNER, TREE, PACKAGES}.issuperset(os.listdir(folder)):  # noqa: PTH208 - a set of names
                _removed(folder)


def _removed(folder: Path) -> bool:
    """Delete a session's folder and return True, unless the session uses the folder."""
    try:
        # A session that has just created the folder waits for the lock, and then finds that the folder is gone.
        with locked(folder / OWNER, limit_s=0.0):
            shutil.rmtree(folder, ignore_errors=True)
    except FileNotFoundError:
        return True
    except OSError:  # the session holds the lock, or the file belongs to another user
        return False
    return True


def _forget(checkout: Path, tree: Path) -> None:
    # Delete the files first, since other sessions wait while git runs.
    shutil.rmtree(tree, ignore_errors=True)
    # If git fails, the next session removes the worktree. --force twice: git locks a worktree while it is added.
    with suppress(SpecError):
        _worktree(checkout, "remove", "--force", "--force", str(tree))
