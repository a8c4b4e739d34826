"""The provenance of a launch: its time, its session block and the version of the code."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.model import Block, Commit, Model, UtcTime
from pytest_aorta.common.text import brief
from pytest_aorta.plan.reference import git

if TYPE_CHECKING:  # ranks import this module, and need no plan
    from pytest_aorta.plan.reference import Reference

UTC_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
# `git status` of a large repository on a cold network disk takes seconds; the launch must not wait for longer.
_GIT_S = 5.0
# A command line may name thousands of tests, and a baseline stores up to 100 launches in 4 MiB.
MAX_WORDS = 32
MAX_WORD = 256
# Commit, branch, and whether a tracked file differs from the commit, as in :class:`Provenance`.
Version: TypeAlias = tuple[str | None, str | None, bool | None]
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_HOSTNAME = Path("/etc/hostname")


class Provenance(Model, frozen=True):
    """The time, the session block and the code version of a launch.

    Attributes:
        measured_at: UTC time at which the launch had ended, ISO 8601, to the second.
        block: the session block, 12 hex digits: this host since it was booted. Launches of one block share its noise.
        commit: the full hash of the commit that is checked out in the folder that the ranks ran in; None if git gives
            no answer.
        branch: the branch that is checked out; None for a detached head.
        dirty: whether a tracked file differs from the commit; None if git gives no answer.
        command: the words of the launching command line, cut to 32 words of 256 characters; empty if unknown.
        side: the A/B reference that was launched, and how its environment differs; empty for the code under test.
    """

    measured_at: UtcTime
    block: Block
    commit: Commit | None = None
    branch: str | None = None
    dirty: bool | None = None
    command: list[str] = []
    side: str = ""

    def __post_init__(self) -> None:
        """Refuse a time such as month 13, which the type allows."""
        try:
            datetime.fromisoformat(self.measured_at)
        except ValueError:
            raise ValueError(f"measured_at: got {self.measured_at!r}, allowed is a moment in UTC") from None

    @property
    def moment_s(self) -> int:
        """Return :attr:`measured_at` in seconds since 1970."""
        return int(datetime.fromisoformat(self.measured_at).timestamp())


def provenance(folder: Path, command: Sequence[str] = (), reference: Reference | None = None) -> Provenance:
    """Return the provenance of a launch that has just ended on this host, whose ranks ran in ``folder``.

    An A/B reference at a commit is a clean checkout of this commit.
    """
    now = time.strftime(UTC_FORMAT, time.gmtime())
    commit = reference.commit if reference else None
    version = (commit, None, False) if commit else code_version(folder)
    side = str(reference or "")
    return Provenance(now, block_id(), *version, _stored_command(command), side)


def _stored_command(words: Sequence[str]) -> list[str]:
    """Return the words of a command line as a result stores them.

    At most :data:`MAX_WORDS` words of :data:`MAX_WORD` characters are kept, and ``...`` stands for the rest. Bytes of
    an argument that are not UTF-8 are escaped, because JSON has no text for them.
    """
    kept = [brief(word.encode("utf-8", "backslashreplace").decode(), MAX_WORD) for word in words[:MAX_WORDS]]
    return kept if len(words) <= MAX_WORDS else [*kept[:-1], "..."]


def version_text(commit: str | None, dirty: bool | None) -> str:
    """Return the version of the code as text: the short commit, and whether the code differed; empty if unknown."""
    return f"{commit[:12]}{' and changes' if dirty else ''}" if commit else ""


@functools.cache
def code_version(folder: Path) -> Version:
    """Return commit, branch and ``dirty`` of the code in ``folder``, asking git once per process.

    Git only reads: it takes no lock and does not refresh the index. A launch does not fail if git is missing or slow:
    every field is then None.
    """
    options = ("--porcelain=v2", "--branch", "--no-ahead-behind", "--untracked-files=no")
    try:
        status = git(folder, "--no-optional-locks", "status", *options, limit_s=_GIT_S)
    except (SpecError, OSError):
        return None, None, None
    return _parse_status(status)


def _parse_status(status: str) -> Version:
    """Return the version that the output of ``git status --porcelain=v2 --branch`` describes."""
    heads = dict(line[2:].split(" ", 1) for line in status.splitlines() if line.startswith("# branch."))
    commit, branch = heads.get("branch.oid"), heads.get("branch.head")
    # Git writes "(initial)" for a repository without a commit, and "(detached)" for a head that is on no branch.
    return (
        None if commit == "(initial)" else commit,
        None if branch == "(detached)" else branch,
        any(not line.startswith("#") for line in status.splitlines()),
    )


def block_id() -> str:
    """Return the session block of this host since its last boot: 12 hex digits that reveal neither host nor boot id."""
    boot = _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else ""  # sandboxes hide /proc/sys
    machine = _HOSTNAME.read_text(encoding="utf-8") if _HOSTNAME.exists() else ""
    return hashlib.sha256(f"{boot} {machine}".encode()).hexdigest()[:12]
