"""Finds the pull request that a job of CI belongs to, and the token, from options and the environment."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_aorta.cli.report.client import Client, checked_base, checked_token
from pytest_aorta.cli.report.hosts import GitHub, GitLab, Host, pull_request_of
from pytest_aorta.common.documents import UnreadableFile, read_json
from pytest_aorta.common.errors import UsageError

GITHUB, GITLAB = "github", "gitlab"
_MAX_EVENT = 32 << 20
_GITHUB_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_GITLAB_PROJECT = re.compile(r"\d+|[\w.-]+(/[\w.-]+)+", re.ASCII)
_GITHUB_DENIED = (
    "give the job `permissions: pull-requests: write`; the token of a pull request from a fork is read-only, so "
    "comment in a workflow of the event workflow_run instead (docs/ci.md)"
)
_GITLAB_DENIED = (
    "set the masked variable GITLAB_TOKEN to a project access token with the scope api and the role Reporter or "
    "higher; the token of a job (CI_JOB_TOKEN) may not comment"
)
_REVISION = re.compile(r"[0-9a-f]{40,64}")


def find_host(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Host:
    """Return the comments of the pull request that the options or the environment of CI name.

    Raises:
        UsageError: A value is missing or not allowed, or the job belongs to no pull request.
    """
    service = arguments.service or (
        GITHUB if environ.get("GITHUB_ACTIONS") == "true" else GITLAB if environ.get("GITLAB_CI") == "true" else None
    )
    if service is None:
        raise UsageError("--service: this is neither a job of GitHub Actions nor of GitLab CI; give github or gitlab")
    return _github(arguments, environ) if service == GITHUB else _gitlab(arguments, environ)


def _github(arguments: argparse.Namespace, environ: Mapping[str, str]) -> GitHub:
    name = "GH_TOKEN" if environ.get("GH_TOKEN") and not environ.get("GITHUB_TOKEN") else "GITHUB_TOKEN"
    token = checked_token(_required(environ, name, "GITHUB_TOKEN: ${{ github.token }} in the step's env"), name)
    base = checked_base(environ.get("GITHUB_API_URL") or "https://api.github.com", "GITHUB_API_URL")
    repository = arguments.repository or _required(environ, "GITHUB_REPOSITORY", "--repository OWNER/NAME")
    if not _GITHUB_REPOSITORY.fullmatch(repository):
        raise UsageError(f"--repository: got {repository!r}, allowed is OWNER/NAME")
    headers = {
        "Authorization": f"Bearer {token}",
        "Accept": "application/vnd.github+json",
        "X-GitHub-Api-Version": "2022-11-28",
    }
    client = Client("GitHub", base, token, headers, _GITHUB_DENIED, arguments.wait)
    return GitHub(client, repository, arguments.number or _number_of_event(environ, client, repository))


def _number_of_event(environ: Mapping[str, str], client: Client, repository: str) -> int:
    """Return the number of the pull request that started the workflow, or whose tests started it (workflow_run)."""
    name = environ.get("GITHUB_EVENT_NAME", "")
    file = _required(environ, "GITHUB_EVENT_PATH", "--number")
    try:
        event = read_json(Path(file), max_bytes=_MAX_EVENT)
    except UnreadableFile as error:
        raise UsageError(f"GITHUB_EVENT_PATH: {error}; give --number") from None
    if name == "workflow_run":
        return pull_request_of(client, repository, *_head(event))
    number = _at(event, "pull_request", "number")
    if number is None and _at(event, "issue", "pull_request") is not None:
        number = _at(event, "issue", "number")
    if type(number) is not int or number < 1:
        raise UsageError(
            f"the event {name!r} belongs to no pull request; comment in pull requests only, or give --number"
        )
    return number


def _head(event: Any) -> tuple[str, str, str]:
    """Return owner, branch and commit that a finished workflow ran on."""
    if (kind := _at(event, "workflow_run", "event")) != "pull_request":
        raise UsageError(f"the finished workflow was started by {kind!r} and belongs to no pull request; give --number")
    owner = _at(event, "workflow_run", "head_repository", "owner", "login")
    branch, commit = _at(event, "workflow_run", "head_branch"), _at(event, "workflow_run", "head_sha")
    if not (isinstance(owner, str) and isinstance(branch, str) and _REVISION.fullmatch(str(commit))):
        raise UsageError("GITHUB_EVENT_PATH: the finished workflow has no owner, branch and commit; give --number")
    return owner, branch, str(commit)


def _gitlab(arguments: argparse.Namespace, environ: Mapping[str, str]) -> GitLab:
    name = "GITLAB_TOKEN" if environ.get("GITLAB_TOKEN") else "CI_JOB_TOKEN"
    token = checked_token(_required(environ, name, "GITLAB_TOKEN, a project access token"), name)
    base = checked_base(environ.get("CI_API_V4_URL") or "https://gitlab.com/api/v4", "CI_API_V4_URL")
    # In a fork, the merge request and the job belong to different projects.
    ids = (environ.get("CI_MERGE_REQUEST_PROJECT_ID"), environ.get("CI_PROJECT_ID"))
    project = arguments.repository or next(filter(None, ids), "")
    if not _GITLAB_PROJECT.fullmatch(project):
        raise UsageError(f"--repository: got {project!r}, allowed is the number or the path of a project")
    number = str(arguments.number or environ.get("CI_MERGE_REQUEST_IID", ""))
    if not re.fullmatch(r"[1-9][0-9]{0,9}", number):
        raise UsageError("this pipeline belongs to no merge request (CI_MERGE_REQUEST_IID); give --number")
    headers = {("PRIVATE-TOKEN" if name == "GITLAB_TOKEN" else "JOB-TOKEN"): token}
    client = Client("GitLab", base, token, headers, _GITLAB_DENIED, arguments.wait)
    return GitLab(client, project, int(number), environ.get("CI_MERGE_REQUEST_PROJECT_URL", ""))


def _required(environ: Mapping[str, str], name: str, remedy: str) -> str:
    if not (value := environ.get(name)):
        raise UsageError(f"the variable {name} is not set; give {remedy}")
    return value


def _at(document: Any, *keys: str) -> Any:
    """Return a value inside JSON objects; None if it is lacking."""
    for key in keys:
        document = document.get(key) if isinstance(document, dict) else None
    return document
