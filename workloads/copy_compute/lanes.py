"""Where copies run on a CPU rank: in a thread, since torch lets go of Python's lock while it copies."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from pytest_aorta.worker import Transfer

from ..fsdp.lanes import Lane, Ticket


class _Running(Ticket):
    def __init__(self, future: Future[object]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class ThreadLane(Lane):
    """One thread; it is idle but for submitted transfers."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)

    def submit(self, transfer: Transfer) -> Ticket:
        """Run ``transfer`` in the thread."""
        return _Running(self._pool.submit(transfer, False))
