"""The device of a rank, by ``torch.accelerator``: the only module of the worker that knows kinds of devices.

A kind that torch supports needs its row in ``plan/device_kind.py``, and here a kernel that spins and facts of its own
if it has them (docs/architecture.md, Kinds of devices).
"""

import ctypes
import functools
import gc
import mmap
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import TypeAlias, cast

import torch
import torch.distributed as dist

from pytest_aorta.common import variables
from pytest_aorta.common.clock import time
from pytest_aorta.common.model import Fact
from pytest_aorta.plan.device_kind import DeviceKind
from pytest_aorta.worker.torch_private import cuda_sleep

Moment: TypeAlias = "torch.Event | int"
_PROBE_CYCLES, _PROBE_BYTES = 20_000_000, 1 << 20


def device_kind(environ: Mapping[str, str] = os.environ) -> DeviceKind:
    """Return the kind of device that ``AORTA_DEVICE`` names; without the variable, the kind that torch finds.

    Raises:
        RuntimeError: The variable names an unknown kind.
    """
    kinds = [str(kind) for kind in DeviceKind]
    found = torch.accelerator.current_accelerator(check_available=True)
    kind = environ.get(variables.DEVICE) or (found.type if found is not None and found.type in kinds else "cpu")
    if kind not in kinds:
        raise RuntimeError(f"{variables.DEVICE}={kind!r} is unknown; it can be one of {sorted(kinds)}")
    return DeviceKind(kind)


def own_device() -> torch.device:
    """Return this rank's current accelerator, or the CPU on CPU ranks."""
    kind = device_kind()
    return (
        torch.device(kind) if kind is DeviceKind.CPU else torch.device(kind, torch.accelerator.current_device_index())
    )


def on_accelerator(device: torch.device) -> bool:
    """Return whether a device runs beside the host, with streams and memory of its own."""
    return device.type != DeviceKind.CPU


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all work; the CPU has done it already."""
    if on_accelerator(device):
        torch.accelerator.synchronize(device)


def now(device: torch.device) -> Moment:
    """Return the moment at which the current stream gets here, without waiting for it; on CPU the host's time in ns."""
    if device.type == "cpu":
        return time.perf_counter_ns()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def elapsed_ms(begin: Moment, end: Moment) -> float:
    """Return the milliseconds between two moments, and wait for the end."""
    if isinstance(begin, torch.Event) and isinstance(end, torch.Event):
        end.synchronize()
        return float(begin.elapsed_time(end))
    return (cast("int", end) - cast("int", begin)) / 1e6


def memory_in_use(device: torch.device) -> int:
    """Return the bytes that an allocator has given out: the device's, or malloc on CPU."""
    return int(torch.accelerator.memory_allocated(device)) if on_accelerator(device) else _malloc()()


class _Mallinfo(ctypes.Structure):
    """The ten sizes that mallinfo2(3) of glibc 2.33 or newer returns, of which the fifth and the eighth are read."""

    _fields_ = (
        ("before", ctypes.c_size_t * 4),
        ("mapped", ctypes.c_size_t),
        ("between", ctypes.c_size_t * 2),
        ("given_out", ctypes.c_size_t),
        ("after", ctypes.c_size_t * 2),
    )


@functools.cache
def _malloc() -> Callable[[], int]:
    """Return what reads the bytes that malloc has given out; the resident ones where torch has another allocator."""
    read = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if read is None:
        return resident_memory
    read.restype = _Mallinfo

    def given_out() -> int:
        info = read()
        return int(info.given_out) + int(info.mapped)

    before, kept = given_out(), torch.empty(_PROBE_BYTES, dtype=torch.uint8)
    # Other threads may give back some memory in between.
    return given_out if given_out() - before > kept.nbytes / 2 else resident_memory


def resident_memory() -> int:
    """Return the bytes of this process that are in the host's memory."""
    return int(os.pread(_own_memory(), 100, 0).split()[1]) * mmap.PAGESIZE


@functools.cache
def _own_memory() -> int:
    """Return the kernel's file on the memory of this process, which stays open: opening takes longer than a read."""
    return os.open("/proc/self/statm", os.O_RDONLY)


def spin(duration_ms: float, device: torch.device) -> None:
    """Enqueue a kernel on the current stream that runs for ``duration_ms`` milliseconds, and do not wait for it."""
    if duration_ms:
        _spin_kernel(device)(round(duration_ms * cycles_per_ms(device)))


@functools.cache
def cycles_per_ms(device: torch.device) -> float:
    """Return the clock cycles that a spin kernel counts in a millisecond on ``device``, measured once per device."""
    kernel = _spin_kernel(device)
    # An idle device raises its clock first.
    for _ in range(2):
        begin = now(device)
        kernel(_PROBE_CYCLES)
        probe_ms = elapsed_ms(begin, now(device))
    return _PROBE_CYCLES / probe_ms


def _spin_kernel(device: torch.device) -> Callable[[int], None]:
    if device.type != DeviceKind.CUDA:
        raise ValueError(f"torch has no kernel that spins on {device.type}, so it has neither delays nor overlap")
    kernel: Callable[[int], None] = cuda_sleep
    return kernel


class Delay:
    """A callable that occupies the current stream, or the CPU rank, for ``delay_ms`` milliseconds."""

    def __init__(self, device: torch.device, delay_ms: float) -> None:
        """Calibrate the delay; on an accelerator this waits for the device."""
        self._device, self._delay_ms = device, delay_ms
        if delay_ms and on_accelerator(device):
            cycles_per_ms(device)

    def __call__(self) -> None:
        """Occupy the stream or the rank once; on an accelerator the host does not wait."""
        if on_accelerator(self._device):
            spin(self._delay_ms, self._device)
            return
        # A rank that slept would look like a rank that waits for its peers.
        end_s = time.perf_counter() + self._delay_ms / 1e3
        while time.perf_counter() < end_s:
            pass


def device_facts(device: torch.device) -> dict[str, Fact]:
    """Return the model of an accelerator, and the versions and switches that its numbers depend on."""
    facts: dict[str, Fact] = {"device_name": torch.get_device_module(device).get_device_name(device)}
    if device.type == DeviceKind.CUDA:
        facts |= {
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            # On ROCm the number is MIOpen's.
            "cudnn": torch.backends.cudnn.version(),
            # Once imported, the package nvidia-cudnn-frontend may serve cuDNN's kernels.
            "cudnn_frontend": getattr(sys.modules.get("cudnn"), "__version__", None),
            "cublas": _version("nvidia-cublas", "nvidia-cublas-cu12"),
            "triton": _version("triton", "pytorch-triton-rocm", "triton-rocm"),
            # allow_tf32 raises an error if the code has set the precision by this newer name.
            "tf32_matmul": torch.backends.cuda.matmul.fp32_precision == "tf32",
        }
    return facts


def _version(*distributions: str) -> str | None:
    """Return the version of the first of these distributions that is installed; None without any."""
    for distribution in distributions:
        with suppress(PackageNotFoundError):
            return version(distribution)
    return None


def has_graphs() -> bool:
    """Return whether a CUDA graph exists."""
    # isinstance would call code of objects such as weak proxies.
    return torch.cuda.is_initialized() and any(issubclass(type(one), torch.cuda.CUDAGraph) for one in gc.get_objects())


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
