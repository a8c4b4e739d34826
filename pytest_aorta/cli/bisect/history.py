"""The commits between two commits of a repository, in the order in which they are searched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pytest_aorta.common.errors import SpecError, UsageError
from pytest_aorta.plan.worktree import commit_of, git

_FIELDS = "%H%x00%P%x00%s"


@dataclass(frozen=True)
class Commit:
    """A commit.

    Attributes:
        hash: Full hash.
        parents: Full hashes of the parents, the first parent first.
        subject: First line of the message.
    """

    hash: str
    parents: tuple[str, ...]
    subject: str

    def __str__(self) -> str:
        """Return the short hash and the subject."""
        return f"{self.hash[:12]} {self.subject}".rstrip()


def commits_between(folder: Path, good: str, bad: str) -> list[Commit]:
    """Return the commits from ``good`` to ``bad`` on the line of first parents.

    Each of these commits was the state of the branch at some time. Commits of merged branches are left out: they were
    based on older states, so they may lack a change that an earlier commit of the line introduced.

    Raises:
        UsageError: A name is not a commit, or ``good`` is not before ``bad`` on that line.
    """
    hashes = [_commit(folder, name, side) for name, side in ((good, "GOOD"), (bad, "BAD"))]
    if hashes[0] == hashes[1]:
        raise UsageError(f"GOOD and BAD are the same commit, {hashes[0][:12]}")
    line = _log(folder, "--first-parent", "--reverse", f"{hashes[0]}..{hashes[1]}")
    if not line or line[0].parents[:1] != (hashes[0],):
        raise UsageError(
            f"GOOD ({good}) is not on the line of first parents of BAD ({bad}); "
            f"git log --first-parent {bad} lists the commits that can be GOOD"
        )
    return [*_log(folder, "-1", hashes[0]), *line]


def _commit(folder: Path, name: str, side: str) -> str:
    if name.startswith("-"):
        raise UsageError(f"{side}: got {name!r}, allowed is a branch, tag or commit")
    try:
        return commit_of(folder, name)
    except SpecError as error:
        raise UsageError(f"{side}: {error}") from None


def _log(folder: Path, *arguments: str) -> list[Commit]:
    # splitlines() would also split at other characters that a subject may contain.
    rows = git(folder, "log", "--no-show-signature", f"--format={_FIELDS}", *arguments).split("\n")
    fields = (row.split("\0") for row in rows if row)
    return [Commit(name, tuple(parents.split()), subject) for name, parents, subject in fields]
