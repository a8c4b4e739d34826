"""Last report of a rank that is stopped: its Python stacks, and NCCL's collectives in flight."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from pytest_aorta.common.files import write_bytes
from pytest_aorta.result.folder import IN_FLIGHT_FILE

Handler = Callable[..., None]
# A byte of the pipe that is no signal's number.
_END = 0


def leave_last_words(folder: Path, stacks: IO[str]) -> None:
    """Install a SIGTERM handler that writes ``stacks`` and ``folder/collectives.json``, then ends the process.

    The C handler wakes a thread that writes both files, since the main thread may wait in a collective forever. If the
    script has installed its own handler by then, the thread writes the files and leaves the process to that handler,
    which may call the handler that it has replaced. Forked children get SIGTERM's default action back, unless the
    script has its own handler.
    """
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)

    def end(*_: object) -> None:
        with suppress(BlockingIOError):  # a full pipe has kept the thread busy with signals
            os.write(write_fd, bytes([_END]))

    # First the pipe: without it, a SIGTERM that arrives after the next line would be lost.
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, end)
    os.register_at_fork(after_in_child=partial(_withdraw, end, write_fd))
    threading.Thread(target=_serve, args=(read_fd, end, folder, stacks), daemon=True, name="last words").start()


def _serve(read_fd: int, end: Handler, folder: Path, stacks: IO[str]) -> None:
    is_last = False
    while not is_last:
        # Every signal with a Python handler writes its number into the pipe.
        number = os.read(read_fd, 1)[0]
        is_last = number == _END or (number == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is end)
        if is_last or number == signal.SIGTERM:
            _write_last_words(folder, stacks)
    # signal.signal works only in the main thread.
    ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)
    os.kill(os.getpid(), signal.SIGTERM)


def _write_last_words(folder: Path, stacks: IO[str]) -> None:
    with suppress(OSError):
        faulthandler.dump_traceback(stacks, all_threads=True)
        if text := _collectives_in_flight():
            write_bytes(folder / IN_FLIGHT_FILE, text, durable=False)


def _collectives_in_flight() -> bytes | None:
    """Return NCCL's own record as JSON; None where this rank has not loaded NCCL."""
    c10d: Any = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(c10d, "_dump_nccl_trace_json", None)
    return bytes(dump(includeCollectives=True, onlyActive=True)) if dump else None


def _withdraw(end: Handler, write_fd: int) -> None:
    """Remove the handler and the pipe from a forked child, whose signals would wake the parent's thread."""
    if (wakeup_fd := signal.set_wakeup_fd(-1)) != write_fd:
        signal.set_wakeup_fd(wakeup_fd)
    if signal.getsignal(signal.SIGTERM) is end:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
