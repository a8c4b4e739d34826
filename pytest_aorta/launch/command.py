"""Command line and environment of a launch."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping

from pytest_aorta.common import variables
from pytest_aorta.common.files import PACKAGE_ROOT
from pytest_aorta.plan.launch_plan import LaunchPlan, NodePart, command_of
from pytest_aorta.plan.profiler import wrapper_command
from pytest_aorta.plan.workload.environment import ENVIRONMENT_KEY
from pytest_aorta.plan.world import AMD, CUDA_VARIABLE, HIP_VARIABLE, ROCR_VARIABLE, World
from pytest_aorta.result.folder import flight_prefix

# torchrun reads PET_* before its own flags, and ranks would take the others for their own.
_SCRUBBED_PREFIXES = ("PET_", "TORCHELASTIC_")
_SCRUBBED = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT",
}  # fmt: skip
# Of some hundred steps of a dozen layers.
_FLIGHT_RECORDS = "20000"
# Collectives give up before the launch does, so that they can say where they were.
_COLLECTIVE_SHARE = 0.8


def agent_command(plan: LaunchPlan) -> list[str]:
    """The agent's command line: one node, a rendezvous on a port the kernel picks; or one node of several."""
    python = python_command(plan)
    torchrun = [*_rendezvous(plan), f"--nproc-per-node={plan.world.ranks_per_node}"]
    # torchrun's own way to start a module leaves no room for options of Python's.
    rank = ["-m"] if plan.reference is None else ["--no-python", *python, "-u", "-m"]
    run_dir = str(plan.run_dir)
    agent = [*python, "-m", "pytest_aorta.launch.process.torchrun", run_dir]
    return [
        *wrapper_command(plan.profiler, plan.run_dir),
        *agent,
        *torchrun,
        *rank,
        "pytest_aorta.launch.process.rank",
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
    kept[variables.DEVICE] = plan.world.device
    kept[variables.COLLECTIVE_TIMEOUT_S] = f"{plan.timeout_s * _COLLECTIVE_SHARE:.3f}"
    kept.pop(variables.PROFILER, None)
    if plan.profiler is not None:
        kept[variables.PROFILER] = plan.profiler
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
    package_parent = PACKAGE_ROOT.parent
    if package_parent.name not in ("site-packages", "dist-packages"):
        environ["PYTHONPATH"] = ":".join(filter(None, [str(package_parent), environ.get("PYTHONPATH")]))
    return environ


def _join_nodes(part: NodePart, environ: dict[str, str]) -> None:
    # Not for ranks, which run what they are given.
    environ.pop(variables.AGENT_TOKEN, None)
    if part.interface is not None:
        # Gloo asks for the host's own name otherwise, which often leads to an interface that no other node reaches.
        environ.setdefault("GLOO_SOCKET_IFNAME", part.interface)
    if part.store_fd is not None:
        environ[variables.STORE_FD] = str(part.store_fd)


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
    prefix = str(flight_prefix(plan.run_dir))
    return {
        "TORCH_FR_BUFFER_SIZE": size,
        "TORCH_NCCL_TRACE_BUFFER_SIZE": size,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        # How long each rank was in its collectives tells the slow one.
        "TORCH_NCCL_ENABLE_TIMING": environ.get("TORCH_NCCL_ENABLE_TIMING", "1"),
        "TORCH_FR_DUMP_TEMP_FILE": prefix,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": prefix,
    }
