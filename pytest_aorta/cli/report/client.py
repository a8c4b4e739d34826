"""A client of a JSON API over HTTP: waits and sizes are bounded, and no message or other host receives the token."""

from __future__ import annotations

import email.utils
import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urljoin, urlsplit

from pytest_aorta.common.documents import UnreadableFile, parse_json
from pytest_aorta.common.errors import AortaError, UsageError
from pytest_aorta.common.text import brief, printable

_ATTEMPTS = 4
_REQUEST_S = 20.0
# A hundred comments of GitHub's greatest length.
_MAX_ANSWER = 32 << 20
_MAX_PAGES = 100
_PAUSE_S = 1.0
# GitHub asks clients to wait a minute if it limits requests without naming a time.
_THROTTLED_S = 60.0
_NEXT = re.compile(r'<([^<>]+)>\s*;[^,<>]*\brel="?next"?', re.IGNORECASE)


class ApiError(AortaError):
    """A request failed for good."""


class AccessDenied(ApiError):
    """The token is not valid, or does not permit the request."""


class NotFound(ApiError):
    """The addressed object does not exist, or the token may not read it."""


class Unanswered(ApiError):
    """No usable answer came, so the request may have been carried out."""


@dataclass(frozen=True)
class Answer:
    """The answer to one request; status 0 and ``problem`` if none came."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    text: str = ""
    problem: str = ""

    @property
    def is_good(self) -> bool:
        """Return True for a status of success."""
        return 200 <= self.status < 300

    @property
    def is_throttled(self) -> bool:
        """Return True if the server limits the rate of requests; GitHub says so with 403 as well."""
        hints = "retry-after" in self.headers or self.headers.get("x-ratelimit-remaining") == "0"
        return self.status == 429 or (self.status == 403 and (hints or "rate limit" in self.text.lower()))


class _SameOrigin(urllib.request.HTTPRedirectHandler):
    """Follows redirects within one host, with method and body; a redirect to another host is an error."""

    def redirect_request(self, req: Any, _fp: Any, _code: Any, _msg: Any, _headers: Any, newurl: str) -> Any:
        if origin(newurl) != origin(req.full_url):
            return None
        return urllib.request.Request(  # noqa: S310 - of the same scheme
            newurl, data=req.data, headers=dict(req.headers), method=req.get_method()
        )


def origin(url: str) -> tuple[str, str]:
    """Return scheme and host, with the port, of a URL."""
    parts = urlsplit(url)
    return parts.scheme.lower(), parts.netloc.lower()


def checked_base(url: str, source: str) -> str:
    """Return the address of an API without a slash at its end.

    Raises:
        UsageError: The address is not one of HTTP, or it contains a user or spaces.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or not url.isprintable():
        raise UsageError(
            f"{source}: got {brief(repr(url))}, allowed is the address of an API, e.g. https://host/api/v4"
        )
    return url.rstrip("/")


def checked_token(text: str, source: str) -> str:
    """Return a token without space around it.

    Raises:
        UsageError: The text is not a token; the message does not contain the text.
    """
    if not re.fullmatch(r"[!-~]+", text.strip()):
        raise UsageError(f"{source}: not a token: a token is one or more ASCII characters without a space")
    return text.strip()


@dataclass
class Client:
    """A client with one token and one limit on its total waiting time.

    Attributes:
        name: Name of the host, for messages.
        base: Address of the API, without a slash at its end.
        token: The secret that messages must not contain.
        headers: Headers of every request, with the token.
        remedy: What to do where the token does not permit a request.
        wait_s: Seconds that may be spent waiting between requests, in total.
    """

    name: str
    base: str
    token: str = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    remedy: str = ""
    wait_s: float = 120.0

    def __post_init__(self) -> None:
        """Make the opener, which honors the proxies of the environment."""
        self._opener = urllib.request.build_opener(_SameOrigin)

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        time.sleep(seconds)

    def get(self, path: str) -> Any:
        """Return the JSON value at a path."""
        return self._value(self._exchange("GET", f"{self.base}{path}"))

    def items(self, path: str) -> Iterator[Any]:
        """Yield the elements of a list, page by page.

        Raises:
            ApiError: A page is not a list, or the next page is at another host.
        """
        url = f"{self.base}{path}"
        for _ in range(_MAX_PAGES):
            answer = self._exchange("GET", url)
            page = self._value(answer)
            if not isinstance(page, list):
                raise ApiError(f"{self.name}: GET {urlsplit(url).path}: the answer is not a list")
            yield from page
            if (following := _NEXT.search(answer.headers.get("link", ""))) is None:
                return
            url = urljoin(url, following[1])
            if origin(url) != origin(self.base):
                raise ApiError(
                    f"{self.name}: the next page is at another host, {origin(url)[1]}; the token is not sent there"
                )
        raise ApiError(f"{self.name}: GET {path}: more than {_MAX_PAGES} pages")

    def send(self, method: str, path: str, document: object = None) -> Any:
        """Return the JSON value that answers a change; None for an empty answer.

        After a server failure a POST is not repeated, because it may have been carried out. The error is raised after a
        pause, and the caller has to check.
        """
        try:
            return self._value(self._exchange(method, f"{self.base}{path}", document))
        except Unanswered:
            self.sleep(_PAUSE_S)
            raise

    def _value(self, answer: Answer) -> Any:
        if not answer.text:
            return None
        try:
            return parse_json(answer.text, "answer")
        except UnreadableFile as error:
            raise ApiError(f"{self.name}: the answer can't be read: {self._safe(str(error))}") from None

    def _exchange(self, method: str, url: str, document: object = None) -> Answer:
        for attempt in range(_ATTEMPTS):
            answer = self._once(method, url, document)
            if answer.is_good:
                return answer
            delay_s = _delay(answer, attempt, is_repeatable=method != "POST")
            if delay_s is None or attempt == _ATTEMPTS - 1:
                break
            # Only a server that limits requests asks to wait; any other failure is reported as it is.
            if delay_s > self.wait_s and not answer.is_throttled:
                break
            self._wait(delay_s, answer)
        raise self._error(f"{method} {urlsplit(url).path}", answer)

    def _wait(self, delay_s: float, answer: Answer) -> None:
        if delay_s > self.wait_s:
            raise ApiError(
                f"{self.name}: status {answer.status}: the server asks to wait {delay_s:.0f} s, and --wait leaves "
                f"{self.wait_s:.0f} s; run the job again later"
            )
        self.wait_s -= delay_s
        self.sleep(delay_s)

    def _once(self, method: str, url: str, document: object) -> Answer:
        data = None if document is None else json.dumps(document).encode()
        headers = {"User-Agent": "pytest-aorta", "Content-Type": "application/json", **self.headers}
        request = urllib.request.Request(url, data=data, headers=headers, method=method)  # noqa: S310 - checked_base
        try:
            with self._opened(request) as response:
                return Answer(response.status, _lower(response.headers), _text(response))
        except (OSError, http.client.HTTPException, ValueError) as error:
            return Answer(0, problem=f"{type(error).__name__}: {error}")

    def _opened(self, request: urllib.request.Request) -> Any:
        try:
            return self._opener.open(request, timeout=_REQUEST_S)
        except urllib.error.HTTPError as error:  # an answer of any status but success
            return error

    def _error(self, request: str, answer: Answer) -> ApiError:
        said = self._safe(_message(answer))
        text = f"{self.name}: {request}: {f'status {answer.status}' if answer.status else 'no answer'}"
        text += f": {said}" if said else ""
        if 300 <= answer.status < 400:
            return ApiError(
                f"{text}: a redirect to another host is not followed, because the token would be sent there"
            )
        if answer.status == 0 or answer.status >= 500:
            return Unanswered(text)
        if answer.status in (401, 403) and not answer.is_throttled:
            return AccessDenied(f"{text}; {self.remedy}")
        return NotFound(text) if answer.status == 404 else ApiError(text)

    def _safe(self, text: str) -> str:
        return printable(brief(" ".join(text.replace(self.token, "***").split()), 300))


def _delay(answer: Answer, attempt: int, *, is_repeatable: bool) -> float | None:
    """Return the seconds to wait before the request is repeated; None if it is not to be repeated."""
    if answer.is_throttled:
        return _throttled_s(answer.headers)
    if is_repeatable and (answer.status == 0 or answer.status >= 500):
        return float(2**attempt)
    return None


def _throttled_s(headers: Mapping[str, str]) -> float:
    if (after := headers.get("retry-after")) is not None:
        return float(after) if after.isascii() and after.isdigit() else _until(after)
    reset = headers.get("x-ratelimit-reset") or headers.get("ratelimit-reset") or ""
    return max(float(reset) - time.time(), 0.0) + 1.0 if re.fullmatch(r"\d{1,12}", reset) else _THROTTLED_S


def _until(date: str) -> float:
    """Return the seconds until an HTTP date."""
    try:
        moment = email.utils.parsedate_to_datetime(date)
    except ValueError:
        return _THROTTLED_S
    return max((moment.replace(tzinfo=moment.tzinfo or UTC) - datetime.now(UTC)).total_seconds(), 0.0)


def _message(answer: Answer) -> str:
    """Return the message of a failed request, without the document around it."""
    try:
        document = json.loads(answer.text)
    except (ValueError, RecursionError):
        return answer.problem or answer.text
    shown = document.get("message", document.get("error", document)) if isinstance(document, dict) else document
    more = document.get("errors") if isinstance(document, dict) else None
    return f"{shown if isinstance(shown, str) else json.dumps(shown)}{f' {json.dumps(more)}' if more else ''}"


def _lower(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def _text(response: Any) -> str:
    """Return the body of an answer.

    Raises:
        TimeoutError: The body did not end within the time of a request.
        ValueError: The body is too large.
    """
    deadline, parts, size = time.monotonic() + _REQUEST_S, [], 0
    while part := response.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if size > _MAX_ANSWER:
            raise ValueError(f"the answer has more than {_MAX_ANSWER} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError(f"the answer did not end within {_REQUEST_S:.0f} s")
    return b"".join(parts).decode("utf-8", "replace")
