"""Report of the error that ended a rank, from the first frame of the rank's own code on."""

from __future__ import annotations

import sys
import time
import traceback
from contextlib import suppress
from itertools import dropwhile
from pathlib import Path
from typing import Any

from pytest_aorta.common.files import write_json
from pytest_aorta.common.frames import is_harness
from pytest_aorta.result.folder import ERROR_FILE

_MAX_MESSAGE = 4000
_MAX_TRACEBACK = 20_000


def write_error(folder: Path | None, error: BaseException) -> None:
    """Write the error to standard error and to the rank's folder, with its time in nanoseconds.

    torchrun orders failures by whole seconds only. The frames that started the rank's code are left out, except in the
    file's ``full_traceback``. Without a folder the error is that of a process that the rank has forked.
    """
    time_ns = time.time_ns()
    text = shown_traceback(error)
    with suppress(Exception):  # the script may have closed or replaced standard error
        sys.stderr.write(exit_message(error) if isinstance(error, SystemExit) else text)
    if folder is None:
        return
    document: dict[str, Any] = {
        "time_ns": time_ns,
        "type": type(error).__name__,
        "message": _message(error)[:_MAX_MESSAGE],
        "traceback": _ends(text),
        "full_traceback": _ends("".join(traceback.format_exception(error))),
    }
    with suppress(OSError):  # a full disk must not keep the rank from ending
        write_json(folder / ERROR_FILE, document)


def exit_message(error: SystemExit) -> str:
    """Return the text that the interpreter writes when a script exits: none for an exit code, else the given text."""
    return "" if error.code is None or isinstance(error.code, int) else f"{error.code}\n"


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as problem:  # noqa: BLE001 - the text is computed by the script's own class
        return f"(no message: its __str__ raised {type(problem).__name__})"


def _ends(text: str) -> str:
    """Return a traceback, without its middle if it is long: frames are at its beginning, and its end is the message."""
    half = _MAX_TRACEBACK // 2
    return text if len(text) <= _MAX_TRACEBACK else f"{text[:half]}\n...\n{text[-half:]}"


def shown_traceback(error: BaseException) -> str:
    """Return the traceback from the first frame outside of the harness on; without such a frame, only the message.

    The tracebacks of the errors that led to this error are shortened in the same way.
    """
    found = traceback.TracebackException.from_exception(error)
    _drop_harness(found)
    return "".join(found.format())


def _drop_harness(found: traceback.TracebackException) -> None:
    frames = list(dropwhile(lambda frame: is_harness(frame.filename), found.stack))
    # Without a stack, the heading of a traceback is left out too.
    found.stack = traceback.StackSummary.from_list(frames) if frames else None  # type: ignore[assignment]
    for other in (found.__cause__, found.__context__, *(found.exceptions or ())):
        if other is not None:
            _drop_harness(other)
