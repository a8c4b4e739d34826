"""Accelerators of this host, without torch: which are visible, how launches show them to ranks, and their sensors.

NVIDIA's are found and read by NVML, AMD's found by amdsmi.
"""

import importlib
import io
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from pytest_aorta.common.errors import AortaError, DevicesUnavailable
from pytest_aorta.common.files import raised_as
from pytest_aorta.common.model import Fact, Model
from pytest_aorta.plan.device_kind import AMD, CUDA_VARIABLE, HIDDEN, HIP_VARIABLE, NVIDIA, ROCR_VARIABLE, Device

# Device file of the AMD driver; without it no tool of ROCm is called.
AMD_DRIVER = Path("/dev/kfd")
# Errors of pynvml if NVIDIA's library or driver is missing. Any other error of NVML is reported.
_NVML_NO_DRIVER = ("NVML_ERROR_LIBRARY_NOT_FOUND", "NVML_ERROR_DRIVER_NOT_LOADED")
# The throttle reasons that matter, with the names of NVML's constants.
_NVML_REASONS = {
    "sw_power_cap": "nvmlClocksEventReasonSwPowerCap",
    "hw_slowdown": "nvmlClocksEventReasonHwSlowdown",
    "sw_thermal_slowdown": "nvmlClocksEventReasonSwThermalSlowdown",
    "hw_thermal_slowdown": "nvmlClocksEventReasonHwThermalSlowdown",
    "hw_power_brake_slowdown": "nvmlClocksEventReasonHwPowerBrakeSlowdown",
}


class Reading(Model, frozen=True):
    """The sensors of one device at one moment; None for a sensor that the device lacks.

    Attributes:
        sm_clock_mhz: clock of the multiprocessors; None if the device has no such sensor.
        throttle_reasons: reasons why the device runs below its highest clock.
    """

    sm_clock_mhz: float | None = None
    throttle_reasons: tuple[str, ...] = ()


class SensorsUnavailable(AortaError):
    """The devices' sensors can't be read; the message gives the reason."""


class Sensors(Protocol):
    """Opened sensors of some devices.

    Attributes:
        max_sm_clocks_mhz: The highest SM clock of each device; None if unknown.
        about: What can move times of all devices: driver, power limit, links between them.
    """

    max_sm_clocks_mhz: tuple[float | None, ...]
    about: dict[str, Fact]

    def read(self) -> tuple[Reading, ...]:
        """Return a reading of every device, in order.

        Raises:
            SensorsUnavailable: The driver does not answer any more.
        """

    def close(self) -> None:
        """Close the driver's library."""


class Accelerator(Protocol):
    """A vendor's devices.

    Attributes:
        source: The name of the library that reads sensors.
    """

    source: str

    def devices(self, environ: Mapping[str, str]) -> list[Device] | None:
        """Return the visible devices, in the order of the visibility variables; None without a driver.

        Raises:
            DevicesUnavailable: The driver does not answer, or a variable names a device that the driver does not list.
        """

    def show(self, devices: Sequence[Device], environ: dict[str, str]) -> None:
        """Change ``environ`` so that exactly ``devices`` are visible to ranks, in this order."""

    def sensors(self, devices: Sequence[Device]) -> Sensors:
        """Return the opened sensors of ``devices``.

        Raises:
            SensorsUnavailable: The library is missing, or does not list the devices.
        """


def visible_devices(environ: Mapping[str, str] = os.environ) -> list[Device]:
    """Return the visible devices of the first vendor whose driver is installed; empty without a driver.

    Raises:
        DevicesUnavailable: As in :meth:`Accelerator.devices`.
    """
    for accelerator in ACCELERATORS.values():
        if (devices := accelerator.devices(environ)) is not None:
            return devices
    return []


def show_devices(devices: Sequence[Device], environ: dict[str, str]) -> None:
    """Change ``environ`` so that exactly ``devices``, which have the same vendor, are visible to ranks."""
    if devices:
        ACCELERATORS[devices[0].vendor].show(devices, environ)
    else:
        environ |= HIDDEN


def source_of(devices: Sequence[Device]) -> str:
    """Return the name of the library that reads ``devices``; at least one device is needed."""
    return ACCELERATORS[devices[0].vendor].source


def open_sensors(devices: Sequence[Device]) -> Sensors:
    """Return the sensors of ``devices``, which have the same vendor.

    Raises:
        SensorsUnavailable: The vendor's library is missing, or does not list the devices.
    """
    return ACCELERATORS[devices[0].vendor].sensors(devices)


def visible_tokens(variable: str | None, count: int) -> list[str]:
    """Return the entries of CUDA_VISIBLE_DEVICES that CUDA accepts.

    CUDA ignores everything from the first invalid entry on, hides all devices if an entry is repeated, and shows all
    ``count`` devices if the variable is not set.
    """
    if variable is None:
        return [str(number) for number in range(count)]
    tokens: list[str] = []
    for token in (part.strip() for part in variable.split(",")):
        is_number = token.isascii() and token.isdigit()
        if token in tokens:
            return []
        if not (int(token) < count if is_number else token.startswith(("GPU-", "MIG-"))):
            break
        tokens.append(token)
    return tokens


class _Nvidia:
    """NVIDIA's GPUs."""

    source = "NVML"

    def devices(self, environ: Mapping[str, str]) -> list[Device] | None:
        """Return the visible GPUs; None without an NVIDIA driver."""
        import pynvml

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            if getattr(error, "value", None) in [getattr(pynvml, name) for name in _NVML_NO_DRIVER]:
                return None
            raise _no_answer("NVML", error) from None
        try:
            value = environ.get(CUDA_VARIABLE)
            tokens = visible_tokens(value, pynvml.nvmlDeviceGetCount())
            return _distinct(CUDA_VARIABLE, value, [_nvidia_device(token) for token in tokens])
        finally:
            pynvml.nvmlShutdown()

    def show(self, devices: Sequence[Device], environ: dict[str, str]) -> None:
        """Set CUDA_VISIBLE_DEVICES."""
        environ[CUDA_VARIABLE] = ",".join(device.token for device in devices)

    def sensors(self, devices: Sequence[Device]) -> Sensors:
        """Open NVML."""
        return _NvidiaSensors(devices)


def _nvidia_device(token: str) -> Device:
    import pynvml

    try:
        by_index, by_name = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
        handle = by_index(int(token)) if token.isdigit() else by_name(token)
        return Device(token, str(pynvml.nvmlDeviceGetName(handle)), str(pynvml.nvmlDeviceGetUUID(handle)))
    except pynvml.NVMLError as error:
        raise _unknown(CUDA_VARIABLE, token, f": {error}") from None


class _NvidiaSensors:
    """Sensors read by NVML; a MIG device has the readings of its GPU."""

    def __init__(self, devices: Sequence[Device]) -> None:
        import pynvml

        self._nvml: Any = pynvml
        self._reasons = {name: getattr(pynvml, constant) for name, constant in _NVML_REASONS.items()}
        with raised_as(SensorsUnavailable, "NVML: ", pynvml.NVMLError):
            pynvml.nvmlInit()
        try:
            self._handles = [self._handle(device.uuid) for device in devices]
            self.max_sm_clocks_mhz = tuple(map(self._max_sm_clock_mhz, self._handles))
            self.about = self._about()
        except pynvml.NVMLError as error:
            self.close()
            raise SensorsUnavailable(f"NVML: {error}") from None

    def read(self) -> tuple[Reading, ...]:
        """Return a reading of every device; a value that a device does not support is None."""
        return tuple(map(self._read, self._handles))

    def close(self) -> None:
        """Release NVML, which shuts down with its last user."""
        self._nvml.nvmlShutdown()

    def _handle(self, uuid: str) -> Any:
        handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        return self._nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if uuid.startswith("MIG-") else handle

    def _about(self) -> dict[str, Fact]:
        limits_mw = {self._ask(self._nvml.nvmlDeviceGetEnforcedPowerLimit, handle) or 0 for handle in self._handles}
        links = sorted({self._num_links(handle) for handle in self._handles})
        return {
            "driver": str(self._nvml.nvmlSystemGetDriverVersion()),
            "power_limit_w": "/".join(f"{limit / 1000:.0f}" for limit in sorted(limits_mw)),
            "links": "/".join(f"NVLink x{count}" if count else "PCIe" for count in links),
        }

    def _num_links(self, handle: Any) -> int:
        """Return the number of active NVLinks; NVML refuses the number of a link that the device lacks."""
        for number in range(self._nvml.NVML_NVLINK_MAX_LINKS):
            try:
                is_active = self._nvml.nvmlDeviceGetNvLinkState(handle, number)
            except self._nvml.NVMLError:
                return number
            if not is_active:
                return number
        return int(self._nvml.NVML_NVLINK_MAX_LINKS)

    def _max_sm_clock_mhz(self, handle: Any) -> float | None:
        return self._ask(self._nvml.nvmlDeviceGetMaxClockInfo, handle, self._nvml.NVML_CLOCK_SM)

    def _read(self, handle: Any) -> Reading:
        nvml = self._nvml
        bits = int(self._ask(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0)
        return Reading(
            sm_clock_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            throttle_reasons=tuple(name for name, bit in self._reasons.items() if bits & bit),
        )

    def _ask(self, question: Callable[..., Any], *given: Any) -> float | None:
        try:
            return float(question(*given))
        except self._nvml.NVMLError as error:
            if getattr(error, "value", None) == self._nvml.NVML_ERROR_NOT_SUPPORTED:
                return None
            raise SensorsUnavailable(f"NVML: {error}") from None


class _Amd:
    """AMD's GPUs, which torch calls cuda."""

    source = "amdsmi"

    def devices(self, environ: Mapping[str, str]) -> list[Device] | None:
        """Apply ROCR_VISIBLE_DEVICES, then HIP_VISIBLE_DEVICES or, without it, CUDA_VISIBLE_DEVICES."""
        if not AMD_DRIVER.exists():
            return None
        variable = HIP_VARIABLE if HIP_VARIABLE in environ else CUDA_VARIABLE
        left = _amd_select(ROCR_VARIABLE, environ.get(ROCR_VARIABLE), _amd_gpus())
        return _amd_select(variable, environ.get(variable), left)

    def show(self, devices: Sequence[Device], environ: dict[str, str]) -> None:
        """Set HIP_VISIBLE_DEVICES, which numbers the devices that ROCR_VISIBLE_DEVICES leaves visible."""
        environ[HIP_VARIABLE] = ",".join(device.token for device in devices)
        environ.pop(CUDA_VARIABLE, None)

    def sensors(self, devices: Sequence[Device]) -> Sensors:  # noqa: ARG002
        """Raise an error: clocks and throttling of AMD's GPUs are not read."""
        raise SensorsUnavailable("clocks and throttling of AMD's GPUs are not read")


def _amd_select(variable: str, value: str | None, gpus: list[Device]) -> list[Device]:
    """Return the selected GPUs, renumbered from 0 as HIP numbers them."""
    if not gpus:
        return []
    # HIP ignores an empty value, but torch hides all devices, as the user intended.
    numbers = [_amd_number(variable, token, gpus) for token in visible_tokens(value, len(gpus))]
    return _distinct(variable, value, [replace(gpus[number], token=str(number)) for number in numbers])


def _amd_number(variable: str, token: str, gpus: list[Device]) -> int:
    if token.isdigit():
        return int(token)
    names = [gpu.uuid.lower() for gpu in gpus]
    if token.lower() not in names:
        raise _unknown(variable, token, "")
    return names.index(token.lower())


def _amd_gpus() -> list[Device]:
    """Return all AMD GPUs, regardless of variables; empty if amdsmi is not installed."""
    gpus = _amdsmi_gpus()
    # Partitions of one GPU share its serial number.
    serials = Counter(gpu.uuid for gpu in gpus)
    return [replace(gpu, uuid=f"{gpu.uuid}/{gpu.token}") if serials[gpu.uuid] > 1 else gpu for gpu in gpus]


def _amdsmi_gpus() -> list[Device]:
    """Return the GPUs that amdsmi reports; empty if amdsmi or its library is not installed."""
    try:
        with redirect_stdout(io.StringIO()):  # amdsmi prints which library is missing
            amdsmi: Any = importlib.import_module("amdsmi")
    except Exception:  # noqa: BLE001 - a KeyError if the library is missing
        return []
    try:
        amdsmi.amdsmi_init()
        try:
            infos = [amdsmi.amdsmi_get_gpu_asic_info(handle) for handle in amdsmi.amdsmi_get_processor_handles()]
        finally:
            amdsmi.amdsmi_shut_down()
    except amdsmi.AmdSmiException as error:
        raise _no_answer("amdsmi", error) from None
    return [_amd_gpu(number, info["market_name"], info["asic_serial"]) for number, info in enumerate(infos)]


def _amd_gpu(number: int, model: str, serial: str) -> Device:
    """Return a device named as in ROCR_VISIBLE_DEVICES or, without a serial number, by its number."""
    try:
        unique = int(serial, 16)
    except ValueError:
        unique = 0
    return Device(str(number), model, f"GPU-{unique:016x}" if unique else f"AMD-{number}", AMD)


# Vendor -> its devices, in the order in which drivers are looked for.
ACCELERATORS: dict[str, Accelerator] = {NVIDIA: _Nvidia(), AMD: _Amd()}


def _distinct(variable: str, value: str | None, devices: list[Device]) -> list[Device]:
    """Return ``devices``; raise an error if two names mean the same device, which two tests could lease at once."""
    for uuid, count in Counter(device.uuid for device in devices).items():
        if count > 1:
            raise DevicesUnavailable(f"{variable}={value!r} names {uuid} {count} times; give it once")
    return devices


def _unknown(variable: str, token: str, why: str) -> DevicesUnavailable:
    return DevicesUnavailable(f"{variable} names {token!r}, which the driver does not know{why}; give numbers or UUIDs")


def _no_answer(source: str, error: Exception) -> DevicesUnavailable:
    return DevicesUnavailable(f"{source} can't list the GPUs: {error}; repair the driver, or give --aorta-gpus=0")
