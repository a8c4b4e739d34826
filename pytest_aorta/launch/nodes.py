"""Launches over several nodes: starts an agent a node through the cluster's launcher, and follows all of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from pytest_aorta.common import variables
from pytest_aorta.common.files import UnreadableFile, raised_as, read_json, write_json
from pytest_aorta.launch.guarded import start_watcher, with_own_code
from pytest_aorta.launch.node_agent import LOST_S, TICK_S, Heart, Hello, Orders, Pulse, own_hello, read, write
from pytest_aorta.launch.process.guard import IGNORED, PR_SET_CHILD_SUBREAPER, descendants, prctl, prepare_agent
from pytest_aorta.launch.sweep import launch_ids
from pytest_aorta.launch.watch import is_readable
from pytest_aorta.plan.launch_plan import LaunchPlan, read_plan
from pytest_aorta.result.evidence import log_tail
from pytest_aorta.result.folder import AGENT_FILE, AGENT_LOG, NODES_FOLDER, PLAN_FILE, node_folder, rank_folders
from pytest_aorta.result.outcome import EndReason, LaunchOutcome

# A node that is silent for this long has lost its agent if the launcher has ended, or another node has failed.
ENDED_S = 5.0
# Every node's guard stops its ranks within 15.5 s.
STOP_S = 30.0
TERM_S = 2.0
KILL_S = 10.0
LAUNCHER_END_S = 5.0
_MAX_BYTES = 1 << 24


class _ParentGone(Exception):
    """Pytest has ended, or has asked for the end of the launch."""


class _LauncherFailed(Exception):
    """The launcher did not start the agents."""


class _Node:
    """Node 0's view of one node: its introduction, its verdict, and whether it still sends heartbeats."""

    def __init__(self, run_dir: Path, number: int, ranks: range) -> None:
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
        began_ns, began_s = time.time_ns(), time.monotonic()
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
            "began_ns": began_ns,
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
            # pytest reads the ranks' files next; see node_agent.read.
            with suppress(OSError):
                list(folder.iterdir())
        merged: dict[str, list[Any]] = {}
        for node in self.nodes:
            with suppress(UnreadableFile, AttributeError):
                for name, entries in read_json(node.folder / AGENT_FILE, max_bytes=_MAX_BYTES).items():
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
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return descendants()


def start_coordinator(
    plan: LaunchPlan, environ: Mapping[str, str], lifeline_fd: int, verdict_fd: int
) -> subprocess.Popen[bytes]:
    """Start the coordinator in the guard's place; its node agents read the plan in the run folder."""
    spec = json.dumps({"run_dir": str(plan.run_dir), "lifeline_fd": lifeline_fd, "verdict_fd": verdict_fd})
    command = [sys.executable, "-P", "-m", "pytest_aorta.launch.nodes", spec]
    own = with_own_code(dict(environ)) | {variables.LAUNCH_ID: launch_ids(plan.run_dir, environ)}
    return start_watcher(plan, command, own, (lifeline_fd, verdict_fd))


def main() -> None:
    """Coordinate the launch described by the first argument."""
    spec = json.loads(sys.argv[1])
    for ignored in IGNORED:
        signal.signal(ignored, signal.SIG_IGN)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    for inherited in (spec["lifeline_fd"], spec["verdict_fd"]):
        os.set_inheritable(inherited, False)
    verdict = Coordinator(read_plan(Path(spec["run_dir"]) / PLAN_FILE), spec["lifeline_fd"]).run()
    with suppress(BrokenPipeError):
        os.write(spec["verdict_fd"], json.dumps(verdict).encode())


if __name__ == "__main__":
    main()
