"""A lane for copies on a CPU rank: a thread, since torch releases Python's global lock while it copies."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from pytest_aorta.worker import Transfer

from ..common.lanes import Lane, Ticket


class _Running(Ticket):
    def __init__(self, future: Future[object]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class ThreadLane(Lane):
    """A thread that runs submitted transfers."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)

    def submit(self, transfer: Transfer) -> Ticket:
        """Run ``transfer`` in the thread."""
        return _Running(self._pool.submit(transfer, False))
