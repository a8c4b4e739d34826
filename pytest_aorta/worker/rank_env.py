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


@dataclass(frozen=True)
class RankEnv:
    """The identity of this rank, its kind of device, and the timeout of its collectives.

    Attributes:
        rank: Number of this rank, from 0.
        world_size: Number of ranks on all nodes.
        local_rank: Number of this rank on its node, from 0; on ``cuda`` also the index of its GPU.
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

        Without AORTA_DEVICE, the device is ``cuda`` if torch finds a GPU. The timeout is 600 s by default.

        Raises:
            RuntimeError: One of the first three variables is absent or not an integer, or the device is unknown.
            ValueError: The timeout is not a number.
        """
        numbers = {name: _integer(environ, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        kind = _device_kind(environ)
        if kind not in list(DeviceKind):
            raise RuntimeError(
                f"{variables.DEVICE}={kind!r} is unknown; it can be one of {sorted(map(str, DeviceKind))}"
            )
        return cls(
            rank=numbers["RANK"],
            world_size=numbers["WORLD_SIZE"],
            local_rank=numbers["LOCAL_RANK"],
            device_kind=DeviceKind(kind),
            collective_timeout_s=float(environ.get(variables.COLLECTIVE_TIMEOUT_S, "600")),
        )

    def join(self, workload: str, *, min_world_size: int = 1) -> torch.device:
        """Join the default process group (NCCL on ``cuda``, gloo on ``cpu``) and return this rank's device.

        On ``cuda`` the device becomes the current one.

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
        if self.device_kind is DeviceKind.CUDA:
            device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(device)
        dist.init_process_group(
            BACKENDS[DeviceKind(self.device_kind)],
            timeout=timedelta(seconds=self.collective_timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
        return device


def own_device() -> torch.device:
    """Return this rank's current GPU, or the CPU on CPU ranks."""
    is_cuda = _device_kind(os.environ) == DeviceKind.CUDA
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")


def _device_kind(environ: Mapping[str, str]) -> str:
    return environ.get(variables.DEVICE) or ("cuda" if torch.cuda.is_available() else "cpu")


def _integer(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name)
    try:
        return int(text or "")
    except ValueError:
        raise RuntimeError(
            f"environment variable {name} is {text!r} and has to be an integer: start ranks with torchrun"
        ) from None
