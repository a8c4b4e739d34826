"""The plan of one launch: pure data, and pure functions from it to command line, environment and plan.json."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_aorta.devices import AMD, CUDA_VARIABLE, HIP_VARIABLE, ROCR_VARIABLE, World
from pytest_aorta.spec import WorkloadSpec

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


@dataclass(frozen=True)
class LaunchPlan:
    """Everything a launch needs to know.

    Attributes:
        spec, script: what to run; one excludes the other.
        launcher: what should start the ranks, torchrun or forkserver.
        lease_fds: open files that mark devices as taken; held until the last rank is gone.
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


def rank_document(plan: LaunchPlan) -> dict[str, Any]:
    """The content of ``plan.json``, which ranks read and people look at."""
    target = None
    if plan.spec is not None:
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
        "config": plan.config,
        "script": plan.script,
        "args": list(plan.args),
        "world_size": plan.world.size,
        "device": plan.world.device,
        "backend": plan.world.backend,
        "platform": plan.world.platform,
        "devices": [device.token for device in plan.world.devices],
        "timeout_s": plan.timeout_s,
    }


def agent_command(plan: LaunchPlan) -> list[str]:
    """The agent's command line: one node, a rendezvous on a port the kernel picks."""
    python = [sys.executable, "-m"]
    torchrun = ["--standalone", f"--nproc-per-node={plan.world.size}", "-m", "pytest_aorta.process.rank"]
    return [*python, "pytest_aorta.process.agent", str(plan.run_dir), *torchrun, str(plan.run_dir)]


def launch_environment(plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """The agent's and the ranks' environment: the caller's without another launch's variables, with the plan's."""
    kept = {
        name: value
        for name, value in environ.items()
        if name not in _SCRUBBED and not name.startswith(_SCRUBBED_PREFIXES)
    }
    _show_devices(plan.world, kept)
    kept["AORTA_DEVICE"] = plan.world.device
    kept["AORTA_COLLECTIVE_TIMEOUT_S"] = f"{plan.timeout_s * _COLLECTIVE_SHARE:.3f}"
    # torchrun would set it with a warning; numbers depend on it.
    kept.setdefault("OMP_NUM_THREADS", "1")
    if plan.world.device == "cuda":
        kept |= _flight_recorder(plan, kept)
    package_parent = Path(__file__).resolve().parents[1]
    if package_parent.name not in ("site-packages", "dist-packages"):
        # Ranks run the very code that pytest runs, also where it is not installed.
        kept["PYTHONPATH"] = ":".join(filter(None, [str(package_parent), kept.get("PYTHONPATH")]))
    return kept


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
