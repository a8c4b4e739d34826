"""The device on which a process group exchanges tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist


def group_device(device: torch.device, group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device that tensors of ``device`` have to be on for collectives of ``group``; None: all ranks.

    A group has a backend for each kind of device, e.g. ``cpu:gloo,cuda:nccl`` or, if a script names no backend,
    perhaps ``cuda:nccl`` alone. Gloo exchanges tensors of CPUs, even if it is registered for GPUs.
    """
    backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
    if backends.get(device.type, dist.Backend.GLOO) != dist.Backend.GLOO:
        return device
    # Without an index, torch takes the current device of the kind.
    return torch.device("cpu" if "cpu" in backends else next(iter(backends)))
