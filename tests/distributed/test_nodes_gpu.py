"""Launches over nodes on GPUs: two node agents on one host, each with its own GPU."""

import os
from functools import partial
from pathlib import Path

import pytest

from pytest_aorta import DistributedWorld
from pytest_aorta.launch.leases import LeasedWorld, lease
from pytest_aorta.launch.nodes import launch_on_nodes
from pytest_aorta.plan.accelerators import visible_devices
from pytest_aorta.plan.workloads import find_workload, resolve_config
from pytest_aorta.plan.world import World
from pytest_aorta.result.diagnosis import launch_failure
from pytest_aorta.result.reading import collect_result
from tests.unit.builders import make_plan


@pytest.mark.world(size=2, device="cuda")
@pytest.mark.smoke
def test_two_nodes_train_over_nccl(distributed_world: DistributedWorld, tmp_path: Path):
    name = "fsdp"
    take = partial(lease, exclusive=False, wait_s=distributed_world.timeout_s, owner=name)
    leased = LeasedWorld(World(2, "cuda"), visible_devices(), take)
    first, second = leased.world().devices
    agents = f"""
    AORTA_NODE_RANK=0 "$@" & zero=$!
    AORTA_NODE_RANK=1 CUDA_VISIBLE_DEVICES={second.token} AORTA_LEASE_DIR={tmp_path}/leases "$@"
    wait $zero
    """
    spec = find_workload(name, [])
    plan = make_plan(
        tmp_path / "run",
        name=name,
        spec=spec,
        config=resolve_config(spec, {"steps": 5}),
        script=None,
        world=World(2, "cuda", (first,), 2),
        timeout_s=180.0,
        cwd=tmp_path,
        node_launcher=("sh", "-c", agents, "agents"),
    )
    try:
        outcome = launch_on_nodes(plan, os.environ | {"MASTER_ADDR": "127.0.0.1"})
    finally:
        leased.release()
    failure = launch_failure(plan, outcome)
    assert failure is None, failure.text
    result = collect_result(plan, outcome)
    assert (len(result.rank_step_times_ms), result.backend) == (2, "nccl")
    assert result.platform.endswith("-x2-n2-nccl")
