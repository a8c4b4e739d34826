"""The line about a run's devices, which pytest shows below the number of collected tests."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from pytest_aorta.plan.device_kind import Device, DeviceKind
from pytest_aorta.plan.options import Options, WithoutGpus
from pytest_aorta.plan.world import CPU_WORLD_SIZE, World, num_usable_gpus


def header(options: Options, devices: Sequence[Device]) -> str:
    """Return the devices, torch, platform and baselines of this run in one line."""
    usable = num_usable_gpus(options, devices)
    models = sorted({device.model for device in devices[:usable]})
    where = f"{usable} x {' + '.join(models)}" if usable else "no GPU (CPU ranks)"
    used = tuple(devices[:usable])
    world = World(usable, used[0].kind, used) if used else World(CPU_WORLD_SIZE, DeviceKind.CPU)
    if options.without_gpus == WithoutGpus.SIMULATE:
        where += ", missing GPUs simulated"
    if options.nnodes > 1:
        where += f" on each of {options.nnodes} nodes"
    folder = str(options.baselines_dir).removeprefix(f"{options.rootdir}/")
    return f"aorta: {where}, torch {_torch_version()}, platform {world.platform}, baselines {folder}"


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return "not installed"
