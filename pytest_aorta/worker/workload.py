"""Base class of workloads, with the identity of their rank."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from pytest_aorta.plan.device_kind import BACKENDS, DeviceKind
from pytest_aorta.result.measurements import RankResult
from pytest_aorta.worker.accelerator import device_kind, on_accelerator
from pytest_aorta.worker.layout import NamedTensor
from pytest_aorta.worker.own_plan import own_plan


class Workload(ABC):
    """A distributed program that a test can launch; one instance lives in each rank.

    The lifecycle is ``setup()``, ``run()``, ``cleanup()``. The workload owns ``torch.distributed``: ``setup()`` joins
    the process group and ``cleanup()`` leaves it. If ``setup()`` or ``run()`` raises, the process ends without
    ``cleanup()``, since collectives of a broken world can hang.

    Attributes:
        min_world_size: the smallest number of ranks that the workload can run on.
        config: the value of every config key: the default in ``default.yaml``, or the value that a preset or the test
            gives; checked before the launch.
    """

    min_world_size: ClassVar[int] = 1

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config: dict[str, Any] = dict(config)

    @abstractmethod
    def setup(self) -> None:
        """Join the process group and allocate memory.

        Raises:
            RuntimeError, ValueError: There are fewer than ``min_world_size`` ranks, or the config cannot be satisfied.
        """

    @abstractmethod
    def run(self) -> RankResult:
        """Warm up, run the measured loop and return this rank's result."""

    def named_parameters(self) -> Iterable[NamedTensor]:
        """Return the trained parameters, which must be finite at the end of the run.

        By default, these are the parameters of all modules that are attributes of the workload. Override this method
        if the workload keeps parameters elsewhere.
        """
        # A wrapper and the module in it have the same parameters, each of which is returned once.
        found: dict[int, NamedTensor] = {}
        for attribute, value in vars(self).items():
            if isinstance(value, torch.nn.Module):
                for name, parameter in value.named_parameters():
                    found.setdefault(id(parameter), (f"{attribute}.{name}", parameter))
        return found.values()

    @abstractmethod
    def cleanup(self) -> None:
        """Leave the process group and free the resources of ``setup()``."""


@dataclass(frozen=True)
class RankEnv:
    """The identity of this rank, its kind of device, and the timeout of its collectives.

    Attributes:
        rank: Number of this rank, from 0.
        world_size: Number of ranks on all nodes.
        local_rank: Number of this rank on its node, from 0; on accelerators also the index of its device.
        device_kind (str): Kind of device that this rank computes on, ``cuda`` or ``cpu``.
        collective_timeout_s: Timeout of the default process group's collectives, in seconds.
    """

    rank: int
    world_size: int
    local_rank: int
    device_kind: DeviceKind
    collective_timeout_s: float

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> RankEnv:
        """Read RANK, WORLD_SIZE, LOCAL_RANK and AORTA_DEVICE.

        Without AORTA_DEVICE, the device is the accelerator that torch finds. Without a launch, the timeout is 600 s.

        Raises:
            RuntimeError: One of the first three variables is absent or not an integer, or the device is unknown.
        """
        rank, size, local_rank = (_integer(environ, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        plan = own_plan()
        timeout_s = plan.collective_timeout_s if plan is not None else 600.0
        return cls(rank, size, local_rank, device_kind(environ), timeout_s)

    def require(self, workload: str, min_world_size: int) -> None:
        """Raise RuntimeError if the world has fewer ranks than ``workload`` needs."""
        if self.world_size < min_world_size:
            raise RuntimeError(
                f"workload {workload!r} needs at least {min_world_size} ranks and was started with "
                f"WORLD_SIZE={self.world_size}: there is nothing to shard or to communicate on fewer. Ask for more "
                f"with @pytest.mark.world(size={min_world_size}) or torchrun --nproc-per-node={min_world_size}."
            )

    def join(self, workload: str, *, min_world_size: int = 1) -> torch.device:
        """Join the default process group (NCCL on ``cuda``, gloo on ``cpu``) and return this rank's device.

        An accelerator becomes the current one.

        Args:
            workload: Name of the workload, for the error message.
            min_world_size: Smallest number of ranks that the workload can run on.

        Raises:
            RuntimeError: The world has fewer ranks than ``min_world_size``; no process group is initialized.
        """
        self.require(workload, min_world_size)
        device = torch.device("cpu")
        if self.device_kind is not DeviceKind.CPU:
            device = torch.device(self.device_kind, self.local_rank)
            torch.accelerator.set_device_index(self.local_rank)
        dist.init_process_group(
            BACKENDS[self.device_kind],
            timeout=timedelta(seconds=self.collective_timeout_s),
            device_id=device if on_accelerator(device) else None,
        )
        return device


def _integer(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name)
    try:
        return int(text or "")
    except ValueError:
        raise RuntimeError(f"variable {name} is {text!r}, not an integer: start ranks with torchrun") from None
