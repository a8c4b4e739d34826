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
    """In the body SIGTERM raises ``Terminated``, once, unless somebody handles it already or this is no main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    # A second one must not disturb what the first one has begun.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated
