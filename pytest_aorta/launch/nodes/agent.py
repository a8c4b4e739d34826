"""``aorta agent``: one node's part of launches over several nodes.

It connects to node 0, is told a plan, runs it under a guard of this node, and brings back what the ranks left. When
node 0 says so, or is lost, the ranks are ended. Without a shared file system: ranks write to a folder of this node,
which is deleted when node 0 has all of it.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_aorta.common import variables
from pytest_aorta.common.errors import AortaError, LaunchError
from pytest_aorta.launch.guarded import GuardedLaunch
from pytest_aorta.launch.lease.queue import LeaseError
from pytest_aorta.launch.lease.world import LeasedWorld, mark_survivors
from pytest_aorta.launch.nodes.files import node_files
from pytest_aorta.launch.nodes.handover import on_devices, plan_from_json, versions
from pytest_aorta.launch.nodes.network import interface_of, listen
from pytest_aorta.launch.nodes.wire import BEAT_S, CHUNK_BYTES, LOST_S, Wire, WireError, encode
from pytest_aorta.plan.gpus import visible_devices
from pytest_aorta.plan.launch_plan import LaunchPlan, NodePart
from pytest_aorta.result.folder import PID_FILE, RANKS_FOLDER, steps_entered

CONNECT_S = 10.0
PREPARE_TICK_S = 0.01
# Who else computes here has to be gone by then; the other nodes' ranks wait meanwhile.
LEASE_S = 30.0


class NodeZeroLost(AortaError):
    """The connection to node 0 is gone, or was never there."""


@dataclass
class Agent:
    """This node's agent.

    Attributes:
        place: host and port of node 0.
        rank: which node this is.
        token: what proves both sides to each other.
        is_waiting: it was there before the launch, and stays for the next.
    """

    place: tuple[str, int]
    rank: int
    token: str
    is_waiting: bool = False
    _sent_s: float = field(default=0.0, init=False)
    _heard_s: float = field(default=0.0, init=False)
    _is_told_to_stop: bool = field(default=False, init=False)
    _is_terminated: bool = field(default=False, init=False)

    def serve(self) -> None:
        """Take part in one launch.

        Raises:
            NodeZeroLost: node 0 is not there, has another token, or was lost; ranks have been ended then.
        """
        with ExitStack() as stack:
            wire = self.connect(stack)
            store = stack.enter_context(listen(wire.address, 0)) if self.rank == 0 else None
            wire.send(self.hello(wire, store))
            self._heard_s, self._is_told_to_stop = time.monotonic(), False
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
        """SIGTERM, as srun sends it where an agent has died elsewhere, ends the ranks, and this process afterwards.

        Until then what the ranks have left would be lost.
        """

        def note(*_: object) -> None:
            self._is_told_to_stop = self._is_terminated = True

        before = signal.signal(signal.SIGTERM, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
            if self._is_terminated:
                signal.raise_signal(signal.SIGTERM)

    def connect(self, stack: ExitStack) -> Wire:
        """Connect to node 0; ``stack`` closes the connection."""
        try:
            connection = stack.enter_context(socket.create_connection(self.place, CONNECT_S))
            wire = Wire(connection, self.token.encode(), is_server=False)
            stack.callback(wire.close)
            return wire
        except (OSError, WireError) as error:
            raise NodeZeroLost(f"node 0 can't be reached at {self.place[0]}:{self.place[1]}: {error}") from None

    def hello(self, wire: Wire, store: socket.socket | None) -> dict[str, Any]:
        """Who this is."""
        return {
            "type": "hello",
            "node_rank": self.rank,
            "host": socket.gethostname(),
            "address": wire.address,
            "versions": versions(),
            "is_waiting": self.is_waiting,
            "store_port": store.getsockname()[1] if store else None,
        }

    def await_message(self, wire: Wire, kind: str) -> dict[str, Any]:
        """The next message of this kind."""
        while True:
            for message in self.turn(wire, None, {"ranks": {}, "folder": ""}):
                if message["type"] == kind:
                    return message

    def turn(
        self, wire: Wire, launch: GuardedLaunch | None, beat: dict[str, Any], limit_s: float = BEAT_S
    ) -> list[dict[str, Any]]:
        """Wait for a message or the launch's end, at most ``limit_s``, and beat.

        Raises:
            WireError: node 0 has hung up, or said nothing for too long.
        """
        sources: list[Wire | GuardedLaunch] = [wire, launch] if launch else [wire]
        ready = select.select(sources, [], [], limit_s)[0]
        now_s = time.monotonic()
        messages = []
        if wire in ready:
            messages, self._heard_s = wire.receive(), now_s
            # It may come while the devices are being looked for.
            self._is_told_to_stop |= any(message["type"] == "stop" for message in messages)
        elif now_s - self._heard_s > LOST_S:
            raise WireError(f"no word of it for {now_s - self._heard_s:.0f} s")
        if now_s - self._sent_s >= BEAT_S:
            self._sent_s = now_s
            wire.send({"type": "beat", **beat})
        return messages

    def run(self, wire: Wire, message: dict[str, Any], store: socket.socket | None) -> None:
        """Run the plan and bring what it left.

        Raises:
            AortaError: this node can't run it; nothing was started.
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
        self.bring(wire, plan, asdict(outcome))
        shutil.rmtree(folder, ignore_errors=True)

    def prepared(self, wire: Wire, plan: LaunchPlan, leases: ExitStack) -> LaunchPlan:
        """The plan on this node's devices. Devices that sleep take longer to answer than node 0 waits for a beat."""
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(self.on_this_node, plan, leases)
            while not found.done():
                self.turn(wire, None, {"ranks": {}, "folder": str(plan.run_dir)}, PREPARE_TICK_S)
        return found.result()

    def on_this_node(self, plan: LaunchPlan, leases: ExitStack) -> LaunchPlan:
        """The plan with this node's devices, which no other launch of this user has; node 0's are leased by pytest."""
        if self.rank == 0:
            return plan
        world = plan.world
        devices = visible_devices() if world.device == "cuda" else []
        if world.device == "cuda" and len(devices) < world.ranks_per_node:
            raise LaunchError(f"it has {len(devices)} visible GPUs, and runs {world.ranks_per_node} ranks")
        leased = LeasedWorld(world, devices, exclusive=True, wait_s=LEASE_S, owner=f"node {self.rank} of {plan.name}")
        leases.callback(leased.release)
        try:
            world = leased.world()
        except LeaseError as error:
            raise LaunchError(f"its devices are in use: {error}") from None
        return replace(on_devices(plan, world.devices), lease_fds=leased.fds)

    def attend(self, wire: Wire, plan: LaunchPlan, launch: GuardedLaunch) -> None:
        """Until the launch has ended, by itself or because node 0 says so."""
        while True:
            self.turn(wire, launch, {"ranks": started_ranks(plan), "folder": str(plan.run_dir)})
            if self._is_told_to_stop:
                launch.stop()
            if select.select([launch], [], [], 0)[0] and launch.has_ended():
                return

    def bring(self, wire: Wire, plan: LaunchPlan, outcome: dict[str, Any]) -> None:
        """Send every file that node 0 looks at, then how the launch ended, and wait until it has them all."""
        for name, path, offset, size in node_files(plan.run_dir):
            is_first = True
            with suppress(OSError), path.open("rb") as file:
                file.seek(offset)
                while size > 0 and (data := file.read(min(size, CHUNK_BYTES))):
                    size -= len(data)
                    wire.send({"type": "file", "name": name, "data": encode(data), "is_first": is_first})
                    is_first = False
        wire.send({"type": "end", "outcome": outcome, "is_terminated": self._is_terminated})
        self.await_message(wire, "bye")


def node_part(wire: Wire, message: dict[str, Any], store: socket.socket | None) -> NodePart:
    """What this node has to know of the others."""
    return NodePart(
        num_nodes=message["num_nodes"],
        endpoint=message["endpoint"],
        run_id=message["run_id"],
        local_address=wire.address,
        interface=interface_of(wire.address),
        store_fd=store.fileno() if store else None,
    )


def refuse_absent(plan: LaunchPlan) -> None:
    """Raise LaunchError unless what the plan runs is here, at the path it has on node 0."""
    needed = [plan.cwd]
    if plan.spec is not None and plan.spec.module is None:
        needed.append(plan.spec.folder)
    if plan.script is not None and plan.script.endswith(".py"):
        needed.append(Path(plan.script))
    if absent := [str(path) for path in needed if not path.exists()]:
        raise LaunchError(f"there is no {', '.join(absent)}; every node needs the code where node 0 has it")


def started_ranks(plan: LaunchPlan) -> dict[int, dict[str, int]]:
    """Process id of each rank that has started here, and the measured steps that it has entered."""
    ranks = {}
    for mark in (plan.run_dir / RANKS_FOLDER).glob(f"*/{PID_FILE}"):
        with suppress(OSError, ValueError):
            pid = int(mark.read_text(encoding="ascii"))
            ranks[int(mark.parent.name)] = {"pid": pid, "steps": steps_entered(mark.parent)}
    return ranks


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
