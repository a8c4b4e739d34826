"""Kinds of devices: all that the host's side knows of each, except how its devices are listed and read."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

T = TypeVar("T")


class DeviceKind(StrEnum):
    """The kind of device that ranks compute on; ``cuda`` includes AMD GPUs, as in torch."""

    CUDA = "cuda"
    CPU = "cpu"


class Backend(StrEnum):
    """The backend of a process group; ``nccl`` includes RCCL, as in torch."""

    NCCL = "nccl"
    GLOO = "gloo"
    FAKE = "fake"
    """Exchanges nothing: the backend of simulated worlds."""


BACKENDS = {DeviceKind.CUDA: Backend.NCCL, DeviceKind.CPU: Backend.GLOO}
# The kinds whose ranks compute on a device each.
ACCELERATED = frozenset(DeviceKind) - {DeviceKind.CPU}
NVIDIA, AMD = "nvidia", "amd"
KINDS = {NVIDIA: DeviceKind.CUDA, AMD: DeviceKind.CUDA}
# Facts of ``worker/accelerator.py`` that the bits of numbers depend on: the versions of the vendors' libraries.
LIBRARIES = ("cuda", "hip", "nccl", "cublas", "cudnn", "cudnn_frontend", "triton")
CUDA_VARIABLE, HIP_VARIABLE, ROCR_VARIABLE = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
# Variable that limits the visible devices -> its value that hides all of them. HIP ignores an empty value.
HIDDEN = {CUDA_VARIABLE: "", HIP_VARIABLE: "-1", ROCR_VARIABLE: ""}
VISIBLE_VARIABLES = tuple(HIDDEN)


@dataclass(frozen=True)
class Device:
    """One GPU.

    Attributes:
        token: Number or name of the GPU in CUDA_VISIBLE_DEVICES, on AMD in HIP_VISIBLE_DEVICES.
        model: Product name.
        uuid: Unique name, the same for every process of the host.
        vendor: A vendor in ``KINDS``.
    """

    token: str
    model: str
    uuid: str
    vendor: str = NVIDIA

    @property
    def kind(self) -> DeviceKind:
        """The kind of device."""
        return KINDS[self.vendor]


@dataclass(frozen=True)
class ByDevice(Generic[T]):
    """Two values: one for CPU ranks, and one for ranks on an accelerator of any kind."""

    accelerated: T
    cpu: T

    def __getitem__(self, kind: str) -> T:
        """Return the value for a kind of device."""
        return self.cpu if kind == DeviceKind.CPU else self.accelerated
