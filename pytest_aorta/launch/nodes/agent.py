"""The node agent, ``aorta agent``: one node's part of launches over several nodes.

The agent connects to node 0, receives a plan, runs the plan under a guard of this node, and sends back the ranks'
files. The agent ends the ranks when node 0 asks for it or is lost. No shared file system is needed: ranks write to a
folder of this node, which is deleted when node 0 has received every file.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from pytest_aorta.common import variables
from pytest_aorta.common.errors import AortaError, LaunchError, LeaseError
from pytest_aorta.common.model import to_builtins
from pytest_aorta.common.regular import open_regular
from pytest_aorta.launch.guarded import GuardedLaunch
from pytest_aorta.launch.leases import LeasedWorld, mark_survivors
from pytest_aorta.launch.nodes.files import node_files
from pytest_aorta.launch.nodes.handover import on_devices, plan_from_json, versions
from pytest_aorta.launch.nodes.network import interface_of, listen
from pytest_aorta.launch.nodes.wire import CHUNK_BYTES, HEARTBEAT_S, LOST_S, Wire, WireError, WrongToken, encode
from pytest_aorta.launch.readiness import is_readable, readable
from pytest_aorta.plan.accelerators import visible_devices
from pytest_aorta.plan.launch_plan import LaunchPlan, NodePart
from pytest_aorta.result.folder import rank_folder, rank_pids, steps_entered

CONNECT_S = 10.0
# Pauses between attempts to connect double from the first to the second value.
RETRY_S = 0.1
MAX_RETRY_S = 2.0
PREPARE_TICK_S = 0.01
# Limit of the wait for devices that other launches hold; the other nodes' ranks wait meanwhile.
LEASE_S = 30.0


class NodeZeroLost(AortaError):
    """The connection to node 0 broke, or could not be made."""


@dataclass
class Agent:
    """This node's agent.

    Attributes:
        endpoint: Host and port of node 0.
        rank: This node's number, from 0.
        token: The secret that both sides prove to each other.
        is_waiting: Whether the agent was started before the launch and stays for the next launch.
        join_timeout_s: Seconds within which node 0 has to accept this agent.
    """

    endpoint: tuple[str, int]
    rank: int
    token: str
    is_waiting: bool = False
    join_timeout_s: float = 0.0
    _sent_s: float = field(default=0.0, init=False)
    _received_s: float = field(default=0.0, init=False)
    _is_stopping: bool = field(default=False, init=False)
    _is_terminated: bool = field(default=False, init=False)

    def serve(self) -> None:
        """Take part in one launch.

        Raises:
            NodeZeroLost: Node 0 can't be reached, has a different token, or was lost; every rank has been ended.
        """
        # Before connecting: node 0 waits LOST_S for the hello, and reading a cold network disk can take longer.
        own_versions = versions()
        with ExitStack() as stack:
            wire = self.connect(stack)
            store = stack.enter_context(listen(wire.address, 0)) if self.rank == 0 else None
            wire.send(self.hello(wire, store, own_versions))
            self._received_s, self._is_stopping = time.monotonic(), False
            try:
                message = self.await_message(wire, "plan")
                try:
                    with self.outliving_sigterm():
                        self.run(wire, message, store)
                except AortaError as error:
                    wire.send({"type": "refused", "text": str(error)})
                    self.await_message(wire, "bye")
            except WireError as error:
                raise NodeZeroLost(f"node 0 was lost: {error}") from None

    @contextmanager
    def outliving_sigterm(self) -> Iterator[None]:
        """On SIGTERM, end the ranks first, and this process only after their files have been sent.

        srun sends SIGTERM when an agent has died on another node.
        """

        def note(*_: object) -> None:
            self._is_stopping = self._is_terminated = True

        before = signal.signal(signal.SIGTERM, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
            if self._is_terminated:
                signal.raise_signal(signal.SIGTERM)

    def connect(self, stack: ExitStack) -> Wire:
        """Connect to node 0, within ``join_timeout_s``; ``stack`` closes the connection.

        Node 0 closes a connection if too many others wait to prove the token, so this method tries again.

        Raises:
            NodeZeroLost: Node 0 can't be reached within that time, or has a different token.
        """
        deadline_s, pause_s = time.monotonic() + self.join_timeout_s, RETRY_S
        while True:
            try:
                return self.connect_once(stack)
            except (OSError, WireError) as error:
                if isinstance(error, WrongToken) or time.monotonic() + pause_s > deadline_s:
                    where = f"{self.endpoint[0]}:{self.endpoint[1]}"
                    raise NodeZeroLost(f"node 0 can't be reached at {where}: {error}") from None
            # Agents of many nodes start together, and must not try again together.
            time.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - not a secret
            pause_s = min(2 * pause_s, MAX_RETRY_S)

    def connect_once(self, stack: ExitStack) -> Wire:
        """Connect to node 0 once.

        Raises:
            OSError, WireError: Node 0 does not answer, closes the connection, or has a different token.
        """
        with ExitStack() as undo:
            connection = undo.enter_context(socket.create_connection(self.endpoint, CONNECT_S))
            wire = Wire(connection, self.token.encode(), is_server=False)
            undo.callback(wire.close)
            stack.push(undo.pop_all())
        return wire

    def hello(self, wire: Wire, store: socket.socket | None, own_versions: dict[str, str]) -> dict[str, Any]:
        """Return the message that introduces this agent to node 0."""
        return {
            "type": "hello",
            "node_rank": self.rank,
            "host": socket.gethostname(),
            "address": wire.address,
            "versions": own_versions,
            "is_waiting": self.is_waiting,
            "store_port": store.getsockname()[1] if store else None,
        }

    def await_message(self, wire: Wire, kind: str) -> dict[str, Any]:
        """Return the next message of this kind."""
        while True:
            for message in self.turn(wire, None, {"ranks": {}, "folder": ""}):
                if message.get("type") == kind:
                    return message

    def turn(
        self, wire: Wire, launch: GuardedLaunch | None, progress: dict[str, Any], limit_s: float = HEARTBEAT_S
    ) -> list[dict[str, Any]]:
        """Wait for messages or the launch's end, at most ``limit_s`` seconds, and send a heartbeat with ``progress``.

        Raises:
            WireError: Node 0 has closed the connection, or has sent nothing for LOST_S.
        """
        sources: list[Wire | GuardedLaunch] = [wire, launch] if launch else [wire]
        ready = readable(sources, limit_s)
        now_s = time.monotonic()
        messages = []
        if wire in ready:
            messages, self._received_s = wire.receive(), now_s
            # The request to stop may arrive while the devices are being prepared.
            self._is_stopping |= any(message.get("type") == "stop" for message in messages)
        elif now_s - self._received_s > LOST_S:
            raise WireError(f"no heartbeat for {now_s - self._received_s:.0f} s")
        if now_s - self._sent_s >= HEARTBEAT_S:
            self._sent_s = now_s
            try:
                wire.send({"type": "heartbeat", **progress})
            except WireError:
                # Node 0's last messages come first; the next turn reports the failure.
                if not messages:
                    raise
        return messages

    def run(self, wire: Wire, message: dict[str, Any], store: socket.socket | None) -> None:
        """Run the plan and send the ranks' files.

        Raises:
            AortaError: This node can't run the plan; nothing was started.
        """
        folder = Path(tempfile.mkdtemp(prefix="aorta-node-"))
        plan = plan_from_json(message["plan"], folder / "run")
        try:
            refuse_absent(plan)
            with ExitStack() as leases:
                plan = replace(self.prepared(wire, plan, leases), part=node_part(wire, message, store))
                with GuardedLaunch(plan, os.environ) as launch:
                    if store:
                        store.close()
                    self.attend(wire, plan, launch)
                outcome = launch.outcome()
                mark_survivors(plan.world, outcome, f"node {self.rank} of {plan.name}")
        except AortaError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        except WireError:
            print(f"aorta agent: node 0 was lost; ranks have been ended, their files are in {folder}", file=sys.stderr)
            raise
        self.send_files(wire, plan, to_builtins(outcome))
        shutil.rmtree(folder, ignore_errors=True)

    def prepared(self, wire: Wire, plan: LaunchPlan, leases: ExitStack) -> LaunchPlan:
        """Return the plan on this node's devices.

        A thread looks for the devices: sleeping devices can take longer to answer than node 0 waits for a heartbeat.
        """
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(self.on_this_node, plan, leases)
            while not found.done():
                self.turn(wire, None, {"ranks": {}, "folder": str(plan.run_dir)}, PREPARE_TICK_S)
        return found.result()

    def on_this_node(self, plan: LaunchPlan, leases: ExitStack) -> LaunchPlan:
        """Return the plan with leased devices of this node; pytest has already leased node 0's devices."""
        if self.rank == 0:
            return plan
        world = plan.world
        devices = visible_devices() if world.device == "cuda" else []
        if world.device == "cuda" and len(devices) < world.ranks_per_node:
            raise LaunchError(f"GPUs: {len(devices)} are visible, and {world.ranks_per_node} ranks need one each")
        leased = LeasedWorld(world, devices, exclusive=True, wait_s=LEASE_S, owner=f"node {self.rank} of {plan.name}")
        leases.callback(leased.release)
        try:
            world = leased.world()
        except LeaseError as error:
            raise LaunchError(f"devices are in use: {error}") from None
        return replace(on_devices(plan, world.devices), lease_fds=leased.fds)

    def attend(self, wire: Wire, plan: LaunchPlan, launch: GuardedLaunch) -> None:
        """Wait until the launch has ended, by itself or because node 0 asked for it."""
        while True:
            self.turn(wire, launch, {"ranks": started_ranks(plan), "folder": str(plan.run_dir)})
            if self._is_stopping:
                launch.stop()
            if is_readable(launch, 0) and launch.has_ended():
                return

    def send_files(self, wire: Wire, plan: LaunchPlan, outcome: dict[str, Any]) -> None:
        """Send every file that node 0 reads, then the launch's outcome, and wait until node 0 has received them."""
        for name, path, offset, size in node_files(plan.run_dir):
            is_first = True
            with suppress(OSError), open_regular(path) as file:
                file.seek(offset)
                # The mark of a suspended rank is empty.
                while (data := file.read(min(size, CHUNK_BYTES))) or is_first:
                    size -= len(data)
                    wire.send({"type": "file", "name": name, "data": encode(data), "is_first": is_first})
                    is_first = False
        wire.send({"type": "end", "outcome": outcome, "is_terminated": self._is_terminated})
        self.await_message(wire, "bye")


def node_part(wire: Wire, message: dict[str, Any], store: socket.socket | None) -> NodePart:
    """Return this node's part of the launch."""
    return NodePart(
        num_nodes=message["num_nodes"],
        endpoint=message["endpoint"],
        run_id=message["run_id"],
        local_address=wire.address,
        interface=interface_of(wire.address),
        store_fd=store.fileno() if store else None,
    )


def refuse_absent(plan: LaunchPlan) -> None:
    """Check that the plan's code is on this node, at the same path as on node 0.

    Raises:
        LaunchError: A folder or script is missing.
    """
    needed = [plan.cwd]
    if plan.spec is not None and plan.spec.module is None:
        needed.append(plan.spec.folder)
    if plan.script is not None and plan.script.endswith(".py"):
        needed.append(Path(plan.script))
    if absent := [str(path) for path in needed if not path.exists()]:
        raise LaunchError(f"{', '.join(absent)} is missing; every node needs the code at the same path as node 0")


def started_ranks(plan: LaunchPlan) -> dict[int, dict[str, int]]:
    """Return, by rank, the process id and the number of measured steps entered, for ranks that have started here."""
    return {
        rank: {"pid": pid, "steps": steps_entered(rank_folder(plan.run_dir, rank))}
        for rank, pid in rank_pids(plan.run_dir).items()
    }


def read_token() -> str:
    """Return the secret that node 0 and its node agents share.

    Raises:
        LaunchError: The variable is not set.
    """
    token = os.environ.get(variables.AGENT_TOKEN, "")
    if not token:
        raise LaunchError(
            f"{variables.AGENT_TOKEN} is not set: a launcher has to hand on node 0's environment; for agents that "
            f"wait, set the same secret for them and for pytest"
        )
    return token
