"""Worktrees of several commits, prepared by setup commands and kept for later sessions."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.files import locked, write_text
from pytest_aorta.common.programs import run_program
from pytest_aorta.plan.reference import CommitReference, commit_reference
from pytest_aorta.plan.worktree import TREE, Worktree, keep_worktree, open_worktree

# Exists in the folder of a commit whose setup commands all succeeded.
READY_FILE = "ready"
LOG_FILE = "setup.log"
# A compiled dependency can take an hour to build.
SETUP_S = 7200.0


@dataclass(frozen=True)
class Setup:
    """The commands that prepare the worktree of a commit.

    Attributes:
        commands: Words of each command, in which ``{tree}``, ``{packages}`` and ``{commit}`` are replaced. ``packages``
            is a folder of the commit that comes first on the search path of its launches.
        folder: Folder of prepared worktrees.
    """

    commands: tuple[tuple[str, ...], ...]
    folder: Path


class PreparedCommits:
    """Commits as A/B references, each checked out and prepared at its first use."""

    def __init__(self, rootdir: Path, setup: Setup) -> None:
        self._rootdir = rootdir
        self._setup = setup
        self._references: dict[str, CommitReference] = {}
        self._opened = ExitStack()

    def open(self, commit: str) -> CommitReference:
        """Return the reference of a commit, given by its full hash.

        Without setup commands, the worktree is removed by :meth:`close`. With setup commands, the worktree is kept,
        so that the commands run only once.

        Raises:
            SpecError: The commit can't be checked out, or a setup command fails.
        """
        if commit not in self._references:
            worktree = self._prepared(commit) if self._setup.commands else self._temporary(commit)
            self._references[commit] = commit_reference(commit[:12], self._rootdir, worktree)
        return self._references[commit]

    def close(self) -> None:
        """Remove the worktrees that are not kept."""
        self._references.clear()
        self._opened.close()

    def _temporary(self, commit: str) -> Worktree:
        return self._opened.enter_context(open_worktree(self._rootdir, commit))

    def _prepared(self, commit: str) -> Worktree:
        digest = sha256(json.dumps(self._setup.commands).encode()).hexdigest()[:8]
        folder = self._setup.folder / f"{commit[:16]}-{digest}"
        try:
            self._setup.folder.mkdir(parents=True, exist_ok=True)
            with locked(folder.with_suffix(".lock"), limit_s=SETUP_S):
                # A cleaner of caches, or a user, may have deleted the files of the commit.
                is_ready = (folder / READY_FILE).is_file() and (folder / TREE).is_dir()
                worktree = keep_worktree(self._rootdir, commit, folder, anew=not is_ready)
                if not is_ready:
                    self._run_commands(worktree, folder)
                    write_text(folder / READY_FILE, "")
        except OSError as error:
            raise SpecError(f"{folder}: {error.strerror or error}") from None
        return worktree

    def _run_commands(self, worktree: Worktree, folder: Path) -> None:
        names = {"tree": str(worktree.tree), "packages": str(worktree.packages), "commit": worktree.commit}
        root = worktree.tree / self._rootdir.resolve().relative_to(worktree.checkout)
        for command in self._setup.commands:
            argv = [_filled(word, names) for word in command]
            status, output, complaint = run_program(argv, _environment(), SETUP_S, cwd=root)
            with (folder / LOG_FILE).open("a", encoding="utf-8") as log:
                log.write(f"$ {' '.join(argv)}\n{output}{complaint}")
            if status:
                last = " ".join((complaint.strip() or output.strip()).splitlines()[-1:])
                raise SpecError(f"--setup: {command[0]} ended with exit code {status}: {last} ({folder / LOG_FILE})")


def _filled(word: str, names: Mapping[str, str]) -> str:
    for name, value in names.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def _environment() -> dict[str, str]:
    """Return the environment, in which ``python`` and ``pip`` are those of this interpreter."""
    own = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": f"{own}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}


def setup_program(command: Sequence[str]) -> str | None:
    """Return the path of a setup command's program, or None if this machine does not have the program.

    A path with a slash is relative to the root folder of each commit, so only the commit can show whether it exists.
    """
    program = command[0]
    return program if "/" in program else shutil.which(program, path=_environment()["PATH"])
