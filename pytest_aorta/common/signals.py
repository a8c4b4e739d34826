"""SIGTERM handled as Ctrl-C: a process that runs launches has to end them and keep finished results before it exits."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


class Terminated(KeyboardInterrupt):
    """Raised in the main thread when SIGTERM arrives."""


@contextmanager
def terminable() -> Iterator[None]:
    """Raise ``Terminated`` in the body on the first SIGTERM.

    Does nothing outside the main thread, or where another handler for SIGTERM is installed.
    """
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before not in (signal.SIG_DFL, _terminate):
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let SIGINT and SIGTERM take effect after the body, which creates or removes what an interruption would leave.

    The body has to be short, because the user waits. Does nothing outside the main thread, where Python runs no
    handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: dict[int, FrameType | None] = {}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    delayed = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in delayed:
        signal.signal(number, arrived.__setitem__)
    try:
        yield
    finally:
        for number, handler in delayed.items():
            signal.signal(number, handler)
        for came, frame in arrived.items():
            delayed[signal.Signals(came)](came, frame)


def _terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    # A second SIGTERM must not disturb the cleanup that the first one has started.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated
