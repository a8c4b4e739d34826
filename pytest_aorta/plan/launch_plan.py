"""The plan of one launch, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pytest_aorta.common.errors import SpecError
from pytest_aorta.plan.options import LauncherKind
from pytest_aorta.plan.profiler import WRAPPED_STRAGGLER_S, WRAPPERS
from pytest_aorta.plan.reference import Reference
from pytest_aorta.plan.workload.adapter import Adapter
from pytest_aorta.plan.workload.command import CommandLine, command_line
from pytest_aorta.plan.workload.declaration import WorkloadSpec, filled_adapter, resolve_config
from pytest_aorta.plan.workload.environment import ENVIRONMENT_KEY
from pytest_aorta.plan.world import World


@dataclass(frozen=True)
class Limits:
    """When a launch is ended, next to its time limit.

    Attributes:
        error_grace_s: what ranks that have not failed get to tell their side once one has.
        straggler_s: what the others get to end once a rank has its result.
        output_cap_bytes: size of all logs together.
    """

    error_grace_s: float = 3.0
    straggler_s: float = 60.0
    output_cap_bytes: int = 64 << 20


def limits_under(profiler: str | None) -> Limits:
    """The limits of a launch under ``profiler``."""
    return Limits(straggler_s=WRAPPED_STRAGGLER_S) if profiler in WRAPPERS else Limits()


@dataclass(frozen=True)
class NodeGroup:
    """How ranks get onto several nodes.

    Attributes:
        num_nodes: nodes of the launch; this one is node 0.
        launcher: the command that starts one agent a node; empty: on other nodes agents wait.
        address, port: where agents reach this node; port 0: any.
        join_timeout_s: how long every node's agent may take to come.
    """

    num_nodes: int
    launcher: tuple[str, ...]
    address: str
    port: int
    join_timeout_s: float


@dataclass(frozen=True)
class NodePart:
    """One node's part of a launch over several.

    Attributes:
        endpoint: of the rendezvous, ``HOST:PORT``.
        run_id: the launch's own.
        local_address: of this node, as the others reach it.
        interface: the network interface with that address.
        store_fd: on node 0, the socket that listens at ``endpoint``.
    """

    num_nodes: int
    endpoint: str
    run_id: str
    local_address: str
    interface: str | None
    store_fd: int | None = None


@dataclass(frozen=True)
class LaunchRequest:
    """What to run: a workload with its config, or a script with its arguments.

    Attributes:
        spec, script: one excludes the other.
    """

    name: str
    spec: WorkloadSpec | None
    config: dict[str, Any]
    script: str | None
    args: tuple[str, ...]


@dataclass(frozen=True)
class LaunchPlan:
    """Everything a launch needs to know.

    Attributes:
        name, spec, config, script, args: what to run; spec and script exclude each other. Of the config, the
            ``environment`` is the ranks' own, and not the workload's.
        launcher: what should start the ranks, torchrun or forkserver.
        lease_fds: open files that mark devices as taken; held until the last rank is gone.
        reference: the version of the code, None for the one under test.
        profiler: what the ranks run under, torch, nsys or rocprofv3; None: nothing.
        group: on node 0, how ranks get onto the other nodes; None on a single one.
        part: on each node's agent, that node's part of such a launch.
    """

    name: str
    spec: WorkloadSpec | None
    config: dict[str, Any]
    script: str | None
    args: tuple[str, ...]
    world: World
    timeout_s: float
    run_dir: Path
    cwd: Path
    limits: Limits = Limits()
    launcher: LauncherKind = LauncherKind.TORCHRUN
    lease_fds: tuple[int, ...] = ()
    reference: Reference | None = None
    profiler: str | None = None
    group: NodeGroup | None = None
    part: NodePart | None = None


def at_reference(request: LaunchRequest, reference: Reference) -> LaunchRequest:
    """The request, of the reference's version of the workload or script.

    A config key that it doesn't know is left out where it has its default, so that a change which adds a key can be
    compared with its parent.

    Raises:
        SpecError: that has no such workload or script, or not its config keys.
    """
    if request.spec is None:
        return replace(request, script=reference.script(request.script or ""))
    spec, own = reference.workload(request.spec), request.spec.properties
    config = {
        key: value for key, value in request.config.items() if key in spec.properties or value != own[key]["default"]
    }
    try:
        return replace(request, spec=spec, config=resolve_config(spec, config))
    except SpecError as error:
        raise SpecError(f"at {reference.name}: {error}") from None


def rank_document(plan: LaunchPlan) -> dict[str, Any]:
    """The content of ``plan.json``, which ranks read and people look at."""
    target, command = None, command_of(plan)
    if plan.spec is not None and command is None:
        spec = plan.spec
        target = {
            "name": spec.name,
            "module": spec.module,
            "folder": str(spec.folder),
            "class": spec.class_name,
        }
    return {
        "name": plan.name,
        "workload": target,
        "config": {key: value for key, value in plan.config.items() if key != ENVIRONMENT_KEY},
        "environment": plan.config.get(ENVIRONMENT_KEY, {}),
        "script": plan.script if command is None else command.target,
        "args": list(plan.args if command is None else command.args),
        "adapters": [asdict(adapter) for adapter in adapters_of(plan)],
        "world_size": plan.world.size,
        "device": plan.world.device,
        "backend": plan.world.backend,
        "platform": plan.world.platform,
        "devices": [device.token for device in plan.world.devices],
        "timeout_s": plan.timeout_s,
        "reference": plan.reference and plan.reference.document(),
        "profiler": plan.profiler,
    }


def command_of(plan: LaunchPlan) -> CommandLine | None:
    """What ranks run where the workload is a command."""
    if plan.spec is None or plan.spec.command is None:
        return None
    return command_line(plan.spec.command, plan.config, folder=plan.spec.folder, run_dir=plan.run_dir)


def adapters_of(plan: LaunchPlan) -> list[Adapter]:
    """How each rank's log is read, in order of rank; empty where ranks record by themselves.

    Raises:
        SpecError: the adapter contradicts itself under this config.
    """
    if plan.spec is None or plan.spec.adapter is None:
        return []
    filled = (filled_adapter(plan.spec, plan.config, plan.run_dir, rank) for rank in range(plan.world.size))
    return [adapter for adapter in filled if adapter]
