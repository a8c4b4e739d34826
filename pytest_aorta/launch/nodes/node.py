"""Node 0's view of one node, through the connection of that node's agent."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pytest_aorta.common.documents import UnreadableFile, read_json
from pytest_aorta.common.files import write_text
from pytest_aorta.common.schema import violation
from pytest_aorta.common.text import brief
from pytest_aorta.launch.nodes.wire import LOST_S, Wire, WireError, decode
from pytest_aorta.result.folder import (
    AGENT_FILE,
    AGENT_LOG,
    NODES_FOLDER,
    PID_FILE,
    PROGRESS_FILE,
    RANKS_FOLDER,
    node_folder,
)

# Limit of all files of one node together; files.py limits each of them.
MAX_NODE_BYTES = 1 << 30
LOG_LINES = 8
_SCHEMA = "rank_files.schema.json"
_MESSAGES = ("heartbeat", "refused", "file", "end")
_RANK_FILE = re.compile(
    r"ranks/(\d{1,6})/(?:pid|marks|suspended|progress|output\.log|stacks\.txt|py-spy\.txt|result\.json|error\.json"
    r"|collectives\.json|telemetry\.jsonl|trace(?:-\d{1,3})?\.json\.gz)"
)
_FLIGHT_FILE = re.compile(r"flight/rank_(\d{1,6})")
_OWN_FILES = (AGENT_FILE, AGENT_LOG)
_MAX_OWN_BYTES = 1 << 24


class NodeFailed(Exception):
    """A launch over nodes can't continue; ``reason`` is a value of ``EndReason``."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class Node:
    """One node: its identity, the state it has reported, and whether it still sends heartbeats."""

    def __init__(self, rank: int, wire: Wire, hello: dict[str, Any]) -> None:
        self.rank = rank
        self.wire = wire
        self.hello = hello
        self.began_s = self.last_message_s = self.ended_s = time.monotonic()
        self.ranks: list[int] = []
        self.folder = ""
        self.outcome: dict[str, Any] = {}
        self.lost = ""
        self.num_bytes = 0
        self.is_stopping = False
        # By rank, as written into node 0's run folder.
        self._pids: dict[int, int] = {}
        self._steps: dict[int, int] = {}

    @property
    def name(self) -> str:
        """The node's number and host, for messages."""
        return f"node {self.rank} ({self.hello['host']})"

    @property
    def is_running(self) -> bool:
        """True until the node has ended or is lost."""
        return not self.outcome and not self.lost

    @property
    def has_failed(self) -> bool:
        """True if the node is lost, or its launch failed."""
        ended_well = self.outcome.get("reason") == "exit" and self.outcome.get("agent_status") == 0
        return bool(self.lost) or (bool(self.outcome) and not ended_well)

    @property
    def stopped(self) -> list[int]:
        """Process ids that the node's guard has ended."""
        return list(self.outcome.get("stopped", ()))

    @property
    def survivors(self) -> list[int]:
        """Process ids that the node's guard could not end."""
        return list(self.outcome.get("survivors", ()))

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; a node that can't be reached is lost."""
        if self.lost:
            return
        try:
            self.wire.send(message)
        except WireError as error:
            self.lose(str(error))

    def stop(self) -> None:
        """Ask the node to end its ranks."""
        if self.is_running:
            self.is_stopping = True
            self.send({"type": "stop"})

    def read(self, run_dir: Path, world_size: int) -> None:
        """Handle the messages that have arrived; blocks while there are none."""
        try:
            for message in self.wire.receive():
                self.last_message_s = time.monotonic()
                self.take(message, run_dir, world_size)
        except WireError as error:
            self.lose(str(error))

    def take(self, message: dict[str, Any], run_dir: Path, world_size: int) -> None:
        """Handle one message.

        Raises:
            NodeFailed: The node refuses the plan.
            WireError: Node agents do not send this message.
        """
        check_message(message, _MESSAGES)
        match message["type"]:
            case "heartbeat":
                self.folder = str(message["folder"])
                self.note_ranks(message["ranks"], run_dir, world_size)
            case "refused":
                self.outcome = {"reason": "refused"}
                raise NodeFailed("node_mismatch", f"{self.name}: {message['text']}")
            case "file":
                self.write(run_dir / self.file_name(message["name"], world_size), message)
            case "end":
                if message["is_terminated"] and not self.is_stopping:
                    self.folder = ""  # every file has arrived, and the agent may delete the folder
                    self.send({"type": "bye"})
                    self.lose("its agent was sent SIGTERM")
                self.outcome, self.ended_s = dict(message["outcome"]), time.monotonic()

    def note_ranks(self, ranks: Mapping[str, Mapping[str, int]], run_dir: Path, world_size: int) -> None:
        """Write the progress of the node's ranks into node 0's run folder, where the progress line reads it.

        Only what has changed is written: node 0 has one thread for the heartbeats of all nodes.
        """
        for name, state in ranks.items():
            mark = run_dir / self.file_name(f"{RANKS_FOLDER}/{int(name)}/{PID_FILE}", world_size)
            pid, steps = int(state["pid"]), int(state["steps"])
            with suppress(OSError):  # the next heartbeat tries again
                if self._pids.get(int(name)) != pid:
                    write_text(mark, str(pid), durable=False)
                    self._pids[int(name)] = pid
                if self._steps.get(int(name)) != steps:
                    _write_steps(mark.with_name(PROGRESS_FILE), steps)
                    self._steps[int(name)] = steps
        self.ranks = sorted(map(int, ranks))

    def file_name(self, name: str, world_size: int) -> str:
        """Return the path in the run folder of a file with this name.

        Raises:
            WireError: Node agents do not send this file.
        """
        if name in _OWN_FILES:
            return f"{NODES_FOLDER}/{self.rank}/{name}"
        match = _RANK_FILE.fullmatch(name) or _FLIGHT_FILE.fullmatch(name)
        if match is None or int(match[1]) >= world_size:
            raise WireError(f"unknown file {name!r}")
        return name

    def write(self, path: Path, message: dict[str, Any]) -> None:
        """Append the next part of a file."""
        data = decode(message["data"])
        self.num_bytes += len(data)
        if self.num_bytes > MAX_NODE_BYTES:
            raise WireError(f"files of more than {MAX_NODE_BYTES:,} bytes")
        with suppress(OSError):  # on a full disk, the missing file is reported later
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb" if message["is_first"] else "ab") as file:
                file.write(data)

    def check(self, now_s: float) -> None:
        """Give the node up when its heartbeats have stopped."""
        if self.is_running and now_s - self.last_message_s > LOST_S:
            self.lose(f"no heartbeat for {now_s - self.last_message_s:.0f} s")

    def lose(self, why: str) -> None:
        """Mark the node as lost and close its connection."""
        if not self.is_running:
            return
        self.ended_s = time.monotonic()
        noun = "rank" if len(self.ranks) == 1 else "ranks"
        ranks = f"; it ran {noun} {', '.join(map(str, self.ranks))}" if self.ranks else ""
        kept = f"; if the host is alive, its files are in {self.folder} there" if self.folder else ""
        self.lost = f"{self.name} was lost after {self.ended_s - self.began_s:.1f} s: {why}{ranks}{kept}"
        self.wire.close()

    def agent_report(self, run_dir: Path) -> dict[str, Any]:
        """Return what the node's torchrun agent reported of its ranks; empty if no rank failed there."""
        path = node_folder(run_dir, self.rank) / AGENT_FILE
        try:
            document: dict[str, Any] = read_json(path, max_bytes=_MAX_OWN_BYTES)
        except UnreadableFile:
            return {}
        return {} if violation(document, _SCHEMA, "agent") else document

    def log_tail(self, run_dir: Path) -> str:
        """Return the last lines of the node's agent.log."""
        try:
            with (node_folder(run_dir, self.rank) / AGENT_LOG).open("rb") as file:
                text = file.read(_MAX_OWN_BYTES).decode("utf-8", "replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-LOG_LINES:])


def _write_steps(path: Path, steps: int) -> None:
    """Write a count of steps in place, as ranks do: a reader gets the former count or this one."""
    # O_NONBLOCK: a FIFO in the file's place must not block node 0.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    try:
        os.pwrite(fd, steps.to_bytes(8, "little"), 0)
    finally:
        os.close(fd)


def check_message(message: Mapping[str, Any], kinds: Collection[str]) -> None:
    """Check that a message is of one of these kinds, and has the keys of its kind.

    Raises:
        WireError: Node agents do not send this message.
    """
    kind = message.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise WireError(f"unknown message {brief(repr(kind))}, allowed is one of {', '.join(kinds)}")
    if problem := violation(message, _SCHEMA, kind):
        raise WireError(f"malformed message {kind!r}: {problem}")


def admitted(wire: Wire, hello: dict[str, Any], spec: Mapping[str, Any], nodes: Mapping[int, Node]) -> Node | None:
    """Return the node that a hello comes from; None for a waiting agent that this launch does not need.

    Raises:
        NodeFailed: The launcher has started too many agents, or the agent has another version.
        WireError: The message is not a hello of a node agent.
    """
    check_message(hello, ("hello",))
    node = Node(hello["node_rank"], wire, hello)
    is_new = node.rank < spec["num_nodes"] and node.rank not in nodes
    if not is_new and hello["is_waiting"]:
        return None
    if not is_new:
        there = f", and so does {nodes[node.rank].hello['host']}" if node.rank in nodes else ""
        raise NodeFailed(
            "node_launcher",
            f"{hello['host']} says it is node {node.rank}{there}; the launcher has to start one agent on each of "
            f"{spec['num_nodes']} nodes",
        )
    different = [
        f"{name} {hello['versions'].get(name)} (node 0: {here})"
        for name, here in spec["versions"].items()
        if hello["versions"].get(name) != here
    ]
    if different:
        raise NodeFailed(
            "node_mismatch", f"{node.name} has {', '.join(different)}; versions have to be equal on every node"
        )
    return node
