"""What the nodes of a launch write for each other into the run folder, which is on a file system that they share.

``nodes`` has the files of node 0's coordinator, and ``nodes/N`` those of the agent of node N, which is also the run
folder of that node's ranks. Nothing is sent over the network: whoever may write the folder takes part in the launch.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import socket
import threading
import time
from contextlib import suppress
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from pytest_aorta.common.documents import UnreadableFile
from pytest_aorta.common.files import PACKAGE_ROOT, files_below, write_json
from pytest_aorta.common.model import Model, read_model, to_builtins
from pytest_aorta.result.outcome import LaunchOutcome

# Each side counts a heartbeat every HEARTBEAT_S, and gives the other side up when the count stays the same for LOST_S.
HEARTBEAT_S = 1.0
LOST_S = 10.0
# Pauses between two looks at the files.
TICK_S = 0.25
_MAX_BYTES = 1 << 20


class Hello(Model, frozen=True):
    """The introduction of a node.

    Attributes:
        host: Name of the host.
        versions: Versions that have to be equal on every node, by name.
    """

    host: str
    versions: dict[str, str]


class Orders(StrEnum):
    """What node 0 asks of the node agents."""

    WAIT = "wait"  # until every node has an agent
    RUN = "run"
    STOP = "stop"


class Heartbeat(Model, frozen=True):
    """A sign of life.

    Attributes:
        count: Number of this heartbeat. Clocks of hosts differ, and a file's time may be that of another host.
        orders: Orders of node 0; agents give none.
    """

    count: int
    orders: Orders = Orders.WAIT


class NodeVerdict(Model, frozen=True):
    """The end of one node's part of a launch.

    Attributes:
        outcome: Outcome that the node's guard reported, or the reason why the node started nothing.
        is_terminated: Whether the node's agent was sent SIGTERM before node 0 asked for the end.
    """

    outcome: LaunchOutcome
    is_terminated: bool = False


Record = TypeVar("Record", Hello, Heartbeat, NodeVerdict)


def write(folder: Path, record: Hello | Heartbeat | NodeVerdict) -> None:
    """Write a record into a side's folder, in place of that side's former record of this kind."""
    write_json(_file(folder, type(record)), to_builtins(record), durable=False)


def read(folder: Path, kind: type[Record]) -> Record | None:
    """Return a side's record; None while there is none."""
    # A client of NFS keeps for up to a minute that a file is absent, unless it opens the folder again.
    with suppress(OSError, UnreadableFile):
        if _file(folder, kind) in folder.iterdir():
            return read_model(_file(folder, kind), kind, max_bytes=_MAX_BYTES)
    return None


def _file(folder: Path, kind: type) -> Path:
    return folder / f"{kind.__name__.removeprefix('Node').lower()}.json"


class Heart:
    """A thread that writes the heartbeats of this side while the ``with`` block runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._orders = Orders.WAIT
        self._is_over = False
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="aorta-heart", daemon=True)

    def __enter__(self) -> Heart:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the thread."""
        self._is_over = True
        self._changed.set()
        self._thread.join()

    def order(self, orders: Orders) -> None:
        """Give orders to the node agents at once."""
        if orders != self._orders:
            self._orders = orders
            self._changed.set()

    def _beat(self) -> None:
        count = 0
        while not self._is_over:
            count += 1
            self._changed.clear()
            with suppress(OSError):  # a full disk may have room again before the others give this side up
                write(self._folder, Heartbeat(count, self._orders))
            self._changed.wait(HEARTBEAT_S)


class Pulse:
    """The heartbeats of the other side, as this side's clock sees them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last: Heartbeat | None = None
        self._since_s = time.monotonic()

    @property
    def orders(self) -> Orders:
        """The orders of the last heartbeat that was read."""
        return self._last.orders if self._last else Orders.WAIT

    def silent_s(self) -> float:
        """Read the heartbeat, and return for how many seconds it has not changed."""
        beat, now_s = read(self._folder, Heartbeat), time.monotonic()
        if beat is not None and beat != self._last:
            self._last, self._since_s = beat, now_s
        return now_s - self._since_s


@functools.cache
def own_hello() -> Hello:
    """Return this node's introduction."""
    digest = hashlib.sha256()
    for path in files_below(PACKAGE_ROOT, "*.py"):
        with suppress(FileNotFoundError):  # deleted after its folder was listed
            source = path.read_bytes()
            digest.update(f"{path.relative_to(PACKAGE_ROOT)} {len(source)}\n".encode() + source)
    versions = {
        "pytest-aorta": f"{_version('pytest-aorta')} (sources {digest.hexdigest()[:8]})",
        "torch": _version("torch"),
        "python": ".".join(platform.python_version_tuple()[:2]),
    }
    return Hello(socket.gethostname(), versions)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
