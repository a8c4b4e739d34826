"""NVML's facts of real GPUs beside a launch, and the cost of reading them."""

import json
import time

import pytest

from pytest_aorta import DistributedWorld, WorkloadRunner
from pytest_aorta.common.model import to_builtins
from pytest_aorta.plan.accelerators import open_sensors, visible_devices

# The limit for one device: eight devices at two readings per second then take a fiftieth of a core.
MAX_READ_S = 0.005

pytestmark = pytest.mark.timed


@pytest.mark.world(size=2, device="cuda", warm=True)
def test_launch_on_gpus_knows_its_clocks_power_and_temperature(workload: WorkloadRunner, config_of):
    result = workload.run("fsdp", **(config_of("fsdp") | {"steps": 200}))
    facts = result.platform_facts
    print(json.dumps(to_builtins(facts), indent=2))
    assert facts.problem is None
    assert len(facts.devices) == 2
    for device in facts.devices:
        assert device.in_steps
        assert 0 < device.sm_clock_mhz <= device.max_sm_clock_mhz
        assert "gpu_idle" not in device.throttle_reasons or device.throttle_reasons["gpu_idle"] < 1


@pytest.mark.world(size=1, device="cuda")
def test_reading_the_sensors_takes_hardly_any_time(distributed_world: DistributedWorld):
    devices = visible_devices()
    sensors = open_sensors(devices)
    try:
        sensors.read()
        began_s = time.perf_counter()
        for _ in range(20):
            sensors.read()
        took_s = (time.perf_counter() - began_s) / 20 / len(devices)
    finally:
        sensors.close()
    print(f"{1e3 * took_s:.3f} ms a device")
    assert took_s < MAX_READ_S
