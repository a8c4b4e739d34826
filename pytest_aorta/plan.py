"""The plan of one launch: pure data, and pure functions from it to command line, environment and plan.json."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pytest_aorta.adapters import Adapter
from pytest_aorta.command_line import CommandLine, command_line
from pytest_aorta.devices import AMD, CUDA_VARIABLE, HIP_VARIABLE, ROCR_VARIABLE, World
from pytest_aorta.errors import SpecError
from pytest_aorta.process.guard import STORE_FD_VARIABLE
from pytest_aorta.process.wire import TOKEN_VARIABLE
from pytest_aorta.profilers import PROFILER_VARIABLE, WRAPPED_STRAGGLER_S, WRAPPERS, wrapper_command
from pytest_aorta.reference import Reference
from pytest_aorta.spec import WorkloadSpec, filled_adapter, resolve_config
from pytest_aorta.variables import ENVIRONMENT_KEY

TORCHRUN = "torchrun"
FORKSERVER = "forkserver"
# torchrun reads PET_* before its own flags, and ranks would take the others for their own.
_SCRUBBED_PREFIXES = ("PET_", "TORCHELASTIC_")
_SCRUBBED = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT",
}  # fmt: skip
# Of some hundred steps of a dozen layers.
_FLIGHT_RECORDS = "20000"
# Collectives give up before the launch does, so that they can say where they were.
_COLLECTIVE_SHARE = 0.8


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
    launcher: str = TORCHRUN
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


def agent_command(plan: LaunchPlan) -> list[str]:
    """The agent's command line: one node, a rendezvous on a port the kernel picks; or one node of several."""
    python = python_command(plan)
    torchrun = [*_rendezvous(plan), f"--nproc-per-node={plan.world.ranks_per_node}"]
    # torchrun's own way to start a module leaves no room for options of Python's.
    rank = ["-m"] if plan.reference is None else ["--no-python", *python, "-u", "-m"]
    run_dir = str(plan.run_dir)
    agent = [*python, "-m", "pytest_aorta.process.agent", run_dir]
    return [
        *wrapper_command(plan.profiler, plan.run_dir),
        *agent,
        *torchrun,
        *rank,
        "pytest_aorta.process.rank",
        run_dir,
    ]


def _rendezvous(plan: LaunchPlan) -> list[str]:
    if plan.part is None:
        return ["--standalone"]
    # The store is the agent's own (agent.py): left to themselves, no two nodes agree on who hosts it.
    conf = f"is_host=0,join_timeout={math.ceil(plan.timeout_s)}"
    return [
        f"--nnodes={plan.part.num_nodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={plan.part.endpoint}",
        f"--rdzv-id={plan.part.run_id}",
        f"--rdzv-conf={conf}",
        f"--local-addr={plan.part.local_address}",
    ]


def python_command(plan: LaunchPlan) -> list[str]:
    """The interpreter of this plan's agent and ranks."""
    if plan.reference is None:
        return [sys.executable]
    # Without -P the folder it runs in would come first of all, also where that has another version of our modules.
    return [plan.reference.python, "-P"]


def launch_environment(plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """The agent's and the ranks' environment: the caller's without another launch's variables, the config's, ours."""
    kept = {
        name: value
        for name, value in environ.items()
        if name not in _SCRUBBED and not name.startswith(_SCRUBBED_PREFIXES)
    }
    kept |= plan.config.get(ENVIRONMENT_KEY, {})
    _show_devices(plan.world, kept)
    kept["AORTA_DEVICE"] = plan.world.device
    kept["AORTA_COLLECTIVE_TIMEOUT_S"] = f"{plan.timeout_s * _COLLECTIVE_SHARE:.3f}"
    kept.pop(PROFILER_VARIABLE, None)
    if plan.profiler is not None:
        kept[PROFILER_VARIABLE] = plan.profiler
    # torchrun would set it with a warning; numbers depend on it.
    kept.setdefault("OMP_NUM_THREADS", "1")
    if command := command_of(plan):
        kept |= command.environment
    if plan.world.device == "cuda":
        kept |= _flight_recorder(plan, kept)
    if plan.part is not None:
        _join_nodes(plan.part, kept)
    if plan.reference is not None:
        return plan.reference.environment(kept)
    return with_own_code(kept)


def with_own_code(environ: dict[str, str]) -> dict[str, str]:
    """``environ``, in which programs run the very code that pytest runs, also where it is not installed."""
    package_parent = Path(__file__).resolve().parents[1]
    if package_parent.name not in ("site-packages", "dist-packages"):
        environ["PYTHONPATH"] = ":".join(filter(None, [str(package_parent), environ.get("PYTHONPATH")]))
    return environ


def _join_nodes(part: NodePart, environ: dict[str, str]) -> None:
    # Not for ranks, which run what they are given.
    environ.pop(TOKEN_VARIABLE, None)
    if part.interface is not None:
        # Gloo asks for the host's own name otherwise, which often leads to an interface that no other node reaches.
        environ.setdefault("GLOO_SOCKET_IFNAME", part.interface)
    if part.store_fd is not None:
        environ[STORE_FD_VARIABLE] = str(part.store_fd)


def _show_devices(world: World, environ: dict[str, str]) -> None:
    """Let ranks see the world's devices in its order and no others; HIP_VISIBLE_DEVICES counts what ROCR's left."""
    tokens = ",".join(device.token for device in world.devices)
    if world.device == "cpu":
        # To HIP an empty value is none.
        environ |= {CUDA_VARIABLE: "", HIP_VARIABLE: "-1", ROCR_VARIABLE: ""}
    elif any(device.vendor == AMD for device in world.devices):
        environ[HIP_VARIABLE] = tokens
        environ.pop(CUDA_VARIABLE, None)
    else:
        environ[CUDA_VARIABLE] = tokens


def _flight_recorder(plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """Have NCCL's collectives recorded, and dumped when one of them runs out of time; by torch's old and new names."""
    size = environ.get("TORCH_FR_BUFFER_SIZE") or environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE") or _FLIGHT_RECORDS
    prefix = str(plan.run_dir / "flight" / "rank_")
    return {
        "TORCH_FR_BUFFER_SIZE": size,
        "TORCH_NCCL_TRACE_BUFFER_SIZE": size,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        # How long each rank was in its collectives tells the slow one.
        "TORCH_NCCL_ENABLE_TIMING": environ.get("TORCH_NCCL_ENABLE_TIMING", "1"),
        "TORCH_FR_DUMP_TEMP_FILE": prefix,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": prefix,
    }
