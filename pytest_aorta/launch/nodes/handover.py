"""Code shared by both ends of a launch over several nodes: addresses, versions, and the plan as JSON."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import ipaddress
import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from pytest_aorta.common import variables
from pytest_aorta.common.documents import UnreadableFile
from pytest_aorta.common.errors import LaunchError
from pytest_aorta.common.files import PACKAGE_ROOT, files_below
from pytest_aorta.common.model import convert, to_builtins
from pytest_aorta.launch.command import with_own_code
from pytest_aorta.launch.guarded import start_watcher
from pytest_aorta.launch.nodes.network import listen
from pytest_aorta.launch.sweep import launch_ids
from pytest_aorta.plan.device_kind import Device
from pytest_aorta.plan.launch_plan import LaunchPlan, NodeGroup
from pytest_aorta.plan.options.run import Options

# The first variable that is set gives this node's number: ours, Slurm's, or that of a Kubernetes Indexed Job.
NODE_RANK_VARIABLES = (variables.NODE_RANK, "SLURM_NODEID", "JOB_COMPLETION_INDEX")


def node_group(options: Options, num_nodes: int) -> NodeGroup | None:
    """Return the node group of a launch on ``num_nodes`` nodes; None for one node.

    Raises:
        LaunchError: Other nodes can't reach this node at the address that was found or given.
    """
    if num_nodes == 1:
        return None
    host, port = options.rdzv_endpoint or (socket.gethostname(), 0)
    launcher = tuple(word.replace("{nodes}", str(num_nodes)) for word in options.node_launcher)
    address = own_address(host, given=options.rdzv_endpoint is not None)
    return NodeGroup(num_nodes, launcher, address, port, options.join_timeout_s)


def own_address(host: str, *, given: bool) -> str:
    """Return this machine's address to which the name ``host`` resolves, IPv4 if there is one.

    Raises:
        LaunchError: The name has no address, or the address belongs to another machine, or it is a loopback address and
            the user has not ``given`` the name.
    """
    remedy = "set the ini key aorta_rdzv_endpoint=ADDRESS[:PORT] to this machine's address in the network of the nodes"
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LaunchError(f"{host!r} can't be resolved ({error}); {remedy}", "node launcher") from None
    address = str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])
    if not given and ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        raise LaunchError(
            f"{host!r} is the loopback address {address}, which no other node reaches; {remedy}", "node launcher"
        )
    try:
        listen(address, 0).close()
    except OSError as error:
        raise LaunchError(
            f"{host!r} is {address}, which is not an address of this machine ({error.strerror or error}); {remedy}",
            "node launcher",
        ) from None
    return address


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


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions that have to be equal on every node."""
    digest = hashlib.sha256()
    for path in files_below(PACKAGE_ROOT, "*.py"):
        with suppress(FileNotFoundError):  # deleted after its folder was listed
            source = path.read_bytes()
            digest.update(f"{path.relative_to(PACKAGE_ROOT)} {len(source)}\n".encode() + source)
    return {
        "pytest-aorta": f"{_version('pytest-aorta')} (sources {digest.hexdigest()[:8]})",
        "torch": _version("torch"),
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def plan_to_json(plan: LaunchPlan) -> dict[str, Any]:
    """Return the part of a plan that a node agent needs; the rest applies to node 0 only."""
    part: dict[str, Any] = to_builtins(replace(plan, lease_fds=(), group=None, command=()))
    return part


def coordinator_spec(plan: LaunchPlan, lifeline_fd: int, verdict_fd: int) -> dict[str, Any]:
    """Return the argument of the coordinator's program."""
    if plan.group is None:
        raise ValueError("plan.group is None: a launch on one node has no coordinator")
    return {
        "name": plan.name,
        "run_dir": str(plan.run_dir),
        "plan": plan_to_json(plan),
        "world_size": plan.world.size,
        "time_limit_s": plan.timeout_s,
        "error_grace_s": plan.limits.error_grace_s,
        **to_builtins(plan.group),
        "versions": versions(),
        "lifeline_fd": lifeline_fd,
        "verdict_fd": verdict_fd,
    }


def start_coordinator(
    plan: LaunchPlan, environ: Mapping[str, str], lifeline_fd: int, verdict_fd: int
) -> subprocess.Popen[bytes]:
    """Start the coordinator in the guard's place: it starts the node agents and collects their guards' verdicts."""
    spec = json.dumps(coordinator_spec(plan, lifeline_fd, verdict_fd))
    command = [sys.executable, "-P", "-m", "pytest_aorta.launch.nodes.coordinator", spec]
    own = with_own_code(dict(environ)) | {variables.LAUNCH_ID: launch_ids(plan.run_dir, environ)}
    return start_watcher(plan, command, own, (lifeline_fd, verdict_fd))


def plan_from_json(data: Mapping[str, Any], run_dir: Path) -> LaunchPlan:
    """Return the plan of :func:`plan_to_json`, with a run folder of this node.

    Raises:
        LaunchError: The data are not such a plan.
    """
    try:
        return replace(convert(data, LaunchPlan, "plan of node 0"), run_dir=run_dir)
    except UnreadableFile as error:
        raise LaunchError(f"{error}; every node needs the same pytest-aorta") from None


def on_devices(plan: LaunchPlan, devices: tuple[Device, ...]) -> LaunchPlan:
    """Return the plan with this node's devices.

    Raises:
        LaunchError: Node 0 has GPUs of another model: step times would mix two kinds of machine.
    """
    there, here = ({device.model for device in chosen} for chosen in (plan.world.devices, devices))
    if there != here:
        raise LaunchError(f"GPUs are {sorted(here)}, node 0's are {sorted(there)}; every node needs the same model")
    return replace(plan, world=dataclasses.replace(plan.world, devices=devices))
