"""Links to commits, from a repository's remote."""

from __future__ import annotations

import re
from pathlib import Path

from pytest_aorta.common.errors import SpecError, UsageError
from pytest_aorta.plan.worktree import git

PLACEHOLDER = "{commit}"
# A word of the host's name -> the path of a commit below the repository's page.
_PATHS = {"github": "commit", "gitlab": "-/commit", "bitbucket": "commits"}
_URL = re.compile(r"(?:https?|ssh|git)://(?:[^@/\s]*@)?(?P<host>[A-Za-z0-9.-]+)(?::[0-9]+)?/(?P<path>[\w./~+-]+)")
# The form user@host:path, which git takes for SSH.
_SCP = re.compile(r"(?:[\w.-]+@)?(?P<host>[A-Za-z0-9.-]+):(?P<path>[\w./~+-]+)")
_TEMPLATE = re.compile(r"https?://[^\s\"'<>{}]+\{commit\}[^\s\"'<>{}]*")


def checked_template(text: str) -> str:
    """Return the template of a commit's address that a user gave.

    Raises:
        UsageError: The text is not an address with one :data:`PLACEHOLDER`.
    """
    if not _TEMPLATE.fullmatch(text):
        raise UsageError(
            f"--commit-url: got {text!r}, allowed is an address such as https://host/repo/commit/{{commit}}"
        )
    return text


def remote_template(folder: Path) -> str | None:
    """Return the template for the remote ``origin`` of the repository around ``folder``; None without such a remote."""
    try:
        return template_of(git(folder, "remote", "get-url", "origin"))
    except (SpecError, OSError):
        return None


def template_of(remote: str) -> str | None:
    """Return the template of a commit's address on the host of a remote.

    User names and passwords of the remote are dropped. The result is None for a remote that is not on a host whose
    name contains ``github``, ``gitlab`` or ``bitbucket``.
    """
    found = _URL.fullmatch(remote) or _SCP.fullmatch(remote)
    if found is None:
        return None
    path = next((path for word, path in _PATHS.items() if word in found["host"].lower()), None)
    repository = found["path"].strip("/").removesuffix(".git")
    if path is None or not repository:
        return None
    return f"https://{found['host']}/{repository}/{path}/{PLACEHOLDER}"
