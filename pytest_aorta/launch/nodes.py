"""Launches over several nodes: the agent of each node, and the coordinator that starts and follows all of them."""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from enum import StrEnum
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from pytest_aorta.common import variables
from pytest_aorta.common.errors import AortaError, LaunchError, LeaseError
from pytest_aorta.common.files import UnreadableFile, raised_as, read_json, write_json
from pytest_aorta.common.model import Model, read_model, to_builtins
from pytest_aorta.launch.guarded import GuardedLaunch, start_watcher, with_own_code
from pytest_aorta.launch.leases import LeasedWorld, lease
from pytest_aorta.launch.process.guard import descendants, prepare_agent, reap_children, write_verdict
from pytest_aorta.launch.watch import is_readable
from pytest_aorta.plan.accelerators import visible_devices
from pytest_aorta.plan.device_kind import ACCELERATED
from pytest_aorta.plan.launch_plan import LaunchPlan, read_plan
from pytest_aorta.result.evidence import log_tail
from pytest_aorta.result.folder import AGENT_FILE, AGENT_LOG, NODES_FOLDER, PLAN_FILE, node_folder, rank_folders
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
    versions = {name: _version(name) for name in ("pytest-aorta", "torch")}
    versions["python"] = ".".join(platform.python_version_tuple()[:2])
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
    has_devices = world.device in ACCELERATED
    devices = visible_devices() if has_devices else []
    if has_devices and len(devices) < world.ranks_per_node:
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


# A node that is silent for this long has lost its agent if the launcher has ended, or another node has failed.
ENDED_S = 5.0
# Every node's guard stops its ranks within 15.5 s.
STOP_S = 30.0
TERM_S = 2.0
KILL_S = 10.0
LAUNCHER_END_S = 5.0
_MAX_FAILURES_BYTES = 1 << 24


class _ParentGone(Exception):
    """Pytest has ended, or has asked for the end of the launch."""


class _LauncherFailed(Exception):
    """The launcher did not start the agents."""


class _Node:
    """Node 0's view of one node: its introduction, its verdict, and whether it still sends heartbeats."""

    def __init__(self, run_dir: Path, number: int, ranks: Sequence[int]) -> None:
        self.folder = node_folder(run_dir, number)
        self.number = number
        self.ranks = ranks
        self.hello: Hello | None = None
        self.verdict: LaunchOutcome | None = None
        self.lost = ""
        self.began_s = self.ended_s = 0.0
        self.pulse = Pulse(self.folder)

    @property
    def name(self) -> str:
        """The node's number and host, for messages."""
        return f"node {self.number} ({self.hello.host})" if self.hello else f"node {self.number}"

    @property
    def is_over(self) -> bool:
        """True once the node has ended or is lost."""
        return self.verdict is not None or bool(self.lost)

    @property
    def has_failed(self) -> bool:
        """True if the node is lost, or its launch failed."""
        ended = self.verdict and (self.verdict.reason, self.verdict.agent_status)
        return bool(self.lost) or ended not in (None, (EndReason.EXIT, 0))

    def look(self, limit_s: float) -> None:
        """Read what the node has written; a node without a heartbeat for ``limit_s`` is lost."""
        if self.hello is None:
            self.hello = read(self.folder, Hello)
            self.began_s, self.pulse = time.monotonic(), Pulse(self.folder)
        if self.hello is None or self.is_over:
            return
        # A verdict may have been written after the last heartbeat.
        silent_s = self.pulse.silent_s()
        self.verdict = read(self.folder, LaunchOutcome)
        self.ended_s = time.monotonic()
        if self.verdict is None and silent_s > limit_s:
            self.lose(f"no heartbeat for {silent_s:.0f} s")
        elif self.verdict and self.verdict.reason == EndReason.NODE_LOST:
            self.lose("its agent was sent SIGTERM")

    def lose(self, why: str) -> None:
        """Mark the node as lost."""
        self.ended_s = time.monotonic()
        ran = f"it ran {'rank' if len(self.ranks) == 1 else 'ranks'} {', '.join(map(str, self.ranks))}"
        self.lost = f"{self.name} was lost after {self.ended_s - self.began_s:.1f} s: {why}; {ran}"


class Coordinator:
    """One launch over the nodes of ``plan``."""

    def __init__(self, plan: LaunchPlan, lifeline_fd: int) -> None:
        self.plan = plan
        self.lifeline_fd = lifeline_fd
        self.nodes = [_Node(plan.run_dir, node, plan.ranks_of(node)) for node in range(plan.world.nodes)]
        self.launcher: subprocess.Popen[bytes] | None = None
        self.launcher_ended_s: float | None = None

    def run(self) -> dict[str, Any]:
        """Run the plan on every node and return the verdict, in the guard's form."""
        began_s = time.monotonic()
        folder = self.plan.run_dir / NODES_FOLDER
        write(folder, own_hello())
        with Heart(folder) as heart:
            try:
                self.start_launcher()
                self.await_nodes(began_s + self.plan.timeout_s)
                heart.order(Orders.RUN)
                self.watch(heart, time.monotonic() + self.plan.timeout_s + STOP_S)
                reason, status, detail = self.judgement()
            except _ParentGone:
                reason, status, detail = EndReason.PARENT_GONE, None, ""
            except _LauncherFailed as failure:
                reason, status = EndReason.NODE_LAUNCHER, None
                detail = f"node launcher {' '.join(self.plan.node_launcher)} {failure}"
            heart.order(Orders.STOP)
            self.await_end(time.monotonic() + STOP_S)
        self.keep_failures()
        leftover = self.end_launcher()
        outcomes = [node.verdict for node in self.nodes if node.verdict]
        return {
            "reason": reason,
            "agent_status": status,
            "stopped": [pid for outcome in outcomes for pid in outcome.stopped],
            "survivors": [*leftover, *(pid for outcome in outcomes for pid in outcome.survivors)],
            "wall_s": time.monotonic() - began_s,
            "detail": detail,
        }

    def start_launcher(self) -> None:
        """Start one node agent per node."""
        words = [word.replace("{nodes}", str(self.plan.world.nodes)) for word in self.plan.node_launcher]
        agent = [sys.executable, "-P", "-m", "pytest_aorta.cli", "agent", str(self.plan.run_dir)]
        prepare = partial(prepare_agent, os.getpid())
        with raised_as(_LauncherFailed, "can't be started: "):
            self.launcher = subprocess.Popen(
                [*words, *agent], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=prepare
            )

    def await_nodes(self, deadline_s: float) -> None:
        """Wait until every node has an agent or a node has failed."""
        while not all(node.hello for node in self.nodes) and not any(node.has_failed for node in self.nodes):
            self.turn()
            present = ", ".join(node.name for node in self.nodes if node.hello)
            count = sum(node.hello is not None for node in self.nodes)
            there = f"{count} of {len(self.nodes)} nodes had an agent{present and ': '}{present}"
            if self.launcher is not None and self.launcher_ended(2 * TICK_S) and count < len(self.nodes):
                status = self.launcher.returncode
                how = f"exit code {status}" if status >= 0 else f"signal {-status}"
                raise _LauncherFailed(f"ended with {how} when {there}")
            if time.monotonic() > deadline_s:
                raise _LauncherFailed(f"{self.plan.timeout_s:g} s after its start {there}")

    def watch(self, heart: Heart, deadline_s: float) -> None:
        """Wait until every node has ended or is lost; once a node has failed, stop the others."""
        while not all(node.is_over for node in self.nodes if node.hello):
            self.turn()
            now_s = time.monotonic()
            for node in (node for node in self.nodes if node.has_failed):
                # Ranks that wait for a lost node wait forever; ranks of a failed node get time to write their errors.
                if now_s >= node.ended_s + (0.0 if node.lost else self.plan.limits.error_grace_s):
                    heart.order(Orders.STOP)
                    deadline_s = min(deadline_s, now_s + STOP_S)
            if now_s > deadline_s:
                for node in self.nodes:
                    if not node.is_over:
                        node.lose("its launch has not ended in time")

    def turn(self) -> None:
        """Wait for TICK_S, then read what the nodes have written."""
        if is_readable(self.lifeline_fd, TICK_S):
            raise _ParentGone
        self.look()

    def look(self) -> None:
        """Read what the nodes have written."""
        is_ending = self.launcher_ended(0) or any(node.has_failed for node in self.nodes)
        for node in self.nodes:
            node.look(ENDED_S if is_ending else LOST_S)

    def launcher_ended(self, since_s: float) -> bool:
        """Return whether the launcher ended ``since_s`` seconds ago or before."""
        if self.launcher is None or self.launcher.poll() is None:
            return False
        self.launcher_ended_s = self.launcher_ended_s or time.monotonic()
        return time.monotonic() - self.launcher_ended_s >= since_s

    def judgement(self) -> tuple[EndReason, int | None, str]:
        """Return reason, exit code and detail of the first node that failed; lost nodes come first."""
        # A launcher that has lost one agent ends the others by SIGTERM: those have left a verdict.
        if lost := sorted((node for node in self.nodes if node.lost), key=lambda node: node.verdict is not None):
            return EndReason.NODE_LOST, None, "; ".join(node.lost for node in lost)
        failed = [(node, node.verdict) for node in self.nodes if node.has_failed and node.verdict]
        if not failed:
            return EndReason.EXIT, 0, ""
        # Ranks of other nodes fail because of those that a lost guard has left.
        node, outcome = min(failed, key=lambda pair: (pair[1].reason != EndReason.GUARD_LOST, pair[0].ended_s))
        if outcome.reason == EndReason.GUARD_LOST:
            return outcome.reason, None, f"{node.name}: {outcome.detail or 'its guard was killed'}"
        return outcome.reason, outcome.agent_status, outcome.detail and f"{node.name}: {outcome.detail}"

    def await_end(self, deadline_s: float) -> None:
        """Wait until every node that takes part has ended its ranks or is silent."""
        while not all(node.is_over for node in self.nodes if node.hello) and time.monotonic() < deadline_s:
            time.sleep(TICK_S)
            self.look()

    def keep_failures(self) -> None:
        """Merge the nodes' exit codes and logs into the files that a launch on one node writes."""
        for folder in rank_folders(self.plan.run_dir, self.plan.world.ranks):
            # pytest reads the ranks' files next; see :func:`read`.
            with suppress(OSError):
                list(folder.iterdir())
        merged: dict[str, list[Any]] = {}
        for node in self.nodes:
            with suppress(UnreadableFile, AttributeError):
                for name, entries in read_json(node.folder / AGENT_FILE, max_bytes=_MAX_FAILURES_BYTES).items():
                    merged.setdefault(name, []).extend(entries)
            if lines := log_tail(node.folder / AGENT_LOG):
                print(f"== {node.name} ==", *lines, sep="\n", flush=True)
        with suppress(OSError):  # a full disk must not hide the verdict
            if merged:
                write_json(self.plan.run_dir / AGENT_FILE, merged)

    def end_launcher(self) -> list[int]:
        """Wait for processes that end by themselves and kill the others; return those that could not be killed."""
        # Signal 0 does nothing.
        for number, limit_s in ((0, LAUNCHER_END_S), (signal.SIGTERM, TERM_S), (signal.SIGKILL, KILL_S)):
            deadline_s = time.monotonic() + limit_s
            for pid in _alive():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            while _alive() and time.monotonic() < deadline_s:
                time.sleep(0.02)
        return sorted(_alive())


def _alive() -> set[int]:
    """Return the process ids of all descendants."""
    reap_children()
    return descendants()


def start_coordinator(
    plan: LaunchPlan, environ: Mapping[str, str], lifeline_fd: int, verdict_fd: int
) -> subprocess.Popen[bytes]:
    """Start the coordinator in the guard's place; its node agents read the plan in the run folder."""
    spec = json.dumps({"run_dir": str(plan.run_dir), "lifeline_fd": lifeline_fd, "verdict_fd": verdict_fd})
    command = [sys.executable, "-P", "-m", "pytest_aorta.launch.nodes", spec]
    return start_watcher(plan, command, with_own_code(dict(environ)), (lifeline_fd, verdict_fd))


def main() -> None:
    """Coordinate the launch described by the first argument."""
    spec = json.loads(sys.argv[1])
    plan_file = Path(spec["run_dir"]) / PLAN_FILE
    write_verdict(spec, lambda: Coordinator(read_plan(plan_file), spec["lifeline_fd"]).run())


if __name__ == "__main__":
    main()
