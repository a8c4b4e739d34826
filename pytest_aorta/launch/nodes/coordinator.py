"""The coordinator of a launch over several nodes, which pytest starts in place of the guard.

``python -m pytest_aorta.launch.nodes.coordinator SPEC`` listens on node 0, starts the node agents through the cluster's
launcher, sends the plan to each of them, and collects heartbeats, the ranks' files and the verdict of each node's
guard. As with the guard, a lifeline pipe ends the launch when pytest ends, and the verdict goes through a pipe. A node
whose connection breaks is lost; a node agent whose connection breaks ends its ranks.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from pytest_aorta.common import variables
from pytest_aorta.common.files import write_json
from pytest_aorta.launch.nodes.network import endpoint_text, listen, open_files_problem
from pytest_aorta.launch.nodes.node import Node, NodeFailed, admitted
from pytest_aorta.launch.nodes.wire import HEARTBEAT_S, LOST_S, Wire, WireError
from pytest_aorta.launch.process.guard import IGNORED, PR_SET_CHILD_SUBREAPER, descendants, prctl, prepare_agent
from pytest_aorta.launch.readiness import readable
from pytest_aorta.result.folder import AGENT_FILE

TICK_S = 0.25
# Every node's guard stops its ranks within 15.5 s; the remaining time is for sending their files.
STOP_S = 45.0
LAUNCHER_END_S = 5.0
TERM_S = 2.0
KILL_S = 10.0
MAX_STRANGERS = 64
# The lists in agent.json.
REPORTED = ("failures", "running")
# The files of one connection (two descriptors of its socket, and an eventfd), and all other files of this process.
FILES_PER_WIRE = 3
OTHER_FILES = 32


class ParentGone(Exception):
    """Pytest has ended, or has asked for the end of the launch."""


class Coordinator:
    """One launch over several nodes; ``handover.coordinator_spec`` builds ``spec``."""

    def __init__(self, spec: dict[str, Any], token: str) -> None:
        self.spec = spec
        self.token = token
        self.run_dir = Path(spec["run_dir"])
        self.nodes: dict[int, Node] = {}
        self.strangers: dict[Wire, float] = {}
        self.refusal = ""
        self.full = ""
        self.launcher: subprocess.Popen[bytes] | None = None
        self.launcher_status: int | None = None
        self.began_s = time.monotonic()
        self.heartbeat_s = 0.0

    def run(self) -> dict[str, Any]:
        """Run the plan on every node and return the verdict."""
        began_ns = time.time_ns()
        reason, status, detail = "parent_gone", None, ""
        try:
            self.listener = listen(self.spec["address"], self.spec["port"])
            self.start_launcher()
            self.join()
            self.send_plan()
            self.watch()
            reason, status, detail = self.judgement()
        except OSError as error:
            reason, detail = "node_launcher", f"{self.spec['address']}:{self.spec['port']}: {error.strerror or error}"
        except NodeFailed as failure:
            reason, detail = failure.reason, failure.detail
        except ParentGone:
            pass
        self.close()
        self.keep_failures()
        leftover = self.end_launcher()
        return {
            "reason": reason,
            "agent_status": status,
            "stopped": [pid for node in self.nodes.values() for pid in node.stopped],
            "survivors": [*leftover, *(pid for node in self.nodes.values() for pid in node.survivors)],
            "began_ns": began_ns,
            "wall_s": time.monotonic() - self.began_s,
            "detail": detail,
        }

    def start_launcher(self) -> None:
        """Start one node agent per node, or only node 0's if node agents already wait on the other nodes."""
        endpoint = endpoint_text(*self.listener.getsockname()[:2])
        join = f"--join-timeout={self.spec['join_timeout_s']:g}"
        agent = [sys.executable, "-P", "-m", "pytest_aorta.cli", "agent", join, "--connect", endpoint]
        command = [*self.spec["launcher"], *agent] if self.spec["launcher"] else [*agent, "--node-rank=0"]
        try:
            self.launcher = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                env=os.environ | {variables.AGENT_TOKEN: self.token},
                start_new_session=True,
                preexec_fn=partial(prepare_agent, os.getpid()),
            )
        except OSError as error:
            raise self.launcher_failed(f"can't be started: {error.strerror or error}") from None

    def join(self) -> None:
        """Wait until the agent of every node has connected."""
        deadline_s = self.began_s + self.spec["join_timeout_s"]
        while len(self.nodes) < self.spec["num_nodes"]:
            self.turn()
            for node in self.nodes.values():
                if node.lost and self.spec["launcher"]:
                    # The launcher has failed on another node: srun then ends the agents that it has started.
                    raise self.launcher_failed(f"failed when {self.present()}; {node.lost}")
                if node.lost:
                    raise NodeFailed("node_lost", node.lost)
            if self.launcher_status is not None and (self.spec["launcher"] or self.launcher_status):
                self.turn()  # its last messages may still be on their way
                if len(self.nodes) < self.spec["num_nodes"]:
                    how = _exit_text(self.launcher_status)
                    raise self.launcher_failed(f"ended with {how} when {self.present()}")
            if time.monotonic() > deadline_s:
                raise self.launcher_failed(f"{self.spec['join_timeout_s']:g} s after its start {self.present()}")
            if self.full and not self.strangers:
                raise NodeFailed("node_launcher", f"{self.full}; {self.present()}{self.refusal}")

    def send_plan(self) -> None:
        """Send every node agent the plan and the endpoint at which ranks find each other."""
        zero = self.nodes[0]
        if zero.hello["host"] != socket.gethostname():
            raise NodeFailed(
                "node_mismatch",
                f"pytest runs on {socket.gethostname()} and node 0 is {zero.hello['host']}; "
                f"pytest has to run on node 0",
            )
        endpoint = endpoint_text(zero.hello["address"], zero.hello["store_port"])
        message = {
            "type": "plan",
            "plan": self.spec["plan"],
            "num_nodes": self.spec["num_nodes"],
            "endpoint": endpoint,
            "run_id": secrets.token_hex(8),
        }
        for node in self.nodes.values():
            node.send(message)

    def watch(self) -> None:
        """Wait until every node has ended or is lost; once a node has failed, stop the others."""
        deadline_s = time.monotonic() + self.spec["time_limit_s"] + STOP_S
        stop_s: float | None = None
        is_stopping = False
        while any(node.is_running for node in self.nodes.values()):
            self.turn()
            now_s = time.monotonic()
            failed = [node for node in self.nodes.values() if node.has_failed]
            if failed and stop_s is None:
                # Ranks that wait for a lost node wait forever; ranks of a failed node get time to write their errors.
                stop_s = now_s + (0.0 if failed[0].lost else self.spec["error_grace_s"])
                deadline_s = min(deadline_s, stop_s + STOP_S)
            if stop_s is not None and now_s >= stop_s and not is_stopping:
                is_stopping = True
                for node in self.nodes.values():
                    node.stop()
            if now_s > deadline_s:
                for node in self.nodes.values():
                    node.lose("its launch has not ended in time")

    def turn(self) -> None:
        """Wait for the next event, at most TICK_S, and handle it."""
        sources: list[Any] = [self.spec["lifeline_fd"], *self.strangers]
        # Without a free descriptor the listener stays readable, because its next connection can't be accepted.
        sources += [] if self.full else [self.listener]
        sources += [node.wire for node in self.nodes.values() if node.is_running]
        ready = set(readable(sources, TICK_S))
        if self.spec["lifeline_fd"] in ready:
            raise ParentGone
        # Read nodes before strangers: when a stranger becomes a node, its messages have already been read, and reading
        # again would block.
        for node in self.nodes.values():
            if node.is_running and node.wire in ready:
                node.read(self.run_dir, self.spec["world_size"])
        if self.listener in ready:
            self.accept()
        for wire in [wire for wire in self.strangers if wire in ready]:
            self.identify(wire)
        self.keep_time()

    def accept(self) -> None:
        """Accept a connection that is not authenticated yet; if there are too many of these, close the oldest."""
        try:
            connection, _ = self.listener.accept()
            # Close the oldest: a node agent proves the token in milliseconds, and connects again if closed too early.
            unproven = [wire for wire in self.strangers if not wire.is_authenticated]
            for wire in unproven[: max(0, len(unproven) - MAX_STRANGERS + 1)]:
                self.refusal = f"; {len(unproven)} connections, the oldest from {wire.peer}, proved no token"
                self.drop(wire)
            self.strangers[Wire(connection, self.token.encode(), is_server=True)] = time.monotonic()
        except OSError as error:
            # After any other error the other side has closed the connection already.
            needed = OTHER_FILES + FILES_PER_WIRE * (self.spec["num_nodes"] + MAX_STRANGERS)
            self.full = open_files_problem(error.errno, needed)

    def drop(self, wire: Wire) -> None:
        """Close the connection of a stranger, which makes room for another one."""
        del self.strangers[wire]
        wire.close()
        self.full = ""

    def identify(self, wire: Wire) -> None:
        """Read the first message of a stranger, and admit its node."""
        try:
            messages = wire.receive()
            node = admitted(wire, messages[0], self.spec, self.nodes) if messages else None
        except WireError as error:
            self.refusal = f"; a connection from {wire.peer} was refused: {error}"
            self.drop(wire)
            return
        if node is not None:
            del self.strangers[wire]
            self.nodes[node.rank] = node
        elif messages:
            self.drop(wire)

    def keep_time(self) -> None:
        """Send heartbeats, give up silent connections, and check whether the launcher has ended."""
        now_s = time.monotonic()
        for wire in [wire for wire, since_s in self.strangers.items() if now_s - since_s > LOST_S]:
            self.drop(wire)
        if now_s - self.heartbeat_s > HEARTBEAT_S:
            self.heartbeat_s = now_s
            for node in self.nodes.values():
                node.send({"type": "heartbeat"})
        for node in self.nodes.values():
            node.check(now_s)
        if self.launcher is not None and self.launcher_status is None:
            self.launcher_status = self.launcher.poll()

    def judgement(self) -> tuple[str, int | None, str]:
        """Return reason, exit code and detail of the first node that failed; lost nodes come first."""
        failed = sorted(
            (node for node in self.nodes.values() if node.has_failed), key=lambda node: (not node.lost, node.ended_s)
        )
        if not failed:
            return "exit", 0, ""
        if failed[0].lost:
            return "node_lost", None, "; ".join(node.lost for node in failed if node.lost)
        return str(failed[0].outcome["reason"]), failed[0].outcome["agent_status"], ""

    def close(self) -> None:
        """Close every connection; node agents then end their running ranks, and delete files that have arrived here."""
        for node in self.nodes.values():
            if node.outcome:
                node.send({"type": "bye"})
            node.wire.close()
        for wire in self.strangers:
            wire.close()
        if hasattr(self, "listener"):
            self.listener.close()

    def keep_failures(self) -> None:
        """Merge the nodes' exit codes and logs into the files that a launch on one node writes."""
        reports = [node.agent_report(self.run_dir) for node in self.nodes.values()]
        merged = {name: [entry for report in reports for entry in report.get(name, ())] for name in REPORTED}
        with suppress(OSError):  # a full disk must not hide the verdict
            if any(merged.values()):
                write_json(self.run_dir / AGENT_FILE, merged)
            for node in self.nodes.values():
                if text := node.log_tail(self.run_dir):
                    print(f"== {node.name} ==\n{text}", flush=True)

    def end_launcher(self) -> list[int]:
        """Wait for processes that end by themselves and kill the others; return those that could not be killed."""
        self.wait_for_none(LAUNCHER_END_S)
        for pid in self.alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        self.wait_for_none(TERM_S)
        deadline_s = time.monotonic() + KILL_S
        while (alive := self.alive()) and time.monotonic() < deadline_s:
            for pid in alive:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        return sorted(self.alive())

    def wait_for_none(self, limit_s: float) -> None:
        """Wait until no descendant is left, at most ``limit_s`` seconds."""
        deadline_s = time.monotonic() + limit_s
        while self.alive() and time.monotonic() < deadline_s:
            time.sleep(0.02)

    def alive(self) -> set[int]:
        """Return the process ids of all descendants."""
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        return descendants()

    def launcher_failed(self, what: str) -> NodeFailed:
        """Return the error for a launcher that did not start the agents."""
        command = " ".join(self.spec["launcher"]) or "(none: agents wait)"
        full = f"; {self.full}" if self.full else ""
        return NodeFailed("node_launcher", f"node launcher {command} {what}{self.refusal}{full}")

    def present(self) -> str:
        """Return the number of node agents that have connected, and their hosts, as text."""
        hosts = ", ".join(f"node {rank} ({node.hello['host']})" for rank, node in sorted(self.nodes.items()))
        return f"{len(self.nodes)} of {self.spec['num_nodes']} nodes had an agent here" + (
            f": {hosts}" if hosts else ""
        )


def _exit_text(status: int) -> str:
    return f"exit code {status}" if status >= 0 else f"signal {-status}"


def main() -> None:
    """Coordinate the launch described by the first argument."""
    spec = json.loads(sys.argv[1])
    for ignored in IGNORED:
        signal.signal(ignored, signal.SIG_IGN)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    for inherited in (spec["lifeline_fd"], spec["verdict_fd"]):
        os.set_inheritable(inherited, False)
    # Waiting agents already have a token, which can't change with each launch.
    token = os.environ.get(variables.AGENT_TOKEN) or secrets.token_hex(32)
    verdict = Coordinator(spec, token).run()
    with suppress(BrokenPipeError):
        os.write(spec["verdict_fd"], json.dumps(verdict).encode())


if __name__ == "__main__":
    main()
