"""Streams, which run transfers beside compute or in line with compute.

One rule guards every buffer. A submitted transfer starts after all compute enqueued so far, that is, after the
producer of the data it reads and the last reader of the data it overwrites. Compute uses the transfer's result only
after ``Work.wait()``.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
import torch.distributed as dist

# Runs a transfer; with True as its argument, returns the handle of an asynchronous collective.
Transfer: TypeAlias = Callable[[bool], dist.Work | None]


@dataclass(frozen=True)
class Work:
    """A submitted transfer.

    Attributes:
        wait: orders compute submitted from now on behind the transfer; may be called again.
    """

    wait: Callable[[], object]


class Stream(ABC):
    """A queue that runs transfers in the order of submission."""

    @abstractmethod
    def submit(self, transfer: Transfer) -> Work:
        """Start ``transfer`` behind all compute enqueued so far."""


class InlineStream(Stream):
    """The compute stream itself, or on CPU the calling thread."""

    def submit(self, transfer: Transfer) -> Work:
        """Run ``transfer`` in line."""
        transfer(False)
        # Compute that follows is ordered behind the transfer already.
        return Work(lambda: None)


class DeviceStream(Stream):
    """A CUDA or HIP stream of its own; the host never waits."""

    def __init__(self, device: torch.device, *, priority: int = 0) -> None:
        """Make the stream; lower numbers have higher priority."""
        self._stream = torch.cuda.Stream(device, priority=priority)

    def submit(self, transfer: Transfer) -> Work:
        """Enqueue ``transfer`` behind an event recorded on the compute stream now."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # A synchronous collective is enqueued on the current stream and does not block the host.
            transfer(False)
            event = self._stream.record_event()
        return Work(lambda: torch.cuda.current_stream().wait_event(event))


class GlooStream(Stream):
    """Gloo's own threads."""

    def submit(self, transfer: Transfer) -> Work:
        """Hand ``transfer`` to the process group."""
        work = transfer(True)
        assert work is not None  # as on every rank of the process group
        return Work(work.wait)


class ThreadStream(Stream):
    """A thread, for copies on CPU ranks: torch releases Python's global lock while it copies."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)

    def submit(self, transfer: Transfer) -> Work:
        """Run ``transfer`` in the thread."""
        return Work(self._pool.submit(transfer, False).result)


def collective_stream(device: torch.device, *, beside: bool = True) -> Stream:
    """Return the stream of collectives ``beside`` compute or in line with it."""
    if not beside:
        return InlineStream()
    # High priority: the few blocks of a collective would otherwise queue behind the many of a GEMM.
    return DeviceStream(device, priority=-1) if device.type == "cuda" else GlooStream()


@dataclass
class Prefetcher:
    """A numbered sequence of transfers, each submitted ``depth`` turns before its use.

    Transfer ``n`` may write buffer ``n % (depth + 1)``: when it is submitted, the reader of transfer
    ``n - depth - 1`` is already enqueued.

    Attributes:
        transfer: makes the transfer of a number; numbers are consecutive.
        in_line: whether compute waits for the transfer of a number as soon as it is submitted.
    """

    stream: Stream
    depth: int
    transfer: Callable[[int], Transfer]
    in_line: Callable[[int], bool] = lambda _: False
    _next: int = field(default=0, init=False)
    _works: deque[Work] = field(default_factory=deque, init=False)

    def take(self, number: int, last: int) -> None:
        """Submit transfers up to ``number + depth``, but none beyond ``last``; then wait for ``number``."""
        self._next = max(self._next, number)
        while self._next <= min(number + self.depth, last):
            work = self.stream.submit(self.transfer(self._next))
            if self.in_line(self._next):
                work.wait()
            self._works.append(work)
            self._next += 1
        self._works.popleft().wait()
