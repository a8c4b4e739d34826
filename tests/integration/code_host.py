"""A server on this host that behaves as the APIs of GitHub and GitLab do for the comments of one pull request."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

# Token -> login of its user. GitHub's Actions and GitLab's jobs have tokens without a user.
ACTIONS, READ_ONLY, PERSON, APP = "ghs_actions", "ghs_readonly", "ghp_person", "ghs_app"
PROJECT, JOB = "glpat-project", "job-64"
LOGINS = {
    ACTIONS: "github-actions[bot]", READ_ONLY: "github-actions[bot]", PERSON: "person", APP: "other-app[bot]",
    PROJECT: "project_7_bot", JOB: "",
}  # fmt: skip
WITHOUT_USER = (ACTIONS, READ_ONLY, APP, JOB)
REPOSITORY, NUMBER, PROJECT_ID = "octo/repo", 12, 7


@dataclass
class Fault:
    """An answer in place of the usual one.

    With ``after``, the request is carried out first. ``pause_s`` is the time before each byte of the body.
    """

    method: str
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: str = '{"message": "a fault"}'
    path: str = ""
    times: int = 1
    after: bool = False
    pause_s: float = 0.0


@dataclass
class Request:
    method: str
    path: str
    token: str
    headers: dict[str, str]


class CodeHost(ThreadingHTTPServer):
    """The state of the server; ``hooks`` are called before each request of a method, to simulate another run."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.comments: list[dict[str, Any]] = []
        self.pulls: list[dict[str, Any]] = []
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.hooks: dict[str, Callable[[], None]] = {}
        self.page_size: int | None = None
        self.lock = threading.RLock()
        self.last = 100

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that did not wait for the answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def add(self, body: str, author: str) -> dict[str, Any]:
        with self.lock:
            self.last += 1
            comment = {
                "id": self.last,
                "body": body,
                "user": {"login": author},
                "author": {"username": author},
                "html_url": f"{self.url}/{REPOSITORY}/pull/{NUMBER}#issuecomment-{self.last}",
            }
            self.comments.append(comment)
            return comment

    def bodies(self) -> list[str]:
        return [comment["body"] for comment in self.comments]

    def counted(self, method: str) -> int:
        return sum(request.method == method for request in self.requests)


class Handler(BaseHTTPRequestHandler):
    server: CodeHost
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def answer(self, status: int, document: object = None, headers: dict[str, str] | None = None) -> None:
        text = b"" if document is None else json.dumps(document).encode()
        self.raw(status, text, headers or {})

    def raw(self, status: int, text: bytes, headers: dict[str, str], pause_s: float = 0.0) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(text)), "Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        for part in (text,) if not pause_s else (text[place : place + 1] for place in range(len(text))):
            time.sleep(pause_s)
            self.wfile.write(part)

    def handle_any(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        document = json.loads(self.rfile.read(size) or b"null")
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        token = token or self.headers.get("PRIVATE-TOKEN") or self.headers.get("JOB-TOKEN") or ""
        parts = urlsplit(self.path)
        with self.server.lock:
            self.server.requests.append(Request(self.command, self.path, token, dict(self.headers)))
        if hook := self.server.hooks.pop(self.command, None):
            hook()
        fault = self.fault(parts.path)
        if fault is None or fault.after:
            status, answered, headers = self.usual(parts.path, parse_qs(parts.query), token, document)
        if fault is not None:
            return self.raw(fault.status, fault.body.encode(), fault.headers, fault.pause_s)
        return self.answer(status, answered, headers)

    do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = handle_any

    def fault(self, path: str) -> Fault | None:
        with self.server.lock:
            for fault in self.server.faults:
                if fault.times and fault.method == self.command and re.search(fault.path, path):
                    fault.times -= 1
                    return fault
        return None

    def usual(
        self, path: str, query: dict[str, list[str]], token: str, document: Any
    ) -> tuple[int, Any, dict[str, str]]:
        with self.server.lock:
            if token not in LOGINS:
                return 401, {"message": "Bad credentials"}, {}
            if path in ("/user", "/api/v4/user"):
                return self.user(token)
            if path == f"/repos/{REPOSITORY}/pulls":
                head = query["head"][0]
                found = [pull for pull in self.server.pulls if pull["head"]["label"] == head]
                return 200, found, {}
            lists = (
                f"/repos/{REPOSITORY}/issues/{NUMBER}/comments",
                f"/api/v4/projects/{PROJECT_ID}/merge_requests/{NUMBER}/notes",
            )
            if path in lists:
                return self.listed(path, query, token, document)
            one = re.fullmatch(rf"(?:/repos/{REPOSITORY}/issues/comments|{re.escape(lists[1])})/(\d+)", path)
            return self.changed(int(one[1]), token, document) if one else (404, {"message": "Not Found"}, {})

    def user(self, token: str) -> tuple[int, Any, dict[str, str]]:
        if token in WITHOUT_USER:
            return 403, {"message": "Resource not accessible by integration"}, {}
        return 200, {"login": LOGINS[token], "username": LOGINS[token]}, {}

    def listed(
        self, path: str, query: dict[str, list[str]], token: str, document: Any
    ) -> tuple[int, Any, dict[str, str]]:
        if token == JOB:
            return 401, {"message": "401 Unauthorized"}, {}
        if self.command == "POST":
            return self.created(token, document)
        size = min(int(query["per_page"][0]), self.server.page_size or 100)
        page = int(query.get("page", ["1"])[0])
        shown = self.server.comments[(page - 1) * size : page * size]
        more = page * size < len(self.server.comments)
        link = {"Link": f'<{self.server.url}{path}?per_page={size}&page={page + 1}>; rel="next"'} if more else {}
        return 200, shown, link

    def created(self, token: str, document: Any) -> tuple[int, Any, dict[str, str]]:
        if token == READ_ONLY:
            return 403, {"message": "Resource not accessible by integration"}, {}
        if len(document["body"]) > (65_536 if "/repos/" in self.path else 1_000_000):
            errors = [{"resource": "IssueComment", "code": "custom", "message": "body is too long"}]
            return 422, {"message": "Validation Failed", "errors": errors}, {}
        return 201, self.server.add(document["body"], LOGINS[token]), {}

    def changed(self, number: int, token: str, document: Any) -> tuple[int, Any, dict[str, str]]:
        found = [comment for comment in self.server.comments if comment["id"] == number]
        if not found:
            return 404, {"message": "Not Found"}, {}
        if token == READ_ONLY:
            return 403, {"message": "Resource not accessible by integration"}, {}
        if self.command == "DELETE":
            self.server.comments.remove(found[0])
            return 204, None, {}
        found[0]["body"] = document["body"]
        return 200, found[0], {}


@contextmanager
def serving() -> Iterator[CodeHost]:
    """Run a server until the block ends."""
    with CodeHost() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
