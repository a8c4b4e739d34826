"""A node's part of a launch over several nodes, and the files in which nodes meet."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import signal
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

from pytest_aorta.common import variables
from pytest_aorta.common.errors import AortaError, LaunchError, LeaseError
from pytest_aorta.common.files import PACKAGE_ROOT, UnreadableFile, files_below, raised_as, write_json
from pytest_aorta.common.model import Model, read_model, to_builtins
from pytest_aorta.launch.guarded import GuardedLaunch
from pytest_aorta.launch.leases import LeasedWorld, lease
from pytest_aorta.launch.watch import is_readable
from pytest_aorta.plan.accelerators import visible_devices
from pytest_aorta.plan.launch_plan import LaunchPlan, read_plan
from pytest_aorta.result.folder import NODES_FOLDER, PLAN_FILE, node_folder
from pytest_aorta.result.outcome import EndReason, LaunchOutcome

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
    """Orders of node 0 to the node agents."""

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


# What each side leaves for the other: its introduction, its signs of life, and how a node's part has ended.
_FILES: dict[type, str] = {Hello: "hello.json", Heartbeat: "heartbeat.json", LaunchOutcome: "verdict.json"}
Record = TypeVar("Record", Hello, Heartbeat, LaunchOutcome)


def write(folder: Path, record: Hello | Heartbeat | LaunchOutcome) -> None:
    """Write a record into a side's folder, in place of that side's former record of this kind."""
    write_json(folder / _FILES[type(record)], to_builtins(record), durable=False)


def read(folder: Path, kind: type[Record]) -> Record | None:
    """Return a side's record; None while there is none."""
    # A client of NFS keeps for up to a minute that a file is absent, unless it opens the folder again.
    path = folder / _FILES[kind]
    with suppress(OSError, UnreadableFile):
        if path in folder.iterdir():
            return read_model(path, kind, max_bytes=_MAX_BYTES)
    return None


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

    def __exit__(self, *error: object) -> None:
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
    with suppress(PackageNotFoundError):
        return version(name)
    return "not installed"


# The first variable that is set gives this node's number: ours, Slurm's, or that of a Kubernetes Indexed Job.
NODE_RANK_VARIABLES = (variables.NODE_RANK, "SLURM_NODEID", "JOB_COMPLETION_INDEX")
# Limit of the wait for devices that other launches hold; the other nodes' ranks wait meanwhile.
LEASE_S = 30.0


def node_rank(given: int | None, environ: Mapping[str, str] = os.environ) -> int:
    """Return this node's number, from 0.

    Raises:
        LaunchError: No variable gives the number, or its value is not a number.
    """
    if given is not None:
        return given
    for name in NODE_RANK_VARIABLES:
        if name in environ:
            if not re.fullmatch(r"[0-9]{1,6}", environ[name]):
                raise LaunchError(f"{name}={environ[name]!r}, allowed is an integer of 0 or more")
            return int(environ[name])
    names = ", ".join(NODE_RANK_VARIABLES)
    raise LaunchError(f"this node's number is unknown: give --node-rank, or set one of {names}")


def take_part(run_dir: Path, node: int) -> None:
    """Run node ``node``'s part of the launch in ``run_dir``, and leave its verdict there.

    On SIGTERM, with which a cluster takes a node away, the agent ends the ranks first.

    Raises:
        LaunchError: This node sees no launch there, or is no node of the launch; nothing was started.
    """
    plan, folder = _joined(run_dir, node), node_folder(run_dir, node)
    terminated = list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, _: terminated.append(number))
    with Heart(folder):
        zero = Pulse(run_dir / NODES_FOLDER)
        try:
            outcome = _run(plan.replace(run_dir=folder, node=node, lease_fds=()), zero, terminated)
        except AortaError as error:
            outcome = _nothing(EndReason.NODE_MISMATCH, str(error))
        if terminated and zero.orders != Orders.STOP:
            outcome = outcome.replace(reason=EndReason.NODE_LOST)
        write(folder, outcome)
    signal.signal(signal.SIGTERM, before)
    if terminated:
        signal.raise_signal(signal.SIGTERM)


def _joined(run_dir: Path, node: int) -> LaunchPlan:
    """Return the plan of the launch after this node has introduced itself."""
    if not run_dir.is_dir():
        raise LaunchError(
            f"run folder {run_dir} is not on {own_hello().host}: --aorta-results has to name a folder on a file system "
            f"that every node shares"
        )
    plan, folder = read_plan(run_dir / PLAN_FILE), node_folder(run_dir, node)
    if node >= plan.world.nodes:
        raise LaunchError(
            f"{own_hello().host} says it is node {node}; the launcher has to start one agent on each of "
            f"{plan.world.nodes} nodes, whose numbers start at 0"
        )
    try:
        # Of two agents that start at once, only one creates the file.
        (folder / "claimed").touch(exist_ok=False)
    except FileExistsError:
        where = f"one agent on each of {plan.world.nodes} nodes"
        other = read(folder, Hello)
        host = other.host if other else "another agent"
        text = f"{own_hello().host} says it is node {node}, and so does {host}; the launcher has to start {where}"
        write(folder, _nothing(EndReason.NODE_LAUNCHER, text))
        raise LaunchError(text) from None
    write(folder, own_hello())
    # Whoever owns the folder could have written the plan, which names programs.
    owner, own = run_dir.stat().st_uid, (folder / "hello.json").stat().st_uid
    if owner != own:
        raise LaunchError(f"run folder {run_dir} belongs to user {owner}, and files of this agent to user {own}")
    return plan


def _run(plan: LaunchPlan, zero: Pulse, terminated: list[int]) -> LaunchOutcome:
    """Run the plan until it has ended, or node 0 asks for its end or is silent, or SIGTERM has arrived."""
    _check_node_zero(plan)
    _check_files(plan)
    while zero.silent_s() < LOST_S and zero.orders == Orders.WAIT and not terminated:
        time.sleep(TICK_S)
    if terminated or zero.orders != Orders.RUN:
        return _nothing(EndReason.STOPPED)
    with ExitStack() as leases:
        plan = _on_own_devices(plan, leases)
        with GuardedLaunch(plan, os.environ) as launch:
            is_stopped = False
            while not (is_readable(launch, TICK_S) and launch.has_ended()):
                if zero.silent_s() > LOST_S:
                    break  # leaving the block ends the ranks
                if not is_stopped and (zero.orders != Orders.RUN or terminated):
                    is_stopped = True
                    launch.stop()
        return launch.outcome()


def _nothing(reason: EndReason, detail: str = "") -> LaunchOutcome:
    """Return the outcome of a node that has started nothing."""
    return LaunchOutcome(reason, None, (), (), 0.0, detail=detail)


def _check_node_zero(plan: LaunchPlan) -> None:
    """Check that pytest runs on node 0, and in the same versions."""
    zero, own = read(plan.run_dir.parent, Hello) or own_hello(), own_hello()
    if plan.node == 0 and zero.host != own.host:
        raise LaunchError(f"pytest runs on {zero.host} and node 0 is {own.host}; pytest has to run on node 0")
    different = [
        f"{name} {own.versions.get(name)} (node 0: {there})"
        for name, there in zero.versions.items()
        if own.versions.get(name) != there
    ]
    if different:
        raise LaunchError(f"{', '.join(different)}; versions have to be equal on every node")


def _check_files(plan: LaunchPlan) -> None:
    folder = [plan.spec.folder] if plan.spec is not None and plan.spec.module is None else []
    script = [Path(plan.script)] if plan.script is not None and plan.script.endswith(".py") else []
    needed = [plan.cwd, *folder, *script]
    if absent := [str(path) for path in needed if not path.exists()]:
        raise LaunchError(f"{', '.join(absent)} is missing; every node needs the code at the same path as node 0")


def _on_own_devices(plan: LaunchPlan, leases: ExitStack) -> LaunchPlan:
    """Return the plan with leased devices of this node; pytest has already leased node 0's devices."""
    if plan.node == 0:
        return plan
    world = plan.world
    devices = visible_devices() if world.device == "cuda" else []
    if world.device == "cuda" and len(devices) < world.ranks_per_node:
        raise LaunchError(f"GPUs: {len(devices)} are visible, and {world.ranks_per_node} ranks need one each")
    owner = f"node {plan.node} of {plan.name}"
    leased = LeasedWorld(world, devices, functools.partial(lease, exclusive=True, wait_s=LEASE_S, owner=owner))
    leases.callback(leased.release)
    with raised_as(LaunchError, "devices are in use: ", LeaseError):
        own = leased.world()
    there, here = ({device.model for device in chosen} for chosen in (world.devices, own.devices))
    if there != here:
        # Step times would mix two kinds of machine.
        raise LaunchError(f"GPUs are {sorted(here)}, node 0's are {sorted(there)}; every node needs the same model")
    return plan.replace(world=own, lease_fds=leased.fds)
