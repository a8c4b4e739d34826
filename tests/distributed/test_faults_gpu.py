"""Faults on GPUs: the rank and the collective are named, and no process is left on a device."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks.launch.storm import processes_on_gpus
from pytest_aorta import DistributedWorld
from pytest_aorta.plan.accelerators import visible_devices
from pytest_aorta.plan.world import World
from tests.distributed.test_faults import failed, make_plan

pytestmark = pytest.mark.world(size=2, device="cuda")
LIMIT_S = 40.0


def gpu_failure(folder: Path, kind: str):
    devices = tuple(visible_devices()[:2])
    plan = replace(make_plan(folder, kind, LIMIT_S), world=World(2, "cuda", devices))
    failure = failed(plan, LIMIT_S + 30)
    print(failure.text)
    # Other launches may use the same devices.
    assert processes_on_gpus(folder) == []
    return failure


def test_rank_killed_in_a_collective_is_named_with_the_collective(distributed_world: DistributedWorld, tmp_path):
    failure = gpu_failure(tmp_path, "killed")
    assert (failure.kind, failure.rank) == ("signal", 1)
    assert "signal SIGKILL" in failure.text
    assert "all_reduce" in failure.text


def test_rank_that_never_enters_a_collective_is_named_with_the_collective(
    distributed_world: DistributedWorld, tmp_path
):
    failure = gpu_failure(tmp_path, "absent")
    assert (failure.kind, failure.rank) == ("hang in collective", 1)
    # NCCL's watchdog says ALLREDUCE; if the launch's time limit is over first, the flight recorder says all_reduce.
    assert "allreduce" in failure.text.lower().replace("_", "")
    assert "rank 1" in failure.text.splitlines()[0]
