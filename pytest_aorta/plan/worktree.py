"""Git, and its worktrees: a commit checked out and prepared in a folder of its own, which later sessions use again."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.files import is_source_of, locked, write_text
from pytest_aorta.common.processes import run_program
from pytest_aorta.common.text import did_you_mean

GIT_S = 60.0
# Git filters may download large files during a checkout.
CHECKOUT_S = 600.0
# A compiled dependency can take an hour to build.
SETUP_S = 7200.0
UNUSED_S = 14 * 86400.0
# The folder of worktrees in the user's cache; each has a folder of its own.
ENVIRONMENTS = "environments"
# Entries of a worktree's folder: the files of the commit, links to packages, the output of the setup commands, and a
# file that exists once the commit is checked out and prepared, and that each use touches.
TREE, PACKAGES, LOG_FILE, READY_FILE = "tree", "packages", "setup.log", "ready"
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


@dataclass(frozen=True)
class Setup:
    """The commands that prepare the worktree of a commit, and the folder that keeps worktrees for later sessions.

    Attributes:
        commands: Words of each command, in which ``{tree}``, ``{packages}`` and ``{commit}`` are replaced. ``packages``
            is a folder of the commit that comes first on the search path of its launches.
        folder: Folder of the worktrees; None for ``pytest-aorta/environments`` in the user's cache.
    """

    commands: tuple[tuple[str, ...], ...] = ()
    folder: Path | None = None


NO_SETUP = Setup()


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of this package in the user's cache."""
    given = environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if given.startswith("/") else Path.home() / ".cache") / "pytest-aorta"


def open_worktree(rootdir: Path, commit: str, setup: Setup) -> Worktree:
    """Return the worktree of a commit, given by its full hash; check it out and prepare it unless an earlier call has.

    Worktrees that no session has used for ``UNUSED_S`` are deleted.

    Raises:
        SpecError: The commit can't be checked out, a setup command fails, or the folder of the worktrees can't be
            written or lies in the repository, whose tests would be collected there.
    """
    checkout = Path(git(rootdir, "rev-parse", "--show-toplevel")).resolve()
    kept = (setup.folder or cache_folder() / ENVIRONMENTS).resolve()
    if kept.is_relative_to(checkout):
        raise SpecError(f"{kept} is inside of the repository {checkout}; set XDG_CACHE_HOME to a folder outside of it")
    digest = sha256(json.dumps([str(checkout), setup.commands]).encode()).hexdigest()[:8]
    own = kept / f"{commit[:16]}-{digest}"
    worktree = Worktree(checkout, commit, own / TREE, own / PACKAGES)
    try:
        kept.mkdir(parents=True, exist_ok=True)
        _remove_unused(kept)
        with locked(own.with_suffix(".lock"), limit_s=SETUP_S):
            # A cleaner of caches, or a user, may have deleted the files of the commit.
            if not ((own / READY_FILE).is_file() and worktree.tree.is_dir()):
                shutil.rmtree(own, ignore_errors=True)
                worktree.packages.mkdir(parents=True)
                _worktree(checkout, "prune")
                # The files can take minutes and do not need the lock of other sessions.
                _worktree(checkout, "add", "--no-checkout", "--detach", str(worktree.tree), commit)
                git(worktree.tree, "reset", "--hard", "--no-recurse-submodules", limit_s=CHECKOUT_S)
                _run_commands(worktree, setup, worktree.tree / rootdir.resolve().relative_to(checkout))
            elif not setup.commands:
                # A launch may have written to files of the commit.
                git(worktree.tree, "reset", "--hard", "--no-recurse-submodules", limit_s=CHECKOUT_S)
            write_text(own / READY_FILE, "")
    except OSError as error:
        raise SpecError(f"{own}: {error.strerror or error}") from None
    return worktree


def setup_program(command: Sequence[str]) -> str | None:
    """Return the path of a setup command's program, or None if this machine does not have the program.

    A path with a slash is relative to the root folder of each commit, so only the commit can show whether it exists.
    """
    program = command[0]
    return program if "/" in program else shutil.which(program, path=_environment()["PATH"])


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


def _remove_unused(kept: Path) -> None:
    """Delete worktrees that no session has used for ``UNUSED_S``; git forgets them when it next prunes."""
    oldest_s = time.time() - UNUSED_S
    for ready in kept.glob(f"*/{READY_FILE}"):
        with suppress(OSError):  # another session deletes it at the same time
            if ready.stat().st_mtime < oldest_s:
                shutil.rmtree(ready.parent, ignore_errors=True)


def _run_commands(worktree: Worktree, setup: Setup, root: Path) -> None:
    log_file = worktree.tree.parent / LOG_FILE
    names = {"{tree}": str(worktree.tree), "{packages}": str(worktree.packages), "{commit}": worktree.commit}
    for command in setup.commands:
        argv = [re.sub(r"\{(tree|packages|commit)\}", lambda match: names[match[0]], word) for word in command]
        status, output, complaint = run_program(argv, _environment(), SETUP_S, cwd=root)
        with log_file.open("a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(argv)}\n{output}{complaint}")
        if status:
            last = " ".join((complaint.strip() or output.strip()).splitlines()[-1:])
            raise SpecError(f"--setup: {command[0]} ended with exit code {status}: {last} ({log_file})")


def _environment() -> dict[str, str]:
    """Return the environment, in which ``python`` and ``pip`` are those of this interpreter."""
    own = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": f"{own}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
