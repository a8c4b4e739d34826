"""The requests of GitHub's and GitLab's API for the comments of a pull request, which GitLab calls a merge request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

from pytest_aorta.cli.report.client import AccessDenied, ApiError, Client

# The author of comments that are written with the token of GitHub Actions.
ACTIONS_BOT = "github-actions[bot]"


@dataclass(frozen=True)
class Comment:
    """A comment; ``author`` is the login of a user, and a greater ``number`` is a later comment."""

    number: int
    body: str
    author: str
    url: str = ""


class Host(Protocol):
    """The comments of one pull request."""

    @property
    def max_characters(self) -> int:
        """Return the length of the longest comment that the host accepts."""

    def viewer(self) -> str | None:
        """Return the login that authors the token's comments; None if it is unknown before the first comment."""

    def comments(self) -> Iterator[Comment]:
        """Yield the comments."""

    def create(self, body: str) -> Comment:
        """Add a comment."""

    def update(self, comment: Comment, body: str) -> Comment:
        """Replace the text of a comment."""

    def delete(self, comment: Comment) -> None:
        """Remove a comment."""


@dataclass(frozen=True)
class GitHub:
    """The comments of a pull request on GitHub; ``repository`` is ``owner/name``."""

    client: Client
    repository: str
    number: int
    max_characters: int = 65_536

    def viewer(self) -> str | None:
        """Return the login of the token's user; the token of GitHub Actions has no user and may not ask."""
        try:
            return str(_field(self.client.get("/user"), "login"))
        except AccessDenied:
            return ACTIONS_BOT

    def comments(self) -> Iterator[Comment]:
        """Yield the comments."""
        return map(self._comment, self.client.items(f"{self._issue}/comments?per_page=100"))

    def create(self, body: str) -> Comment:
        """Add a comment."""
        return self._comment(self.client.send("POST", f"{self._issue}/comments", {"body": body}))

    def update(self, comment: Comment, body: str) -> Comment:
        """Replace the text of a comment."""
        return self._comment(self.client.send("PATCH", self._address(comment), {"body": body}))

    def delete(self, comment: Comment) -> None:
        """Remove a comment."""
        self.client.send("DELETE", self._address(comment))

    @property
    def _issue(self) -> str:
        return f"/repos/{self.repository}/issues/{self.number}"

    def _address(self, comment: Comment) -> str:
        return f"/repos/{self.repository}/issues/comments/{comment.number}"

    def _comment(self, document: Any) -> Comment:
        return _comment(document, "login", "user", str(_field(document, "html_url") or ""))


@dataclass(frozen=True)
class GitLab:
    """The comments of a merge request on GitLab, which calls them notes.

    Attributes:
        project: Number or path of the project that the merge request belongs to.
        page: Address of the project's pages; empty if unknown.
    """

    client: Client
    project: str
    number: int
    page: str = ""
    max_characters: int = 1_000_000

    def viewer(self) -> str | None:
        """Return the name of the token's user; the token of a job may not ask."""
        try:
            return str(_field(self.client.get("/user"), "username"))
        except AccessDenied:
            return None

    def comments(self) -> Iterator[Comment]:
        """Yield the comments."""
        return map(self._comment, self.client.items(f"{self._notes}?per_page=100&order_by=created_at&sort=asc"))

    def create(self, body: str) -> Comment:
        """Add a comment."""
        return self._comment(self.client.send("POST", self._notes, {"body": body}))

    def update(self, comment: Comment, body: str) -> Comment:
        """Replace the text of a comment."""
        return self._comment(self.client.send("PUT", f"{self._notes}/{comment.number}", {"body": body}))

    def delete(self, comment: Comment) -> None:
        """Remove a comment."""
        self.client.send("DELETE", f"{self._notes}/{comment.number}")

    @property
    def _notes(self) -> str:
        return f"/projects/{quote(self.project, safe='')}/merge_requests/{self.number}/notes"

    def _comment(self, document: Any) -> Comment:
        anchor = f"{self.page}/-/merge_requests/{self.number}#note_{_field(document, 'id')}" if self.page else ""
        return _comment(document, "username", "author", anchor)


def pull_request_of(client: Client, repository: str, owner: str, branch: str, commit: str) -> int:
    """Return the number of the open pull request on GitHub whose head is a commit of a branch.

    Raises:
        ApiError: There is none, e.g. because the branch has a later commit, or there are several.
    """
    head = quote(f"{owner}:{branch}", safe="")
    pulls = list(client.items(f"/repos/{repository}/pulls?state=open&per_page=100&head={head}"))
    found = [_number(pull, "number") for pull in pulls if _field(_field(pull, "head"), "sha") == commit]
    if len(found) != 1:
        raise ApiError(
            f"GitHub: {len(found)} open pull requests of {repository} have the head {commit[:12]} of {owner}:{branch}; "
            f"give --number, or skip the comment of a commit that is no longer the head"
        )
    return found[0]


def _comment(document: Any, login: str, user: str, url: str) -> Comment:
    author, body = _field(_field(document, user), login), _field(document, "body")
    return Comment(_number(document, "id"), body if isinstance(body, str) else "", str(author or ""), url)


def _field(document: Any, key: str) -> Any:
    """Return a value of a JSON object; None if it is lacking or if the document is not an object."""
    return document.get(key) if isinstance(document, dict) else None


def _number(document: Any, key: str) -> int:
    value = _field(document, key)
    if type(value) is not int:
        raise ApiError(f"the answer of the API has no number {key!r}; is the address that of an API?")
    return value
