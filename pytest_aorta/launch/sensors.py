"""Clocks, power, temperature and throttle reasons of GPUs, read from their driver: NVML or amdsmi.

``rocm-smi`` is not used: it is a program, and starting it twice per second would take a core from the ranks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pytest_aorta.common.errors import AortaError
from pytest_aorta.plan.gpus import amd_gpus
from pytest_aorta.plan.world import AMD, Device
from pytest_aorta.result.gpu_facts import Capability, Reading

# The throttle reasons that matter, with the names of NVML's constants.
_NVML_REASONS = {
    "sw_power_cap": "nvmlClocksEventReasonSwPowerCap",
    "hw_slowdown": "nvmlClocksEventReasonHwSlowdown",
    "sync_boost": "nvmlClocksEventReasonSyncBoost",
    "sw_thermal_slowdown": "nvmlClocksEventReasonSwThermalSlowdown",
    "hw_thermal_slowdown": "nvmlClocksEventReasonHwThermalSlowdown",
    "hw_power_brake_slowdown": "nvmlClocksEventReasonHwPowerBrakeSlowdown",
    "applications_clocks_setting": "nvmlClocksEventReasonApplicationsClocksSetting",
    "gpu_idle": "nvmlClocksEventReasonGpuIdle",
}
# amdsmi counts how long each reason was active: a reason whose counter has increased was active since the last read.
_AMD_REASONS = {
    "prochot": "prochot_residency_acc",
    "package_power": "ppt_residency_acc",
    "socket_thermal": "socket_thm_residency_acc",
    "vr_thermal": "vr_thm_residency_acc",
    "hbm_thermal": "hbm_thm_residency_acc",
}


class SensorsUnavailable(AortaError):
    """The devices' sensors can't be read; the message gives the reason."""


class Sensors(Protocol):
    """Opened sensors of some devices.

    Attributes:
        source: Name of the library that is read.
        capabilities: Capabilities of each device.
    """

    source: str
    capabilities: tuple[Capability, ...]

    def read(self) -> tuple[Reading, ...]:
        """Return a reading of every device, in order.

        Raises:
            SensorsUnavailable: The driver does not answer any more.
        """

    def close(self) -> None:
        """Close the driver's library."""


def source_of(devices: Sequence[Device]) -> str:
    """Return the name of the library that reads ``devices``; at least one device is needed."""
    return "amdsmi" if devices[0].vendor == AMD else "NVML"


def open_sensors(devices: Sequence[Device]) -> Sensors:
    """Return the sensors of ``devices``, which have the same vendor.

    Raises:
        SensorsUnavailable: The vendor's library is missing, or does not list the devices.
    """
    return AmdSensors(devices) if devices[0].vendor == AMD else NvidiaSensors(devices)


class NvidiaSensors:
    """Sensors read by NVML; a MIG device has the readings of its GPU."""

    source = "NVML"

    def __init__(self, devices: Sequence[Device]) -> None:
        import pynvml  # imported only when devices are read

        self._nvml: Any = pynvml
        self._reasons = {name: getattr(pynvml, constant) for name, constant in _NVML_REASONS.items()}
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise SensorsUnavailable(f"NVML: {error}") from None
        try:
            self._handles = [self._handle(device.uuid) for device in devices]
            self.capabilities = tuple(map(self._capability, self._handles))
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

    def _capability(self, handle: Any) -> Capability:
        nvml = self._nvml
        return Capability(
            max_sm_clock_mhz=self._ask(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM),
            power_limit_w=_thousandth(self._ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
            default_power_limit_w=_thousandth(self._ask(nvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)),
        )

    def _read(self, handle: Any) -> Reading:
        nvml = self._nvml
        bits = int(self._ask(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0)
        return Reading(
            sm_clock_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=self._ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
            power_w=_thousandth(self._ask(nvml.nvmlDeviceGetPowerUsage, handle)),
            temperature_c=self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            throttle_reasons=tuple(name for name, bit in self._reasons.items() if bits & bit),
        )

    def _ask(self, question: Callable[..., Any], *given: Any) -> float | None:
        try:
            return float(question(*given))
        except self._nvml.NVMLError as error:
            if getattr(error, "value", None) == self._nvml.NVML_ERROR_NOT_SUPPORTED:
                return None
            raise SensorsUnavailable(f"NVML: {error}") from None


class AmdSensors:
    """Sensors read from amdsmi's table of metrics."""

    source = "amdsmi"

    def __init__(self, devices: Sequence[Device]) -> None:
        try:
            self._amdsmi: Any = importlib.import_module("amdsmi")
        except Exception:  # noqa: BLE001 - a KeyError where its library is missing
            raise SensorsUnavailable("amdsmi is not installed") from None
        try:
            names = [gpu.uuid for gpu in amd_gpus()]
            self._amdsmi.amdsmi_init()
        except (AortaError, self._amdsmi.AmdSmiException) as error:
            raise SensorsUnavailable(f"amdsmi: {error}") from None
        try:
            handles = self._amdsmi.amdsmi_get_processor_handles()
            self._handles = [handles[names.index(device.uuid)] for device in devices]
            self.capabilities = tuple(map(self._capability, self._handles))
            self._counts = [_counts(self._metrics(handle)) for handle in self._handles]
        except (SensorsUnavailable, self._amdsmi.AmdSmiException, ValueError, IndexError) as error:
            self.close()
            raise SensorsUnavailable(f"amdsmi: {error}") from None

    def read(self) -> tuple[Reading, ...]:
        """Return a reading of every device; a value that the table does not contain is None."""
        tables = list(map(self._metrics, self._handles))
        before, self._counts = self._counts, list(map(_counts, tables))
        return tuple(map(_amd_reading, tables, before, self._counts))

    def close(self) -> None:
        """Shut amdsmi down."""
        self._amdsmi.amdsmi_shut_down()

    def _metrics(self, handle: Any) -> dict[str, Any]:
        try:
            table: dict[str, Any] = self._amdsmi.amdsmi_get_gpu_metrics_info(handle)
        except self._amdsmi.AmdSmiException as error:
            raise SensorsUnavailable(f"amdsmi: {error}") from None
        return table

    def _capability(self, handle: Any) -> Capability:
        try:
            info = self._amdsmi.amdsmi_get_clock_info(handle, self._amdsmi.AmdSmiClkType.GFX)
        except self._amdsmi.AmdSmiException:  # not every card reports its clocks
            return Capability()
        return Capability(max_sm_clock_mhz=_number(info.get("max_clk")))


def _amd_reading(table: dict[str, Any], before: dict[str, float], now: dict[str, float]) -> Reading:
    clocks = [clock for value in table.get("current_gfxclks") or () if (clock := _number(value))]
    powers = (_number(table.get(name)) for name in ("current_socket_power", "average_socket_power"))
    return Reading(
        # The slowest of several dies: the others wait for it.
        sm_clock_mhz=min(clocks) if clocks else _number(table.get("current_gfxclk")),
        memory_clock_mhz=_number(table.get("current_uclk")),
        power_w=next((power for power in powers if power is not None), None),
        temperature_c=_number(table.get("temperature_hotspot")),
        throttle_reasons=tuple(name for name in _AMD_REASONS if now.get(name, 0) > before.get(name, 0)),
    )


def _counts(table: dict[str, Any]) -> dict[str, float]:
    counts = {name: _number(table.get(key)) for name, key in _AMD_REASONS.items()}
    return {name: count for name, count in counts.items() if count is not None}


def _number(value: object) -> float | None:
    """Return a number, or None for amdsmi's "N/A"."""
    return float(value) if isinstance(value, int | float) else None


def _thousandth(value: float | None) -> float | None:
    return None if value is None else value / 1000
