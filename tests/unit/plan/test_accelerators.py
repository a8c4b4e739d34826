"""Discovery and sensors of devices, against fakes of pynvml and amdsmi."""

import re
import sys
from dataclasses import replace

import pytest

from pytest_aorta.common.errors import DevicesUnavailable
from pytest_aorta.plan.accelerators import (
    Reading,
    SensorsUnavailable,
    open_sensors,
    visible_devices,
    visible_tokens,
)
from pytest_aorta.plan.device_kind import AMD, Device
from tests.unit.builders import each_of
from tests.unit.fake_drivers import HOT_BITS, FakeNvml


@pytest.mark.parametrize(
    ("variable", "tokens"),
    [
        (None, ["0", "1", "2", "3"]),
        ("", []),
        ("2", ["2"]),
        ("3,1", ["3", "1"]),
        (" 0 , 1 ", ["0", "1"]),
        ("0,-1,1", ["0"]),
        ("-1", []),
        ("0,4,1", ["0"]),
        ("0,none,1", ["0"]),
        ("0,,1", ["0"]),
        ("NoDevFiles", []),
        ("GPU-8932f937,GPU-1", ["GPU-8932f937", "GPU-1"]),
        ("MIG-GPU-1/2/3", ["MIG-GPU-1/2/3"]),
        ("²", []),
        ("٣", []),
        ("0,0", []),
        ("0,1,0", []),
        ("GPU-1,GPU-1", []),
    ],
)
def test_visible_devices_variable_is_read_as_cuda_does(variable, tokens):
    assert visible_tokens(variable, 4) == tokens


@pytest.mark.parametrize(
    ("variable", "devices"),
    [
        ("1,0", [("1", "model 1", "GPU-aabb-2"), ("0", "model 0", "GPU-aaaa-1")]),
        ("GPU-aabb-2", [("GPU-aabb-2", "model 1", "GPU-aabb-2")]),
        ("MIG-cccc-3", [("MIG-cccc-3", "model 2", "MIG-cccc-3")]),
        ("", []),
    ],
)
def test_visible_devices_have_their_models_in_the_callers_order(nvml, variable, devices):
    found = visible_devices({"CUDA_VISIBLE_DEVICES": variable})
    assert [(device.token, device.model, device.uuid) for device in found] == devices
    assert {device.vendor for device in found} <= {"nvidia"}


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("GPU-cccc", "CUDA_VISIBLE_DEVICES names 'GPU-cccc', which the driver does not know: Not Found; give"),
        ("MIG-d", "CUDA_VISIBLE_DEVICES names 'MIG-d', which the driver does not know: Not Found; give"),
        ("GPU-aab", "CUDA_VISIBLE_DEVICES names 'GPU-aab', which the driver does not know: Not Found; give"),
        ("0,GPU-aaaa-1", "CUDA_VISIBLE_DEVICES='0,GPU-aaaa-1' names GPU-aaaa-1 2 times; give it once"),
    ],
)
def test_name_of_no_single_device_is_an_error_that_shows_it(nvml, variable, message):
    with pytest.raises(DevicesUnavailable, match="^" + re.escape(message)):
        visible_devices({"CUDA_VISIBLE_DEVICES": variable})


def test_driver_that_can_not_answer_is_no_lack_of_devices(nvml):
    nvml.error = nvml.NVMLError("Driver/library version mismatch", 18)
    message = r"NVML can't list the GPUs.*mismatch; repair the driver, or give --aorta"
    with pytest.raises(DevicesUnavailable, match=message):
        visible_devices({})


A, B, C = (f"GPU-{number:016x}" for number in (0xA1, 0xA2, 0xC3))


@pytest.mark.parametrize(
    ("variables", "devices"),
    [
        ({}, [("0", A), ("1", B), ("2", C)]),
        ({"HIP_VISIBLE_DEVICES": "2,0"}, [("2", C), ("0", A)]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, [("1", B)]),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, [("0", A)]),
        ({"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "1"}, []),
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
        ({"HIP_VISIBLE_DEVICES": "01"}, [("1", B)]),
        ({"HIP_VISIBLE_DEVICES": C}, [("2", C)]),
        ({"ROCR_VISIBLE_DEVICES": "2,0"}, [("0", C), ("1", A)]),
        ({"ROCR_VISIBLE_DEVICES": f"{C},{A}"}, [("0", C), ("1", A)]),
        ({"ROCR_VISIBLE_DEVICES": C.upper()}, [("0", C)]),
        ({"ROCR_VISIBLE_DEVICES": ""}, []),
        ({"ROCR_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": C}, []),
        ({"ROCR_VISIBLE_DEVICES": "2,0", "HIP_VISIBLE_DEVICES": "1"}, [("1", A)]),
        ({"ROCR_VISIBLE_DEVICES": "2,0", "CUDA_VISIBLE_DEVICES": "0,2"}, [("0", C)]),
        ({"ROCR_VISIBLE_DEVICES": "2,0", "HIP_VISIBLE_DEVICES": A}, [("1", A)]),
    ],
)
def test_amd_gpus_are_counted_within_what_rocr_leaves(amd, variables, devices):
    found = visible_devices(variables)
    assert [(device.token, device.uuid) for device in found] == devices
    assert {(device.model, device.vendor) for device in found} <= {("AMD Instinct MI300X", "amd")}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"ROCR_VISIBLE_DEVICES": "GPU-dd"}, "ROCR_VISIBLE_DEVICES names 'GPU-dd', which the driver does not know; "),
        ({"HIP_VISIBLE_DEVICES": "GPU-dd"}, "HIP_VISIBLE_DEVICES names 'GPU-dd', which the driver does not know; "),
        ({"ROCR_VISIBLE_DEVICES": A, "HIP_VISIBLE_DEVICES": B}, f"HIP_VISIBLE_DEVICES names '{B}', which the driver"),
        ({"HIP_VISIBLE_DEVICES": f"0,{A}"}, f"HIP_VISIBLE_DEVICES='0,{A}' names {A} 2 times; give it once"),
    ],
)
def test_name_of_no_single_amd_gpu_is_an_error_that_shows_it(amd, variables, message):
    with pytest.raises(DevicesUnavailable, match="^" + re.escape(message)):
        visible_devices(variables)


@pytest.mark.parametrize("serials", [("N/A", "0x0000000000000000"), ("0xA1", "0xA1")])
def test_amd_gpus_are_distinct_without_serial_numbers_of_their_own(amd, serials):
    amd.serials = serials
    assert len({device.uuid for device in visible_devices({})}) == 2


def test_amd_is_not_asked_where_nvidia_answers(nvml, amd):
    nvml.error = None
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "0"}) == []


def test_without_a_driver_or_a_tool_to_ask_it_there_are_no_devices(amd, tmp_path, monkeypatch):
    (tmp_path / "kfd").unlink()
    variables = {"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "GPU-dd", "ROCR_VISIBLE_DEVICES": "7"}
    assert visible_devices(variables) == []
    (tmp_path / "kfd").touch()
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    assert visible_devices({"HIP_VISIBLE_DEVICES": "0"}) == []


def test_amdsmi_without_its_library_lists_no_devices_and_prints_nothing(amd, monkeypatch, tmp_path, capfd):
    (tmp_path / "amdsmi.py").write_text("print('no library')\nraise KeyError('libamd_smi.so')\n")
    monkeypatch.delitem(sys.modules, "amdsmi")
    monkeypatch.syspath_prepend(tmp_path)
    assert visible_devices({"HIP_VISIBLE_DEVICES": "0"}) == []
    assert capfd.readouterr().out == ""


def test_amdsmi_that_can_not_answer_is_no_lack_of_devices(amd):
    amd.error = amd.AmdSmiException("not initialised")
    with pytest.raises(DevicesUnavailable, match=r"^amdsmi can't list the GPUs: not initialised; "):
        visible_devices({})


NVIDIA_GPU = Device("1", "NVIDIA H200", "GPU-aabb-2")
AMD_GPU = Device("1", "MI300X", "GPU-00000000000000a2", AMD)


def test_nvml_is_read_in_whole_units_and_reasons_by_name(nvml):
    nvml.hot, nvml.hot_bits = ("GPU-aabb-2",), HOT_BITS | 4 | 1024
    sensors = open_sensors([NVIDIA_GPU])
    assert sensors.max_sm_clocks_mhz == (1980,)
    assert sensors.read() == (Reading(1200, ("sw_power_cap", "hw_thermal_slowdown")),)
    sensors.close()
    assert nvml.num_open == 0


@pytest.mark.parametrize(("num_links", "links"), [(18, "NVLink x18"), (0, "PCIe")])
def test_driver_power_limit_and_links_are_told_of_all_devices_at_once(nvml, num_links, links):
    nvml.num_links = num_links
    about = open_sensors([NVIDIA_GPU, replace(NVIDIA_GPU, uuid="GPU-aaaa-1")]).about
    assert about == {"driver": "570.86.15", "power_limit_w": "700", "links": links}


def test_mig_device_has_the_readings_of_its_gpu(nvml):
    nvml.hot = ("GPU-aabb-2",)
    assert open_sensors([Device("MIG-c", "H200 MIG", "MIG-cccc-3")]).read()[0].sm_clock_mhz == 1200


UNREADABLE = {
    "unknown GPU": (replace(NVIDIA_GPU, uuid="GPU-absent"), {}, r"^NVML: Not Found$"),
    "lost GPU": (NVIDIA_GPU, {"lost": True}, r"^NVML: GPU is lost$"),
    "no NVML": (NVIDIA_GPU, {"error": FakeNvml.NVMLError("Library Not Found", 12)}, r"^NVML: Library Not Found$"),
    "AMD GPU": (AMD_GPU, {}, r"AMD's GPUs are not read"),
}


@each_of("device, change, problem", UNREADABLE)
def test_sensors_that_can_not_be_read_are_reported(nvml, device, change, problem):
    vars(nvml).update(change)
    with pytest.raises(SensorsUnavailable, match=problem):
        open_sensors([device]).read()
    assert nvml.num_open == (1 if nvml.lost else 0)
