"""Kinds of devices, with the communication backend, the vendors and the visibility variables of each."""

from dataclasses import dataclass
from enum import StrEnum


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
