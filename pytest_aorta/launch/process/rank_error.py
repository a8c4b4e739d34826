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


def write_error(folder: Path, error: BaseException) -> None:
    """Write the error to standard error and to the rank's folder, with its time in nanoseconds.

    torchrun orders failures by whole seconds only. The frames that started the rank's code are left out, except in the
    file's ``full_traceback``.
    """
    time_ns = time.time_ns()
    text = shown_traceback(error)
    sys.stderr.write(exit_message(error) if isinstance(error, SystemExit) else text)
    document: dict[str, Any] = {
        "time_ns": time_ns,
        "type": type(error).__name__,
        "message": str(error)[:_MAX_MESSAGE],
        "traceback": text[-_MAX_TRACEBACK:],
        "full_traceback": "".join(traceback.format_exception(error))[-_MAX_TRACEBACK:],
    }
    with suppress(OSError):  # a full disk must not keep the rank from ending
        write_json(folder / ERROR_FILE, document)


def exit_message(error: SystemExit) -> str:
    """Return the text that the interpreter writes when a script exits: none for an exit code, else the given text."""
    return "" if error.code is None or isinstance(error.code, int) else f"{error.code}\n"


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
