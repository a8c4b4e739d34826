"""The world a test gets: its ranks and the devices they compute on."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from pytest_aorta.common.errors import DevicesUnavailable
from pytest_aorta.plan.options import Options

CUDA_VARIABLE, HIP_VARIABLE, ROCR_VARIABLE = VISIBLE_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
)
NVIDIA = "nvidia"
AMD = "amd"
BACKENDS = {"cuda": "nccl", "cpu": "gloo"}
CPU_WORLD_SIZE = 2
# More gloo ranks than this on one host measure only the scheduler.
MAX_CPU_RANKS_PER_CORE = 8


@dataclass(frozen=True)
class Device:
    """One GPU.

    Attributes:
        token: how CUDA_VISIBLE_DEVICES names it, or HIP_VISIBLE_DEVICES on AMD.
        model: its product name.
        uuid: its own name, the same for every process of the host.
        vendor: ``nvidia`` or ``amd``.
    """

    token: str
    model: str
    uuid: str
    vendor: str = NVIDIA


@dataclass(frozen=True)
class World:
    """The ranks a test gets: ``devices`` has one entry a rank of this node on ``cuda`` and none on ``cpu``."""

    size: int
    device: str
    devices: tuple[Device, ...] = ()
    nodes: int = 1

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node."""
        return self.size // self.nodes

    @property
    def backend(self) -> str:
        """The process group's backend."""
        return BACKENDS[self.device]

    @property
    def platform(self) -> str:
        """The key of its baselines: accelerator model, count, nodes where there are several, and backend."""
        models = sorted({device.model for device in self.devices}) or ["cpu"]
        model = "+".join(re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-") for model in models)
        nodes = f"-n{self.nodes}" if self.nodes > 1 else ""
        return f"{model}-x{self.size}{nodes}-{self.backend}"


def resolve_world(spec: WorldSpec, options: Options, devices: list[Device]) -> World:
    """The world a test gets.

    Raises:
        DevicesUnavailable: it asks for devices that this run may not use or does not have.
    """
    budget = 0 if options.device == "cpu" else len(devices) if options.gpus is None else options.gpus
    given = f"{budget} given" + (f" (--aorta-gpus={options.gpus})" if options.gpus is not None else "")
    if options.device == "cpu":
        given += " (--aorta-device=cpu)"
    on_gpu = spec.device == "cuda" or (spec.device == "any" and (budget > 0 or options.device == "cuda"))
    _refuse_nodes(spec.nodes, options)
    if not on_gpu:
        return _cpu_world(spec, options, given)
    size = budget * spec.nodes if spec.size == "all" else int(spec.size)
    here = size // spec.nodes
    if here > budget or size == 0:
        where = " on each node" if spec.nodes > 1 else ""
        needed = "at least 1 GPU" if spec.size == "all" else f"{here} GPUs"
        raise DevicesUnavailable(f"needs {needed}{where}, {given}")
    return World(size, "cuda", tuple(devices[:here]), spec.nodes)


def check_budget(options: Options, devices: list[Device], environ: Mapping[str, str] = os.environ) -> None:
    """Refuse a run that was promised more GPUs than there are.

    Raises:
        DevicesUnavailable: naming what is visible.
    """
    # A run on CPU ranks may leave the GPUs that its ini file promises alone.
    if options.device != "cpu" and options.gpus is not None and options.gpus > len(devices):
        given = [f"{name}={environ[name]!r}" for name in VISIBLE_VARIABLES if name in environ]
        limited = f" with {' and '.join(given)}" if given else ""
        raise DevicesUnavailable(
            f"--aorta-gpus={options.gpus}: {len(devices)} GPUs are visible{limited}; ask for at most that many, "
            f"or for 0 to run on CPU ranks"
        )


def _refuse_nodes(nodes: int, options: Options) -> None:
    """Raise DevicesUnavailable unless the run has, and can start ranks on, that many nodes."""
    given = f"{options.nnodes} given (--aorta-nnodes={options.nnodes})"
    if nodes > options.nnodes:
        raise DevicesUnavailable(f"needs {nodes} nodes, {given}")
    takes_any = not options.node_launcher or any("{nodes}" in word for word in options.node_launcher)
    if 1 < nodes < options.nnodes and not takes_any:
        raise DevicesUnavailable(
            f"needs {nodes} nodes, {given}, and --aorta-node-launcher starts an agent on each; write {{nodes}} in it "
            f"where the number of nodes stands"
        )


def _cpu_world(spec: WorldSpec, options: Options, given: str) -> World:
    if options.require_gpus and spec.device == "any":
        raise DevicesUnavailable(f"needs GPUs, {given}; --aorta-require-gpus forbids CPU ranks in their place")
    if options.device == "cuda":
        raise DevicesUnavailable("runs on CPU ranks only, and --aorta-device=cuda was given")
    size = CPU_WORLD_SIZE * spec.nodes if spec.size == "all" else int(spec.size)
    world = World(size, "cpu", nodes=spec.nodes)
    limit = MAX_CPU_RANKS_PER_CORE * (os.cpu_count() or 1)
    if world.ranks_per_node > limit:
        raise DevicesUnavailable(
            f"needs {world.ranks_per_node} ranks; {os.cpu_count()} cores take at most {limit} CPU ranks"
        )
    return world


DEVICES = ("any", "cuda", "cpu")
MAX_WORLD_SIZE = 1 << 16
MAX_NODES = 1 << 12


@dataclass(frozen=True)
class WorldSpec:
    """Ranks asked for: ``size`` is a number or ``"all"``; ``device`` is any, cuda or cpu; ``nodes`` share them evenly.

    ``warm`` asks for the fork server or, where False, for torchrun; None leaves it to the option.
    """

    size: int | str = 2
    device: str = "any"
    warm: bool | None = None
    nodes: int = 1
