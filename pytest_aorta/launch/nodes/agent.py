"""The node agent, ``aorta agent RUN_FOLDER``: runs one node's part of a launch over several nodes.

The cluster's launcher starts one agent per node. The agent runs the plan in the run folder under a guard of its
own, and ends the ranks when node 0 asks for it or is silent.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from msgspec.structs import replace

from pytest_aorta.common import variables
from pytest_aorta.common.errors import AortaError, LaunchError, LeaseError
from pytest_aorta.launch.guarded import GuardedLaunch
from pytest_aorta.launch.leases import LeasedWorld, mark_survivors
from pytest_aorta.launch.nodes.meeting import (
    LOST_S,
    TICK_S,
    Heart,
    Hello,
    NodeVerdict,
    Orders,
    Pulse,
    own_hello,
    read,
    write,
)
from pytest_aorta.launch.readiness import is_readable
from pytest_aorta.plan.accelerators import visible_devices
from pytest_aorta.plan.launch_plan import LaunchPlan, read_plan
from pytest_aorta.result.folder import NODES_FOLDER, PLAN_FILE, node_folder
from pytest_aorta.result.outcome import EndReason, LaunchOutcome

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
    raise LaunchError(
        f"--node-rank is missing, and no variable gives this node's number: give --node-rank, or set one of {names}"
    )


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
            outcome = _run(replace(plan, run_dir=folder, node=node, lease_fds=()), zero, terminated)
        except AortaError as error:
            outcome = _nothing(EndReason.NODE_MISMATCH, str(error))
        write(folder, NodeVerdict(outcome, is_terminated=bool(terminated) and zero.orders != Orders.STOP))
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
    if other := read(folder, Hello):
        where = f"one agent on each of {plan.world.nodes} nodes"
        text = f"{own_hello().host} says it is node {node}, and so does {other.host}; the launcher has to start {where}"
        write(folder, NodeVerdict(_nothing(EndReason.NODE_LAUNCHER, text)))
        raise LaunchError(text)
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
        outcome = launch.outcome()
        mark_survivors(plan.world, outcome, _owner(plan))
    return outcome


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
    needed = [plan.cwd]
    if plan.spec is not None and plan.spec.module is None:
        needed.append(plan.spec.folder)
    if plan.script is not None and plan.script.endswith(".py"):
        needed.append(Path(plan.script))
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
    leased = LeasedWorld(world, devices, exclusive=True, wait_s=LEASE_S, owner=_owner(plan))
    leases.callback(leased.release)
    try:
        own = leased.world()
    except LeaseError as error:
        raise LaunchError(f"devices are in use: {error}") from None
    there, here = ({device.model for device in chosen} for chosen in (world.devices, own.devices))
    if there != here:
        # Step times would mix two kinds of machine.
        raise LaunchError(f"GPUs are {sorted(here)}, node 0's are {sorted(there)}; every node needs the same model")
    return replace(plan, world=own, lease_fds=leased.fds)


def _owner(plan: LaunchPlan) -> str:
    return f"node {plan.node} of {plan.name}"
