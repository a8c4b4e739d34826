"""Fakes of the libraries that list and read GPUs; a test changes attributes of what the fixtures return."""

import sys

import pytest

from pytest_aorta.plan import accelerators

_REASONS = (
    "GpuIdle",
    "ApplicationsClocksSetting",
    "SwPowerCap",
    "HwSlowdown",
    "SyncBoost",
    "SwThermalSlowdown",
    "HwThermalSlowdown",
    "HwPowerBrakeSlowdown",
)
HOT_BITS = 1 << _REASONS.index("HwThermalSlowdown")


class FakeNvml:
    """GPUs 0 and 1, and a MIG device of the second, without a memory clock; those in ``hot`` are throttled."""

    class NVMLError(Exception):
        def __init__(self, text: str, value: int = 999) -> None:
            super().__init__(text)
            self.value = value

    NVML_CLOCK_SM, NVML_NVLINK_MAX_LINKS = 1, 36
    NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_LIBRARY_NOT_FOUND = 3, 9, 12

    NAMES = ("GPU-aaaa-1", "GPU-aabb-2", "MIG-cccc-3")

    def __init__(self, names: tuple[str, ...] = NAMES, error: Exception | None = None) -> None:
        self.names, self.error = names, error
        self.hot: tuple[str, ...] = ()
        self.hot_bits = HOT_BITS
        self.lost = False
        self.num_links = 18
        self.num_open = 0

    def __getattr__(self, name: str) -> int:
        reason = name.removeprefix("nvmlClocksEventReason")
        if reason not in _REASONS:
            raise AttributeError(name)
        return 1 << _REASONS.index(reason)

    def nvmlInit(self) -> None:
        if self.error:
            raise self.error
        self.num_open += 1

    def nvmlShutdown(self) -> None:
        self.num_open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len([name for name in self.names if name.startswith("GPU")])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return self.names[index]

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        if name not in self.names:
            raise self.NVMLError("Not Found")
        return name

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        if handle == self.names[0]:
            raise self.NVMLError("Not Supported")
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, place: int) -> str:
        if place != 4:
            raise self.NVMLError("Not Found")
        return self.names[2]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:
        return self.names[1]

    def nvmlDeviceGetName(self, handle: str) -> str:
        return f"model {self.names.index(handle)}"

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return self.hot_bits if handle in self.hot else 0

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.86.15"

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return 700_000

    def nvmlDeviceGetNvLinkState(self, handle: str, link: int) -> int:
        if link >= self.num_links:
            raise self.NVMLError("Invalid Argument", 2)
        return 1

    def nvmlDeviceGetMaxClockInfo(self, handle: str, kind: int) -> int:
        return 1980

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        if self.lost:
            raise self.NVMLError("GPU is lost", 15)
        return 1200 if handle in self.hot else 1980


class FakeAmdsmi:
    """Three GPUs with the serial numbers ``serials``, whose handles are their numbers."""

    class AmdSmiException(Exception):
        pass

    SERIALS = ("0x00000000000000A1", "0x00000000000000A2", "0x00000000000000C3")

    def __init__(self, serials: tuple[str, ...] = SERIALS, error: Exception | None = None) -> None:
        self.serials, self.error = serials, error

    def amdsmi_init(self) -> None:
        if self.error:
            raise self.error

    def amdsmi_shut_down(self) -> None:
        pass

    def amdsmi_get_processor_handles(self) -> list[int]:
        return list(range(len(self.serials)))

    def amdsmi_get_gpu_asic_info(self, handle: int) -> dict[str, str]:
        return {"market_name": "AMD Instinct MI300X", "asic_serial": self.serials[handle]}


@pytest.fixture
def nvml(monkeypatch):
    """Return NVIDIA's library of this host."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.fixture
def no_nvidia(nvml):
    """Take NVIDIA's driver from this host."""
    nvml.error = nvml.NVMLError("no library", nvml.NVML_ERROR_LIBRARY_NOT_FOUND)


@pytest.fixture
def amd(no_nvidia, monkeypatch, tmp_path):
    """Return AMD's library of this host, whose driver's file is ``kfd`` in the test's folder."""
    driver = tmp_path / "kfd"
    driver.touch()
    monkeypatch.setattr(accelerators, "AMD_DRIVER", driver)
    fake = FakeAmdsmi()
    monkeypatch.setitem(sys.modules, "amdsmi", fake)
    return fake
