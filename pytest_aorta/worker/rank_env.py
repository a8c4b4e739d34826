"""The identity of this rank, from the environment that torchrun sets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from pytest_aorta.common import variables
from pytest_aorta.plan.device_kind import BACKENDS, DeviceKind
from pytest_aorta.worker.accelerator import device_kind, on_accelerator


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
        """Read RANK, WORLD_SIZE, LOCAL_RANK, AORTA_DEVICE and AORTA_COLLECTIVE_TIMEOUT_S.

        Without AORTA_DEVICE, the device is the accelerator that torch finds. The timeout is 600 s by default.

        Raises:
            RuntimeError: One of the first three variables is absent or not an integer, or the device is unknown.
            ValueError: The timeout is not a number.
        """
        numbers = {name: _integer(environ, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        return cls(
            rank=numbers["RANK"],
            world_size=numbers["WORLD_SIZE"],
            local_rank=numbers["LOCAL_RANK"],
            device_kind=device_kind(environ),
            collective_timeout_s=float(environ.get(variables.COLLECTIVE_TIMEOUT_S, "600")),
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
        if self.world_size < min_world_size:
            raise RuntimeError(
                f"workload {workload!r} needs at least {min_world_size} ranks and was started with "
                f"WORLD_SIZE={self.world_size}: there is nothing to shard or to communicate on fewer. Ask for more "
                f"with @pytest.mark.world(size={min_world_size}) or torchrun --nproc-per-node={min_world_size}."
            )
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
        raise RuntimeError(
            f"environment variable {name} is {text!r} and has to be an integer: start ranks with torchrun"
        ) from None
