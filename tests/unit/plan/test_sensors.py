"""Sensors against fakes of pynvml and amdsmi in sys.modules."""

from __future__ import annotations

import sys

import pytest

from pytest_aorta.plan.accelerators import SensorsUnavailable, open_sensors, source_of
from pytest_aorta.plan.device_kind import AMD, Device
from pytest_aorta.result.measurements import Capability, Reading

NVIDIA_GPU = Device("1", "NVIDIA H200", "GPU-b")
AMD_GPU = Device("1", "MI300X", "GPU-0000000000000002", AMD)


class FakeNvml:
    """Provide two GPUs that do not support the memory clock."""

    class NVMLError(Exception):
        def __init__(self, text, value=999):
            super().__init__(text)
            self.value = value

    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    nvmlClocksEventReasonGpuIdle = 1
    nvmlClocksEventReasonApplicationsClocksSetting = 2
    nvmlClocksEventReasonSwPowerCap = 4
    nvmlClocksEventReasonHwSlowdown = 8
    nvmlClocksEventReasonSyncBoost = 16
    nvmlClocksEventReasonSwThermalSlowdown = 32
    nvmlClocksEventReasonHwThermalSlowdown = 64
    nvmlClocksEventReasonHwPowerBrakeSlowdown = 128

    def __init__(self):
        self.inside = 0
        self.bits = 4 | 64 | 1024
        self.lost = False

    def nvmlInit(self):
        self.inside += 1

    def nvmlShutdown(self):
        self.inside -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in ("GPU-a", "GPU-b", "MIG-1"):
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle):
        return {"MIG-1": "GPU-a"}[handle]

    def nvmlDeviceGetMaxClockInfo(self, handle, kind):
        return 1980

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        return 650_000

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle):
        return 700_000

    def nvmlDeviceGetClockInfo(self, handle, kind):
        if kind == self.NVML_CLOCK_MEM:
            raise self.NVMLError("Not Supported", 3)
        return {"GPU-a": 1755, "GPU-b": 1200}[handle]

    def nvmlDeviceGetPowerUsage(self, handle):
        if self.lost:
            raise self.NVMLError("GPU is lost", 15)
        return 690_500

    def nvmlDeviceGetTemperature(self, handle, kind):
        return 61

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return self.bits


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_nvml_is_read_in_whole_units_and_reasons_by_name(nvml):
    sensors = open_sensors([NVIDIA_GPU])
    assert sensors.capabilities == (Capability(1980, 650, 700),)
    assert sensors.read() == (Reading(1200, None, 690.5, 61, ("sw_power_cap", "hw_thermal_slowdown")),)
    sensors.close()
    assert nvml.inside == 0


def test_mig_device_has_the_readings_of_its_gpu(nvml):
    assert open_sensors([Device("MIG-1", "H200 MIG", "MIG-1")]).read()[0].sm_clock_mhz == 1755


def test_device_unknown_to_nvml_is_reported_and_nvml_shut_down(nvml):
    with pytest.raises(SensorsUnavailable, match=r"^NVML: Not Found$"):
        open_sensors([Device("0", "NVIDIA H200", "GPU-absent")])
    assert nvml.inside == 0


def test_device_that_is_lost_while_sampling_is_reported(nvml):
    sensors = open_sensors([NVIDIA_GPU])
    nvml.lost = True
    with pytest.raises(SensorsUnavailable, match=r"^NVML: GPU is lost$"):
        sensors.read()


def test_machine_without_nvml_is_reported(nvml, monkeypatch):
    def fail():
        raise nvml.NVMLError("NVML Shared Library Not Found", 12)

    monkeypatch.setattr(nvml, "nvmlInit", fail)
    with pytest.raises(SensorsUnavailable, match="Library Not Found"):
        open_sensors([NVIDIA_GPU])


class FakeAmdsmi:
    """Provide two GPUs of two dies each; their handles are their numbers."""

    class AmdSmiException(Exception):
        pass

    class AmdSmiClkType:
        GFX = 0

    def __init__(self):
        self.tables = [{}, {"current_gfxclks": [2100, 1400, "N/A"], "current_uclk": 1300, "temperature_hotspot": 70}]
        self.tables[1] |= {"current_socket_power": "N/A", "average_socket_power": 740, "prochot_residency_acc": 5}

    def amdsmi_init(self):
        pass

    def amdsmi_shut_down(self):
        pass

    def amdsmi_get_processor_handles(self):
        return [0, 1]

    def amdsmi_get_gpu_asic_info(self, handle):
        return {"market_name": "MI300X", "asic_serial": hex(handle + 1)}

    def amdsmi_get_gpu_metrics_info(self, handle):
        return self.tables[handle]

    def amdsmi_get_clock_info(self, handle, kind):
        return {"clk": 132, "max_clk": 2100}


@pytest.fixture
def amdsmi(monkeypatch):
    fake = FakeAmdsmi()
    monkeypatch.setitem(sys.modules, "amdsmi", fake)
    return fake


def test_amdsmi_reports_the_slowest_die_and_reasons_whose_counters_increased(amdsmi):
    sensors = open_sensors([AMD_GPU])
    assert sensors.capabilities == (Capability(max_sm_clock_mhz=2100),)
    assert sensors.read() == (Reading(1400, 1300, 740, 70, ()),)
    amdsmi.tables[1] |= {"prochot_residency_acc": 6, "ppt_residency_acc": "N/A"}
    assert sensors.read()[0].throttle_reasons == ("prochot",)
    assert sensors.read()[0].throttle_reasons == ()


def test_machine_without_amdsmi_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    with pytest.raises(SensorsUnavailable, match=r"^amdsmi is not installed$"):
        open_sensors([AMD_GPU])


def test_amd_gpu_unknown_to_amdsmi_is_reported(amdsmi):
    with pytest.raises(SensorsUnavailable, match=r"^amdsmi: "):
        open_sensors([Device("0", "MI300X", "GPU-absent", AMD)])


@pytest.mark.parametrize(("device", "source"), [(NVIDIA_GPU, "NVML"), (AMD_GPU, "amdsmi")])
def test_source_is_the_vendors(device, source):
    assert source_of([device]) == source
