"""Command line and environment of a launch's torchrun agent and ranks."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping

from pytest_aorta.common import variables
from pytest_aorta.common.errors import LaunchError
from pytest_aorta.common.files import PACKAGE_ROOT
from pytest_aorta.launch.sweep import launch_ids
from pytest_aorta.plan.accelerators import show_devices
from pytest_aorta.plan.device_kind import DeviceKind
from pytest_aorta.plan.launch_plan import LaunchPlan
from pytest_aorta.plan.profiler import wrapper_command
from pytest_aorta.plan.workload_command import ENVIRONMENT_KEY, pinned_cpu_kernels
from pytest_aorta.result.folder import ELASTIC_FOLDER, flight_prefix

# torchrun reads PET_* before its flags, and ranks would read the other variables as their own.
_SCRUBBED_PREFIXES = ("PET_", "TORCHELASTIC_")
_SCRUBBED = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT",
}  # fmt: skip
# Enough records for a few hundred steps of a dozen layers.
_FLIGHT_RECORDS = "20000"
# Collectives time out before the launch does, so that the flight recorder can be dumped.
_COLLECTIVE_FRACTION = 0.8


def require_torch() -> None:
    """Check that this interpreter, which starts the ranks, has torch; torch is not imported.

    Raises:
        LaunchError: torch is not installed.
    """
    try:
        found = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise LaunchError(
            f"torch is not installed for {sys.executable}, which starts the ranks; install it as "
            f"https://pytorch.org/get-started says for this machine, or use an environment that has it"
        )


def agent_command(plan: LaunchPlan) -> list[str]:
    """Return the command line of the torchrun agent, for one node or for this node's part of several."""
    python = python_command(plan)
    torchrun = [f"--nnodes={plan.world.nodes}", f"--node-rank={plan.node or 0}"]
    torchrun.append(f"--nproc-per-node={plan.world.ranks_per_node}")
    # By default torchrun leaves a folder among the temporary files, where nothing deletes it.
    torchrun.append(f"--log-dir={plan.run_dir / ELASTIC_FOLDER}")
    # torchrun's own option to start a module can't pass options to Python.
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


def python_command(plan: LaunchPlan) -> list[str]:
    """Return the interpreter, with its options, of this plan's torchrun agent and ranks."""
    if plan.reference is None:
        return [sys.executable]
    # Without -P the working folder would come first on the path, even if it contains other versions of our modules.
    return [plan.reference.python, "-P"]


def launch_environment(plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the torchrun agent and the ranks.

    It contains the caller's variables except those of another launch, then the config's variables, then ours.
    """
    # The user can name node 0's address in the network of the nodes; torchrun sets the variable anew for its ranks.
    scrubbed = _SCRUBBED if plan.world.nodes == 1 else _SCRUBBED - {"MASTER_ADDR"}
    kept = {
        name: value
        for name, value in environ.items()
        if name not in scrubbed and not name.startswith(_SCRUBBED_PREFIXES)
    }
    kept |= plan.config.get(ENVIRONMENT_KEY, {})
    show_devices(plan.world.devices, kept)
    kept[variables.DEVICE] = plan.world.device
    kept[variables.COLLECTIVE_TIMEOUT_S] = f"{plan.timeout_s * _COLLECTIVE_FRACTION:.3f}"
    for name, value in ((variables.PROFILER, plan.profiler), (variables.PROFILER_SCHEDULE, plan.profiler_schedule)):
        kept.pop(name, None)
        if value is not None:
            kept[name] = str(value)
    # torchrun would set the variable with a warning; measured times depend on its value.
    kept.setdefault("OMP_NUM_THREADS", "1")
    if plan.world.device == DeviceKind.CPU:
        kept = pinned_cpu_kernels() | kept
    if program := plan.program():
        kept |= program.environment
    # Set after all that a config can set: without the id, processes could be left when the guard is killed.
    kept[variables.LAUNCH_ID] = launch_ids(plan.run_dir, environ)
    if plan.world.device == "cuda":
        kept |= _flight_recorder(plan, kept)
    else:
        # gloo records when each rank arrives at its collectives, which identifies the straggler.
        kept.setdefault("TORCH_FR_BUFFER_SIZE", _FLIGHT_RECORDS)
    if plan.reference is not None:
        return plan.reference.environment(kept)
    return with_own_code(kept)


def with_own_code(environ: dict[str, str]) -> dict[str, str]:
    """Return ``environ`` changed so that programs import the same pytest-aorta as pytest, installed or not."""
    package_parent = PACKAGE_ROOT.parent
    if package_parent.name not in ("site-packages", "dist-packages"):
        environ["PYTHONPATH"] = ":".join(filter(None, [str(package_parent), environ.get("PYTHONPATH")]))
    return environ


def _flight_recorder(plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables, under torch's old and new names, that record NCCL's collectives and dump them on a timeout."""
    size = environ.get("TORCH_FR_BUFFER_SIZE") or environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE") or _FLIGHT_RECORDS
    prefix = str(flight_prefix(plan.run_dir))
    return {
        "TORCH_FR_BUFFER_SIZE": size,
        "TORCH_NCCL_TRACE_BUFFER_SIZE": size,
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        # The time that each rank spends in its collectives identifies the straggler.
        "TORCH_NCCL_ENABLE_TIMING": environ.get("TORCH_NCCL_ENABLE_TIMING", "1"),
        "TORCH_FR_DUMP_TEMP_FILE": prefix,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": prefix,
    }
