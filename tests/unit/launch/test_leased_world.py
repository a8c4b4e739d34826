from functools import partial

import pytest

from pytest_aorta.common import variables
from pytest_aorta.common.errors import LeaseError
from pytest_aorta.launch.leases import LeasedWorld, cpu_slots, holders, lease
from pytest_aorta.plan.world import World
from tests.unit.builders import gpus


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(variables.LEASE_DIR, str(tmp_path / "leases"))
    return tmp_path / "leases"


def leased(size, devices, *, exclusive=False, device="cuda", owner="a test"):
    world = World(size, device, tuple(devices[:size]) if device == "cuda" else ())
    return LeasedWorld(world, devices, partial(lease, exclusive=exclusive, wait_s=0.2, owner=owner))


def test_two_tests_get_different_devices(folder):
    first, second = leased(2, gpus(4)), leased(2, gpus(4))
    assert [device.uuid for device in first.world().devices] == ["GPU-0", "GPU-1"]
    assert [device.uuid for device in second.world().devices] == ["GPU-2", "GPU-3"]
    assert second.world().platform == "nvidia-h200-x2-nccl"
    first.release()
    second.release()
    assert holders(folder) == []


def test_nothing_is_leased_before_the_world_is_asked_for(folder):
    idle = leased(2, gpus(2))
    assert idle.fds == ()
    assert len(leased(2, gpus(2)).world().devices) == 2
    idle.release()


def test_timed_test_leases_the_whole_host():
    timed = leased(1, gpus(4), exclusive=True)
    timed.world()
    with pytest.raises(LeaseError):
        leased(1, gpus(4)).world()
    timed.release()
    assert leased(1, gpus(4)).world().size == 1


def test_cpu_ranks_lease_slots_and_more_ranks_than_slots_take_all():
    crowd = leased(10_000, [], device="cpu")
    assert crowd.world().size == 10_000
    with pytest.raises(LeaseError, match=f"of {len(cpu_slots())} resources"):
        leased(1, [], device="cpu").world()
    crowd.release()
