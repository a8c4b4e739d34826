"""``aorta comment``: one comment on a pull request, which every run updates."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from pytest_aorta.cli.exit_codes import ExitCode
from pytest_aorta.cli.report.client import AccessDenied, NotFound, Unanswered
from pytest_aorta.cli.report.hosts import Comment, Host
from pytest_aorta.cli.report.pull_request import GITHUB, GITLAB, find_host
from pytest_aorta.common.documents import read_bytes
from pytest_aorta.common.errors import AortaError
from pytest_aorta.common.text import emit
from pytest_aorta.plan.options import integer_from
from pytest_aorta.report.markdown import escaped

FAIL, WARN = "fail", "warn"
_MAX_FILE = 16 << 20
# Writing is started again if another run deleted the comment meanwhile, or if the server has not answered.
_ROUNDS = 3
_KEY = re.compile(r"(?!.*--)[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TAG = re.compile(r"<(/?)(details|summary|pre|code|table)\b")
_FENCE = re.compile(r"^ {0,3}(```|~~~)", re.MULTILINE)


class Link(NamedTuple):
    """A link below the text of a comment."""

    label: str
    url: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the subcommand."""
    parser.add_argument("file", type=Path, metavar="FILE.md", help="Markdown to post (pytest's --aorta-markdown)")
    parser.add_argument(
        "--key",
        type=_key,
        default="aorta",
        help="name of the comment: jobs with different keys have different comments (default: aorta)",
    )
    parser.add_argument(
        "--link",
        type=_link,
        action="append",
        default=[],
        metavar="LABEL=URL",
        help="link below the text, e.g. to the HTML report; may be repeated",
    )
    parser.add_argument("--service", choices=(GITHUB, GITLAB), help="code host (default: the one whose CI runs this)")
    parser.add_argument(
        "--repository",
        metavar="NAME",
        help="OWNER/NAME on GitHub, number or path of a project on GitLab (default: that of the job)",
    )
    parser.add_argument(
        "--number",
        type=integer_from(1),
        metavar="N",
        help="number of the pull or merge request (default: that of the job)",
    )
    parser.add_argument("--author", metavar="LOGIN", help="user whose comment is updated (default: the token's)")
    parser.add_argument(
        "--wait",
        type=_seconds,
        default=120.0,
        metavar="SECONDS",
        help="time that may be spent waiting for rate limits and failed servers (default: 120)",
    )
    parser.add_argument(
        "--if-denied",
        choices=(FAIL, WARN),
        default=FAIL,
        help="whether a token that may not comment ends the command with 1, or with 0 and a warning (default: fail)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the comment and print its address; a token that may not comment is a warning with ``--if-denied=warn``.

    Raises:
        AortaError: The file can't be read, or the comment could not be written.
    """
    # A link in an artifact that a fork has made could lead to a secret, so links are refused.
    text = read_bytes(arguments.file, max_bytes=_MAX_FILE).decode("utf-8", "replace")
    if not text.strip():
        raise AortaError(f"{arguments.file}: empty, so there is nothing to post")
    try:
        host = find_host(arguments, os.environ)
        posted, action = write_comment(host, arguments.key, text, arguments.link, arguments.author)
    except AccessDenied as error:
        if arguments.if_denied == FAIL:
            raise
        emit([f"WARNING: no comment was written: {error}"])
        return ExitCode.OK
    emit([f"{action}: {posted.url or posted.number}"])
    return ExitCode.OK


def write_comment(
    host: Host, key: str, text: str, links: Sequence[Link] = (), author: str | None = None
) -> tuple[Comment, str]:
    """Create or update the comment with a key, and return it with the word "created" or "updated".

    Two simultaneous runs can create several comments with the key. Then the oldest is updated and the later ones are
    deleted. All runs select the same comment, so one is left.

    Raises:
        ApiError: The comment could not be written.
    """
    marker = marker_of(key)
    body = comment_body(marker, text, links, host.max_characters)
    return _written(host, marker, body, author or host.viewer(), _ROUNDS)


def _written(host: Host, marker: str, body: str, author: str | None, rounds: int) -> tuple[Comment, str]:
    own = _own(host, marker, author)
    try:
        if own:
            return _updated(host, own, body), "updated"
        return _settled(host, marker, host.create(body), body)
    except (_Vanished, Unanswered):
        # The server may have created the comment without answering; the next round then finds the comment.
        if rounds == 1:
            raise
    return _written(host, marker, body, author, rounds - 1)


def marker_of(key: str) -> str:
    """Return the first line of a comment, which readers do not see."""
    return f"<!-- pytest-aorta comment: {key} -->"


def comment_body(marker: str, text: str, links: Sequence[Link], max_characters: int) -> str:
    """Return the text of a comment: the marker, the Markdown as far as it fits, and links."""
    shown = " \N{MIDDLE DOT} ".join(f"[{escaped(link.label)}](<{link.url}>)" for link in links)
    foot = f"\n{shown}\n" if shown else ""
    return f"{marker}\n{cut(text, max_characters - len(marker) - len(foot) - 1)}{foot}"


def cut(text: str, max_characters: int) -> str:
    """Return the first whole lines of Markdown that fit, with open elements closed and a note about the rest."""
    text = text.rstrip() + "\n"
    if len(text) <= max_characters:
        return text
    kept = text[: max(max_characters - 300, 0)]
    kept = kept[: kept.rfind("\n") + 1]
    # At most two levels of elements are open in the Markdown of a run; 300 characters close more than twenty.
    closing = "```\n" if len(_FENCE.findall(kept)) % 2 else ""
    closing += "".join(f"</{tag}>" for tag in reversed(_open_tags(kept)))
    return f"{kept}{closing}\n\n*Cut: {len(kept):,} of {len(text):,} characters are shown.*\n"


def _open_tags(text: str) -> list[str]:
    tags: list[str] = []
    for found in _TAG.finditer(text):
        if not found[1]:
            tags.append(found[2])
        elif tags and tags[-1] == found[2]:
            tags.pop()
    return tags[-10:]


class _Vanished(NotFound):
    """The comment was deleted after it had been found."""


def _own(host: Host, marker: str, author: str | None) -> list[Comment]:
    """Return the comments of the author that start with the marker, the oldest first.

    Others may write a comment with the marker; it must not be mistaken for this job's comment.
    """
    found = [comment for comment in host.comments() if comment.author == author and _starts(comment.body, marker)]
    return sorted(found, key=lambda comment: comment.number)


def _starts(body: str, marker: str) -> bool:
    # Hosts may store line ends as \r\n.
    return body.splitlines()[:1] == [marker]


def _updated(host: Host, own: list[Comment], body: str) -> Comment:
    """Update the oldest comment and delete the others."""
    try:
        updated = host.update(own[0], body)
    except NotFound as error:
        raise _Vanished(str(error)) from None
    for later in own[1:]:
        _delete(host, later)
    return updated


def _settled(host: Host, marker: str, created: Comment, body: str) -> tuple[Comment, str]:
    """Return the one comment that is left after creating one, even if another run has created a comment too."""
    # The list may not contain the new comment yet. Its author is the token's user, even if viewer() did not name a
    # user.
    own = {comment.number: comment for comment in (*_own(host, marker, created.author), created)}
    oldest, *later = sorted(own.values(), key=lambda comment: comment.number)
    if oldest.number != created.number:
        return _updated(host, [oldest, *later], body), "updated"
    for comment in later:
        _delete(host, comment)
    return created, "created"


def _delete(host: Host, comment: Comment) -> None:
    try:
        host.delete(comment)
    except NotFound:
        # Another run has deleted it.
        return


def _key(text: str) -> str:
    if not _KEY.fullmatch(text):
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed is up to 64 letters, digits, '.', '_' and single '-'")
    return text


def _link(text: str) -> Link:
    label, _, url = text.partition("=")
    parts = urlsplit(url)
    if not label.strip() or parts.scheme not in ("http", "https") or not parts.netloc or re.search(r"[\s<>\\]", url):
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed is LABEL=URL with the address of a web page")
    return Link(label.strip(), url)


def _seconds(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,5}", text):
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed is an integer of seconds, at most 99999")
    return float(text)
