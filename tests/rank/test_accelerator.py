"""A rank on a kind of device that torch has and this project has not: only its row is made up."""

import types
from enum import StrEnum

import pytest
import torch

from pytest_aorta.worker import Delay, RankEnv, StepTimer, accelerator, environment_facts, workload
from tests.unit.builders import each_of, run_python

DEVICE = torch.device("mtia", 3)


class Kinds(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"
    MTIA = "mtia"


class Event:
    """An event that fires as soon as it is recorded, one millisecond after the event before."""

    clock_ms = 0

    def __init__(self, device, *, enable_timing):
        assert (device, enable_timing) == (DEVICE, True)

    def record(self):
        Event.clock_ms += 1
        self.at_ms = Event.clock_ms

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return end.at_ms - self.at_ms


@pytest.fixture(autouse=True)
def joined(monkeypatch):
    """Add the kind's row, replace its driver by fakes, and return the arguments of ``init_process_group``."""
    found = {}
    monkeypatch.setattr(accelerator, "DeviceKind", Kinds)
    monkeypatch.setitem(workload.BACKENDS, Kinds.MTIA, "toyccl")
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("mtia"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: found["index"])
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: found.update(index=index))
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: 1 << 20)
    driver = types.SimpleNamespace(get_device_name=lambda _device: "MTIA v2")
    monkeypatch.setattr(torch, "get_device_module", lambda _device: driver)
    monkeypatch.setattr(
        workload.dist, "init_process_group", lambda backend, **others: found.update(others, backend=backend)
    )
    return found


@each_of("named", {"found": {}, "named": {"AORTA_DEVICE": "mtia"}})
def test_a_rank_joins_its_group_on_the_device_of_its_number(joined, named):
    env = RankEnv.read({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"} | named)

    assert env.join("train") == accelerator.own_device() == DEVICE
    assert (joined["backend"], joined["device_id"]) == ("toyccl", DEVICE)


def test_events_time_the_steps_and_the_allocator_is_asked_for_memory():
    timer = StepTimer(DEVICE)
    for _ in range(3):
        with timer.step():
            pass

    assert timer.step_times_ms() == [1, 1, 1]
    assert timer.memory_bytes() == [1 << 20]


def test_facts_name_the_model_and_no_version_of_another_vendor():
    facts = environment_facts(DEVICE)

    assert (facts["device"], facts["device_name"]) == ("mtia", "MTIA v2")
    assert "nccl" not in facts


def test_a_delay_without_a_kernel_that_spins_is_an_error_that_names_the_kind():
    with pytest.raises(ValueError, match="no kernel that spins on mtia"):
        Delay(DEVICE, 1.0)


WITHOUT_MALLINFO = """
import ctypes, mmap, torch
from pytest_aorta.worker.accelerator import memory_in_use
ctypes.CDLL = {cdll}
before = memory_in_use(torch.device("cpu"))
kept = mmap.mmap(-1, 64 << 20)
kept.write(bytes(64 << 20))
print(memory_in_use(torch.device("cpu")) - before >> 20)
"""


@each_of("cdll, least", {"other libc": ("lambda _: object()", 60), "glibc": ("ctypes.CDLL", 0)})
def test_memory_of_a_cpu_rank_is_the_resident_one_where_malloc_tells_nothing(cdll, least):
    found = run_python("-c", WITHOUT_MALLINFO.format(cdll=cdll), check=True)
    assert least <= int(found.stdout) < least + 20
