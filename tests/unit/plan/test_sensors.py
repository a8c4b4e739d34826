"""Sensors against fakes of pynvml and amdsmi in sys.modules."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from pytest_aorta.plan.accelerators import SensorsUnavailable, open_sensors, source_of
from pytest_aorta.plan.device_kind import AMD, Device
from pytest_aorta.result.measurements import Reading
from tests.unit.fake_drivers import HOT_BITS, FakeAmdsmi, FakeNvml

NVIDIA_GPU = Device("1", "NVIDIA H200", "GPU-aabb-2")
AMD_GPU = Device("1", "MI300X", "GPU-00000000000000a2", AMD)


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNvml()
    fake.hot, fake.hot_bits = ("GPU-aabb-2",), HOT_BITS | 4 | 1024
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_nvml_is_read_in_whole_units_and_reasons_by_name(nvml):
    sensors = open_sensors([NVIDIA_GPU])
    assert sensors.max_sm_clocks_mhz == (1980,)
    assert sensors.read() == (Reading(1200, None, 690.5, 61, ("sw_power_cap", "hw_thermal_slowdown")),)
    sensors.close()
    assert nvml.num_open == 0


def test_mig_device_has_the_readings_of_its_gpu(nvml):
    assert open_sensors([Device("MIG-c", "H200 MIG", "MIG-cccc-3")]).read()[0].sm_clock_mhz == 1200


@pytest.fixture
def amdsmi(monkeypatch):
    fake = FakeAmdsmi()
    fake.tables[1] = {
        "current_gfxclks": [2100, 1400, "N/A"],
        "current_uclk": 1300,
        "temperature_hotspot": 70,
        "current_socket_power": "N/A",
        "average_socket_power": 740,
        "prochot_residency_acc": 5,
    }
    monkeypatch.setitem(sys.modules, "amdsmi", fake)
    return fake


def test_amdsmi_reports_the_slowest_die_and_reasons_whose_counters_increased(amdsmi):
    sensors = open_sensors([AMD_GPU])
    assert sensors.max_sm_clocks_mhz == (2100,)
    assert sensors.read() == (Reading(1400, 1300, 740, 70, ()),)
    amdsmi.tables[1] |= {"prochot_residency_acc": 6, "ppt_residency_acc": "N/A"}
    assert sensors.read()[0].throttle_reasons == ("prochot",)
    assert sensors.read()[0].throttle_reasons == ()


@pytest.mark.parametrize(
    ("device", "change", "problem"),
    [
        (replace(NVIDIA_GPU, uuid="GPU-absent"), {}, r"^NVML: Not Found$"),
        (NVIDIA_GPU, {"lost": True}, r"^NVML: GPU is lost$"),
        (NVIDIA_GPU, {"error": FakeNvml.NVMLError("Library Not Found", 12)}, r"^NVML: Library Not Found$"),
        (replace(AMD_GPU, uuid="GPU-absent"), {}, r"^amdsmi: "),
        (AMD_GPU, None, r"^amdsmi is not installed$"),
    ],
    ids=["unknown GPU", "lost GPU", "no NVML", "unknown AMD GPU", "no amdsmi"],
)
def test_sensors_that_can_not_be_read_are_reported(nvml, amdsmi, monkeypatch, device, change, problem):
    if change is None:
        monkeypatch.setitem(sys.modules, "amdsmi", None)
    vars(nvml).update(change or {})
    with pytest.raises(SensorsUnavailable, match=problem):
        open_sensors([device]).read()
    assert nvml.num_open == (1 if nvml.lost else 0)


@pytest.mark.parametrize(("device", "source"), [(NVIDIA_GPU, "NVML"), (AMD_GPU, "amdsmi")])
def test_source_is_the_vendors(device, source):
    assert source_of([device]) == source
