"""Waiting for open files with ``poll``, which, unlike ``select``, takes file descriptors of 1024 and above."""

from __future__ import annotations

import math
import select
from collections.abc import Sequence
from typing import Protocol, TypeVar


class HasFileno(Protocol):
    """An open file."""

    def fileno(self) -> int:
        """Return the file descriptor."""


Source = TypeVar("Source", bound=HasFileno | int)


def readable(sources: Sequence[Source], limit_s: float | None) -> list[Source]:
    """Return the sources that can be read without blocking, in the given order; wait until there is one.

    Args:
        sources: Open files or file descriptors, each of them once.
        limit_s: Limit of the wait in seconds, after which the list is empty; None waits without a limit.
    """
    by_fd = {source if isinstance(source, int) else source.fileno(): source for source in sources}
    events = select.poll()
    for fd in by_fd:
        events.register(fd, select.POLLIN)
    ready = {fd for fd, _ in events.poll(None if limit_s is None else math.ceil(max(limit_s, 0.0) * 1000))}
    return [source for fd, source in by_fd.items() if fd in ready]


def is_readable(source: HasFileno | int, limit_s: float | None) -> bool:
    """Wait until a source can be read without blocking; return whether it can be read after ``limit_s`` seconds."""
    return bool(readable([source], limit_s))
