"""Launches over several nodes: the cluster's launcher in torchrun's place, and the agent that it starts on each node.

Each agent runs its node's part as a guarded launch of its own, in ``nodes/N`` of the run folder. Agents meet in files
alone: an agent whose part has failed, or the guard of the launcher, leaves the file ``stopping``, and all others end.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pytest_aorta.common import variables
from pytest_aorta.common.errors import AortaError, LaunchError, LeaseError
from pytest_aorta.common.files import UnreadableFile, raised_as, read_json, write_json
from pytest_aorta.common.model import read_model
from pytest_aorta.common.text import ranks_text
from pytest_aorta.launch.guarded import GuardedLaunch, guard_spec, keep_outcome, start_watcher, with_own_code
from pytest_aorta.launch.leases import LeasedWorld, lease
from pytest_aorta.launch.watch import is_readable
from pytest_aorta.plan.accelerators import visible_devices
from pytest_aorta.plan.device_kind import ACCELERATED
from pytest_aorta.plan.launch_plan import LaunchPlan, read_plan
from pytest_aorta.result.evidence import log_tail
from pytest_aorta.result.folder import (
    AGENT_FILE,
    AGENT_LOG,
    HELLO_FILE,
    NODES_FOLDER,
    OUTCOME_FILE,
    PLAN_FILE,
    STOPPING_FILE,
    node_folder,
    rank_folders,
)
from pytest_aorta.result.outcome import EndReason, LaunchOutcome

# The first variable that is set gives this node's number: ours, Slurm's, or that of a Kubernetes Indexed Job.
NODE_RANK_VARIABLES = (variables.NODE_RANK, "SLURM_NODEID", "JOB_COMPLETION_INDEX")
# Limit of the wait for devices that other launches hold; the other nodes' ranks wait meanwhile.
LEASE_S = 30.0
# Pauses between two looks for the file that ends all nodes.
TICK_S = 0.25
# Every node's guard stops its ranks within 15.5 s.
STOP_S = 16.0
_MAX_BYTES = 1 << 24
# Reasons for which the launcher's guard ends all nodes; else the nodes' outcomes say how the launch has ended.
_FROM_OUTSIDE = (EndReason.GUARD_LOST, EndReason.PARENT_GONE, EndReason.STOPPED, EndReason.OUTPUT_CAP)
# The order of causes; others come before a node that was stopped because another one has failed.
_FIRST = (EndReason.NODE_MISMATCH, EndReason.NODE_LAUNCHER, EndReason.NODE_LOST, EndReason.GUARD_LOST)
_CAUSES = {reason: place for place, reason in enumerate(_FIRST)} | {EndReason.STOPPED: len(_FIRST) + 1}


@functools.cache
def own_hello() -> dict[str, str]:
    """Return this node's introduction: the name of its host, and versions that have to be equal on every node."""
    versions = {name: _version(name) for name in ("pytest-aorta", "torch")}
    return {"host": socket.gethostname(), **versions, "python": ".".join(platform.python_version_tuple()[:2])}


def _version(name: str) -> str:
    with suppress(PackageNotFoundError):
        return version(name)
    return "not installed"


def node_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return this node's number, from 0.

    Raises:
        LaunchError: No variable gives the number, or its value is not a number.
    """
    for name in NODE_RANK_VARIABLES:
        if name in environ:
            if not re.fullmatch(r"[0-9]{1,6}", environ[name]):
                raise LaunchError(f"{name}={environ[name]!r}, allowed is an integer of 0 or more")
            return int(environ[name])
    names = ", ".join(NODE_RANK_VARIABLES)
    raise LaunchError(f"this node's number is unknown: set one of {names}")


def take_part(run_dir: Path, node: int) -> bool:
    """Run node ``node``'s part of the launch in ``run_dir``, leave its outcome there, and return whether it succeeded.

    On SIGTERM, with which a cluster takes a node away, the agent ends the ranks first.

    Raises:
        LaunchError: This node sees no launch there, or is no node of the launch; nothing was started.
    """
    terminated = list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, _: terminated.append(number))
    try:
        plan = _joined(run_dir, node)
        try:
            _check(plan)
            outcome = _run(plan, terminated)
        except AortaError as error:
            outcome = LaunchOutcome(EndReason.NODE_MISMATCH, None, (), (), 0.0, detail=str(error))
        if outcome.reason == EndReason.EXIT and outcome.agent_status:
            # Ranks of other nodes get time to write their errors.
            time.sleep(plan.limits.error_grace_s)
        if terminated and not _is_stopping(plan):
            outcome = outcome.replace(reason=EndReason.NODE_LOST, detail="its agent was sent SIGTERM")
        keep_outcome(plan, outcome)
        is_well = _is_well(outcome)
        if not is_well:
            (run_dir / STOPPING_FILE).touch()
        return is_well
    finally:
        signal.signal(signal.SIGTERM, before)


def _is_well(outcome: LaunchOutcome) -> bool:
    return (outcome.reason, outcome.agent_status) == (EndReason.EXIT, 0)


def _is_stopping(plan: LaunchPlan) -> bool:
    """Return whether all nodes are to end, given a node's plan; they end too if the run folder is gone."""
    run_dir = plan.run_dir.parents[1]
    with suppress(OSError):
        return run_dir / STOPPING_FILE in _fresh(run_dir)
    return True


def _fresh(folder: Path) -> list[Path]:
    """Return the paths in a folder; a client of NFS sees new files late, unless it opens the folder again."""
    return list(folder.iterdir())


def _joined(run_dir: Path, node: int) -> LaunchPlan:
    """Return the plan of this node's part after the node has introduced itself."""
    own = own_hello()
    if not run_dir.is_dir():
        raise LaunchError(
            f"run folder {run_dir} is not on {own['host']}: --aorta-results has to name a folder on a file system "
            f"that every node shares"
        )
    plan, folder = read_plan(run_dir / PLAN_FILE), node_folder(run_dir, node)
    where = f"the launcher has to start one agent on each of {plan.world.nodes} nodes"
    if node >= plan.world.nodes:
        raise LaunchError(f"{own['host']} says it is node {node}; {where}, whose numbers start at 0")
    try:
        # Of two agents that start at once, only one creates the file.
        (folder / "claimed").touch(exist_ok=False)
    except FileExistsError:
        (run_dir / STOPPING_FILE).touch()
        host = _hello(folder).get("host", "another agent")
        raise LaunchError(f"{own['host']} says it is node {node}, and so does {host}; {where}") from None
    write_json(folder / HELLO_FILE, own, durable=False)
    return plan.replace(run_dir=folder, node=node, lease_fds=())


def _hello(folder: Path) -> dict[str, str]:
    """Return the introduction that pytest or an agent has left; empty without one."""
    with suppress(UnreadableFile):
        found: dict[str, str] = read_json(folder / HELLO_FILE, max_bytes=_MAX_BYTES)
        return found
    return {}


def _check(plan: LaunchPlan) -> None:
    """Check that this user's pytest runs on node 0, and that every node has the same versions and the code."""
    # Whoever owns the folder could have written the plan, which names programs.
    run_dir = plan.run_dir.parents[1]
    owner, user = run_dir.stat().st_uid, (plan.run_dir / HELLO_FILE).stat().st_uid
    if owner != user:
        raise LaunchError(f"run folder {run_dir} belongs to user {owner}, and files of this agent to user {user}")
    zero, own = _hello(plan.run_dir.parent) or own_hello(), own_hello()
    if plan.node == 0 and zero["host"] != own["host"]:
        raise LaunchError(f"pytest runs on {zero['host']} and node 0 is {own['host']}; pytest has to run on node 0")
    pairs = ((name, own.get(name), there) for name, there in zero.items() if name != "host")
    if different := [f"{name} {here} (node 0: {there})" for name, here, there in pairs if here != there]:
        raise LaunchError(f"{', '.join(different)}; versions have to be equal on every node")
    folder = [plan.spec.folder] if plan.spec is not None and plan.spec.module is None else []
    script = [Path(plan.script)] if plan.script is not None and plan.script.endswith(".py") else []
    if absent := [str(path) for path in (plan.cwd, *folder, *script) if not path.exists()]:
        raise LaunchError(f"{', '.join(absent)} is missing; every node needs the code at the same path as node 0")


def _run(plan: LaunchPlan, terminated: list[int]) -> LaunchOutcome:
    """Run this node's part until it has ended, or all nodes are to end, or SIGTERM has arrived."""
    with ExitStack() as leases:
        with GuardedLaunch(_on_own_devices(plan, leases), os.environ) as launch:
            while not (is_readable(launch, TICK_S) and launch.has_ended()):
                if terminated or _is_stopping(plan):
                    launch.stop()
                    launch.wait()
                    break
        return launch.outcome()


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


def launch_on_nodes(plan: LaunchPlan, environ: Mapping[str, str] = os.environ) -> LaunchOutcome:
    """Run ``plan`` on several nodes and wait until every agent has ended its part, even when interrupted.

    Raises:
        LaunchError: As in :func:`~pytest_aorta.launch.guarded.launch`.
    """
    with GuardedLaunch(plan, environ, _start_launcher) as running:
        running.wait()
    _keep_failures(plan)
    return keep_outcome(plan, _merged(plan, running.outcome()))


def _start_launcher(
    plan: LaunchPlan, environ: Mapping[str, str], lifeline_fd: int, verdict_fd: int
) -> subprocess.Popen[bytes]:
    """Start a guard for the program that starts the agents; the nodes' own guards watch the ranks."""
    write_json(plan.run_dir / NODES_FOLDER / HELLO_FILE, own_hello(), durable=False)
    words = [word.replace("{nodes}", str(plan.world.nodes)) for word in plan.node_launcher]
    agent = [sys.executable, "-P", "-m", "pytest_aorta.cli", "agent", str(plan.run_dir)]
    # The nodes get the time of a launch to arrive, and then each node's guard has its own limit.
    limits = {"time_limit_s": 2 * plan.timeout_s + STOP_S, "num_local_ranks": 0, "leave_s": STOP_S}
    spec = guard_spec(plan, lifeline_fd, verdict_fd) | limits | {"argv": [*words, *agent]}
    return start_watcher(plan, spec, with_own_code(dict(environ)))


def _merged(plan: LaunchPlan, outcome: LaunchOutcome) -> LaunchOutcome:
    """Return the outcome of a launch, given that of the launcher: the outcome of the node that has failed first."""
    nodes = range(plan.world.nodes)
    parts = [_outcome_of(plan, node, outcome) for node in nodes]
    outcome = outcome.replace(
        stopped=tuple(pid for part in parts for pid in part.stopped),
        survivors=(*outcome.survivors, *(pid for part in parts for pid in part.survivors)),
    )
    failed = [(node, part) for node, part in zip(nodes, parts, strict=True) if not _is_well(part)]
    if outcome.reason in _FROM_OUTSIDE or not failed:
        return outcome
    node, cause = min(failed, key=lambda pair: _CAUSES.get(pair[1].reason, len(_FIRST)))
    detail = cause.detail or "its guard was killed" * (cause.reason == EndReason.GUARD_LOST)
    if cause.reason != EndReason.NODE_LAUNCHER:
        detail = detail and f"{_name(plan, node)}: {detail}"
    if cause.reason == EndReason.NODE_LOST:
        ranks = plan.ranks_of(node)
        detail += f"; it ran {ranks_text(ranks)}"
    return outcome.replace(reason=cause.reason, agent_status=cause.agent_status, detail=detail)


def _outcome_of(plan: LaunchPlan, node: int, outcome: LaunchOutcome) -> LaunchOutcome:
    """Return how a node's part has ended; without its agent, or without the agent's word, that it is lost."""
    folder = node_folder(plan.run_dir, node)
    with suppress(OSError, UnreadableFile):
        if folder / OUTCOME_FILE in _fresh(folder):
            return read_model(folder / OUTCOME_FILE, LaunchOutcome, max_bytes=_MAX_BYTES)
    if _hello(folder):
        return LaunchOutcome(EndReason.NODE_LOST, None, (), (), 0.0, detail="its agent has left no outcome")
    present = [_name(plan, other) for other in range(plan.world.nodes) if _hello(node_folder(plan.run_dir, other))]
    status = outcome.agent_status
    how = "was ended" if status is None else f"ended with exit code {status}"
    there = f"{len(present)} of {plan.world.nodes} nodes had an agent{': ' * bool(present)}{', '.join(present)}"
    text = f"node launcher {' '.join(plan.node_launcher)} {how} after {outcome.wall_s:.1f} s, when {there}"
    return LaunchOutcome(EndReason.NODE_LAUNCHER, None, (), (), 0.0, detail=text)


def _name(plan: LaunchPlan, node: int) -> str:
    """Return a node's number, with its host if it has an agent."""
    host = _hello(node_folder(plan.run_dir, node)).get("host")
    return f"node {node} ({host})" if host else f"node {node}"


def _keep_failures(plan: LaunchPlan) -> None:
    """Merge the nodes' exit codes and logs into the files that a launch on one node writes."""
    for folder in rank_folders(plan.run_dir, plan.world.ranks):
        with suppress(OSError):  # pytest reads the ranks' files next
            _fresh(folder)
    failures: dict[str, list[Any]] = {}
    for node in range(plan.world.nodes):
        folder = node_folder(plan.run_dir, node)
        with suppress(UnreadableFile, AttributeError):
            for name, entries in read_json(folder / AGENT_FILE, max_bytes=_MAX_BYTES).items():
                failures.setdefault(name, []).extend(entries)
        with suppress(OSError):  # a full disk must not hide the outcome
            if lines := log_tail(folder / AGENT_LOG):
                with (plan.run_dir / AGENT_LOG).open("a", encoding="utf-8") as log:
                    print(f"== {_name(plan, node)} ==", *lines, sep="\n", file=log)
    with suppress(OSError):
        if failures:
            write_json(plan.run_dir / AGENT_FILE, failures)
