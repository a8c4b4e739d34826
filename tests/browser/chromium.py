"""Drives a headless Chromium through the DevTools protocol over a pipe, without another package.

The protocol: https://chromedevtools.github.io/devtools-protocol/ - messages are JSON, each ended by a zero byte.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
_TIMEOUT_S = 60.0


def find_chromium() -> str | None:
    """Return the path of an installed Chromium; None without one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """A tab of the browser; ``events`` are the events received so far."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._buffer = b""
        self._last = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and return its result."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self.events.append(answer)

    def attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, file: Path, *, dark: bool = False) -> None:
        self.use_theme(dark=dark)
        self.call("Page.navigate", url=file.resolve().as_uri())
        self.wait_for("document.readyState === 'complete'")

    def use_theme(self, *, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def value(self, expression: str) -> Any:
        """Return the value of an expression on the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while not self.value(expression):
            assert time.monotonic() < deadline, f"not within {_TIMEOUT_S:g} s: {expression}"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        button: dict[str, Any] = {"button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=start[0], y=start[1])
        self.call("Input.dispatchMouseEvent", type="mousePressed", x=start[0], y=start[1], **button)
        for fraction in (0.3, 0.6, 1.0):
            x, y = (a + (b - a) * fraction for a, b in zip(start, end, strict=True))
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, buttons=1)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", x=end[0], y=end[1], **button)

    def screenshot(self, file: Path) -> None:
        data = self.call("Page.captureScreenshot", format="png")["data"]
        file.write_bytes(base64.b64decode(data))

    @property
    def complaints(self) -> list[str]:
        """Return errors and warnings of the console, and uncaught exceptions."""
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded")
        found = [json.dumps(event["params"]) for event in self.events if event.get("method") in kinds]
        logged = (event["params"] for event in self.events if event.get("method") == "Runtime.consoleAPICalled")
        return found + [json.dumps(call) for call in logged if call["type"] in ("error", "warning", "assert")]

    @property
    def requests(self) -> list[str]:
        """Return the requested addresses, except those of the page itself and of data inside it."""
        sent = (event for event in self.events if event.get("method") == "Network.requestWillBeSent")
        urls = [event["params"]["request"]["url"] for event in sent]
        return [url for url in urls if not url.startswith(("data:", "file:"))]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._from], [], [], _TIMEOUT_S)[0], "Chromium does not answer"
            chunk = os.read(self._from, 1 << 20)
            assert chunk, "Chromium is gone"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))


@contextmanager
def open_browser(program: str, profile: Path) -> Iterator[Page]:
    """Start a separate browser, and end it afterwards."""
    to_child, to_browser = os.pipe()
    from_browser, from_child = os.pipe()
    arguments = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--remote-debugging-pipe",
        f"--user-data-dir={profile}",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-dev-shm-usage",
        "about:blank",
    ]
    # The browser reads from descriptor 3 and writes to 4; a shell sets up both.
    shell = ["bash", "-c", f'exec "$@" 3<&{to_child} 4>&{from_child}', "-", program, *arguments]
    process = subprocess.Popen(
        shell, pass_fds=(to_child, from_child), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(to_child)
    os.close(from_child)
    try:
        page = Page(to_browser, from_browser)
        page.attach()
        yield page
    finally:
        process.terminate()
        process.wait(_TIMEOUT_S)
        os.close(to_browser)
        os.close(from_browser)
