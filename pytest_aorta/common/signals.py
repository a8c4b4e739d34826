"""SIGTERM as Ctrl-C: whoever runs launches has to end them and keep what is done, not just be gone."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


class Terminated(KeyboardInterrupt):
    """SIGTERM has come."""


@contextmanager
def terminable() -> Iterator[None]:
    """In the body SIGTERM raises ``Terminated``, once, unless others handle it already or this is no main thread."""
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before not in (signal.SIG_DFL, _terminate):
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    # A second one must not disturb what the first one has begun.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated
