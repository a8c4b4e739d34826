"""Last report of a rank that is stopped: its Python stacks, and NCCL's collectives in flight."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from pytest_aorta.common.files import write_bytes
from pytest_aorta.result.folder import IN_FLIGHT_FILE


def leave_last_words(folder: Path, stacks: IO[str]) -> None:
    """Install a SIGTERM handler that writes ``stacks`` and ``folder/collectives.json``, then ends the process.

    The C handler wakes a thread that writes both files, since the main thread may wait in a collective forever. Forked
    children get SIGTERM's default action back.
    """
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    # First the pipe: without it, a SIGTERM that arrives after the next line would be lost.
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.register_at_fork(after_in_child=_default_action)
    threading.Thread(target=_await_sigterm, args=(read_fd, folder, stacks), daemon=True, name="last words").start()


def _await_sigterm(read_fd: int, folder: Path, stacks: IO[str]) -> None:
    # Every signal with a Python handler writes its number into the pipe.
    while os.read(read_fd, 1)[0] != signal.SIGTERM:
        pass
    with suppress(OSError):
        faulthandler.dump_traceback(stacks, all_threads=True)
        if text := _collectives_in_flight():
            write_bytes(folder / IN_FLIGHT_FILE, text, durable=False)
    # signal.signal works only in the main thread.
    ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)
    os.kill(os.getpid(), signal.SIGTERM)


def _collectives_in_flight() -> bytes | None:
    """Return NCCL's own record as JSON; None where this rank has not loaded NCCL."""
    c10d: Any = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(c10d, "_dump_nccl_trace_json", None)
    return bytes(dump(includeCollectives=True, onlyActive=True)) if dump else None


def _default_action() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
