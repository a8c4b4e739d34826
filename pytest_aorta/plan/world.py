"""The world of a test: its ranks and the devices they compute on."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pytest_aorta.common.errors import DevicesUnavailable
from pytest_aorta.common.text import counted
from pytest_aorta.plan.device_kind import ACCELERATED, BACKENDS, VISIBLE_VARIABLES, Backend, Device, DeviceKind
from pytest_aorta.plan.options import Options, WithoutGpus

CPU_WORLD_SIZE = 2
# With more gloo ranks per core than this, step times measure only the scheduler.
MAX_CPU_RANKS_PER_CORE = 8
MAX_WORLD_SIZE = 1 << 16
MAX_NODES = 1 << 12


# Value of the world marker's device that leaves the choice to the options of the run.
ANY_DEVICE = "any"
DEVICES = (ANY_DEVICE, *DeviceKind)
# Value of the world marker's size that asks for all devices of the run.
ALL_DEVICES = "all"
# Begin of the platform of simulated worlds.
SIMULATED = "simulated"
MAX_SIMULATED_RANKS = 64


@dataclass(frozen=True)
class World:
    """The ranks of a test.

    Attributes:
        size: Number of ranks on all nodes.
        device: Kind of device that ranks compute on.
        devices: The GPU of each rank of this node; empty on ``cpu``.
        nodes: Number of nodes, which share the ranks evenly.
        simulated: The ranks that are simulated, on CPU: only these are started, and nothing is exchanged; empty if all
            ranks are started.
    """

    size: int
    device: DeviceKind
    devices: tuple[Device, ...] = ()
    nodes: int = 1
    simulated: tuple[int, ...] = ()

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that are started, in order."""
        return self.simulated or range(self.size)

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks that are started on each node."""
        return len(self.ranks) // self.nodes

    @property
    def backend(self) -> Backend:
        """The backend of the process group."""
        return Backend.FAKE if self.simulated else BACKENDS[self.device]

    @property
    def platform(self) -> str:
        """The key of baselines: GPU model, number of ranks, number of nodes if there are several, and backend.

        For example ``nvidia-h200-x4-nccl`` or ``cpu-x2-gloo``; ``simulated-x1024`` for a simulated world.
        """
        if self.simulated:
            return f"{SIMULATED}-x{self.size}"
        models = sorted({device.model for device in self.devices}) or [str(DeviceKind.CPU)]
        model = "+".join(re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-") for model in models)
        nodes = f"-n{self.nodes}" if self.nodes > 1 else ""
        return f"{model}-x{self.size}{nodes}-{self.backend}"

    def first(self, size: int) -> World:
        """Return the world of the first ``size`` ranks of one node."""
        return replace(self, size=size, devices=self.devices[:size])


@dataclass(frozen=True)
class WorldSpec:
    """The ranks that a test asks for.

    Attributes:
        size: Number of ranks, or ``"all"`` devices of this run.
        device: ``any``, ``cuda`` or ``cpu``.
        warm: True asks for the fork server, False for torchrun; None leaves the choice to ``--aorta-launcher``.
        nodes: Number of nodes, which share the ranks evenly.
        simulated: The ranks to simulate; empty: none, all ranks are started; None: none, unless
            ``--aorta-without-gpus=simulate`` simulates rank 0 for lack of GPUs.
    """

    size: int | str = 2
    device: str = ANY_DEVICE
    warm: bool | None = None
    nodes: int = 1
    simulated: tuple[int, ...] | None = None

    def num_ranks(self, here: int) -> int:
        """Return the number of ranks on all nodes, given the number of devices ``here``, on one node."""
        return here * self.nodes if self.size == ALL_DEVICES else int(self.size)


def resolve_world(spec: WorldSpec, options: Options, devices: list[Device]) -> World:
    """Return the world of a test; under ``--aorta-without-gpus=simulate``, a simulated one in place of missing devices.

    ``--aorta-gpus`` says how many GPUs the run is for: all devices are so many, whether or not they are visible, and a
    test on any device takes GPUs unless the run is for none.

    Raises:
        DevicesUnavailable: The test asks for devices that this run may not use or does not have.
    """
    if spec.simulated:
        return World(int(spec.size), DeviceKind.CPU, simulated=spec.simulated)
    try:
        return _real_world(spec, options, devices)
    except DevicesUnavailable:
        size = spec.num_ranks(options.gpus or 0)
        if options.without_gpus != WithoutGpus.SIMULATE or spec.simulated is not None or size == 0:
            raise
        return World(size, DeviceKind.CPU, simulated=(0,))


def _real_world(spec: WorldSpec, options: Options, devices: list[Device]) -> World:
    wanted = {spec.device} & ACCELERATED
    devices = [device for device in devices if wanted <= {device.kind}]
    budget = len(devices) if options.gpus is None else options.gpus
    given = _given(options, len(devices))
    takes_gpu = spec.device == ANY_DEVICE and budget > 0
    if spec.nodes > options.nnodes:
        raise DevicesUnavailable(f"needs {spec.nodes} nodes, {options.nnodes} given (--aorta-nnodes={options.nnodes})")
    if not takes_gpu and spec.device not in ACCELERATED:
        return _cpu_world(spec, options, given)
    size = spec.num_ranks(budget)
    here = size // spec.nodes
    if here > min(budget, len(devices)) or size == 0:
        where = " on each node" if spec.nodes > 1 else ""
        needed = counted(here, "GPU") if here else "at least 1 GPU"
        raise DevicesUnavailable(f"needs {needed}{where}, {given}")
    return World(size, devices[0].kind, tuple(devices[:here]), spec.nodes)


def _given(options: Options, visible: int) -> str:
    """Return how many GPUs a run has on this node, and what limits them."""
    if options.gpus is None:
        return f"{visible} given"
    if options.gpus <= visible:
        return f"{options.gpus} given (--aorta-gpus={options.gpus})"
    limits = [f"{name}={os.environ[name]!r}" for name in VISIBLE_VARIABLES if name in os.environ]
    return f"{visible} visible (--aorta-gpus={options.gpus}{''.join(f', {limit}' for limit in limits)})"


def _cpu_world(spec: WorldSpec, options: Options, given: str) -> World:
    if options.without_gpus == WithoutGpus.FAIL and spec.device == ANY_DEVICE:
        raise DevicesUnavailable(f"needs GPUs, {given}; CPU ranks are not allowed instead")
    world = World(spec.num_ranks(CPU_WORLD_SIZE), DeviceKind.CPU, nodes=spec.nodes)
    limit = MAX_CPU_RANKS_PER_CORE * (os.cpu_count() or 1)
    if world.ranks_per_node > limit:
        raise DevicesUnavailable(f"needs {world.ranks_per_node} ranks; {os.cpu_count()} cores take at most {limit}")
    return world
