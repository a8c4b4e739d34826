"""Kinds of devices, and their communication backends."""

from __future__ import annotations

from enum import StrEnum


class DeviceKind(StrEnum):
    """The kind of device that ranks compute on; ``cuda`` includes AMD GPUs, as in torch."""

    CUDA = "cuda"
    CPU = "cpu"


class Backend(StrEnum):
    """The backend of a process group; ``nccl`` includes RCCL, as in torch."""

    NCCL = "nccl"
    GLOO = "gloo"


BACKENDS = {DeviceKind.CUDA: Backend.NCCL, DeviceKind.CPU: Backend.GLOO}
