"""Observation of a running launch, against a made-up run folder."""

import threading
import time
from pathlib import Path

import pytest

from pytest_aorta.launch import watch as watching
from pytest_aorta.launch.watch import LaunchState, LaunchWatch, SpokenState, _launch_state
from pytest_aorta.plan.launch_plan import LaunchPlan
from pytest_aorta.plan.workloads import WorkloadSpec
from pytest_aorta.plan.world import World
from tests.unit.builders import gpus, make_plan, write_rank_file

# Only a watch that hangs reaches this limit.
HANG_S = 60.0
SPEC = WorkloadSpec(
    name="toy", folder=Path("/own/toy"), class_name="Toy", description="a toy", properties={"steps": {"default": 40}}
)


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(watching, "TICK_S", 0.001)


def on_gpus(tmp_path: Path) -> LaunchPlan:
    return make_plan(tmp_path, world=World(2, "cuda", tuple(gpus(2))))


def count_steps(plan: LaunchPlan, *steps: int) -> None:
    for rank, count in enumerate(steps):
        path = write_rank_file(plan.run_dir, rank, "progress", "")
        path.write_bytes(count.to_bytes(8, "little"))


class FakeLine:
    def __init__(self):
        self.states = []
        self.shown = threading.Event()
        self.cleared = False

    def show(self, state):
        self.states.append(state)
        self.shown.set()

    def clear(self):
        self.cleared = True

    def wait_for(self, states):
        deadline_s = time.monotonic() + HANG_S
        while len(self.states) < states:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)


@pytest.mark.parametrize(
    ("config", "left", "steps", "text", "in_steps"),
    [
        ({}, {}, (0, 0), "toy: 0 of 2 ranks started, 12 s", False),
        ({}, {1: ("pid",)}, (0, 0), "toy: 1 of 2 ranks started, 12 s", False),
        ({}, {0: ("pid",), 1: ("pid",)}, (1, 0), "toy: 2 ranks, before the first measured step, 12 s", False),
        ({}, {0: ("pid",), 1: ("pid",)}, (3, 2), "toy: 2 ranks, step 2 of 40, 12 s", True),
        ({"steps": 7}, {0: ("pid",), 1: ("pid",)}, (3, 2), "toy: 2 ranks, step 2 of 7, 12 s", True),
        ({}, {0: ("pid",), 1: ("pid", "result.json")}, (40, 40), "toy: 2 ranks, 1 done, 12 s", False),
    ],
)
def test_state_of_a_launch_is_read_from_its_ranks_files(tmp_path, config, left, steps, text, in_steps):
    plan = make_plan(tmp_path, spec=SPEC, script=None, config=config)
    count_steps(plan, *steps)
    for rank, names in left.items():
        for name in names:
            write_rank_file(tmp_path, rank, name, "7")
    assert _launch_state(plan, 12.4) == LaunchState(text, in_steps, 12.4)


@pytest.fixture
def nvml(nvml):
    nvml.names = ("GPU-0", "GPU-1")
    return nvml


@pytest.mark.usefixtures("fast")
def test_devices_are_sampled_during_the_launch_and_samples_in_steps_are_marked(tmp_path, nvml):
    plan, line = on_gpus(tmp_path), FakeLine()
    count_steps(plan, 1, 1)
    with LaunchWatch(plan, line) as watch:
        line.wait_for(5)
    facts = watch.platform_facts
    assert nvml.num_open == 0
    assert [(device.device, device.in_steps) for device in facts.devices] == [("0", True), ("1", True)]
    assert (facts.source, facts.problem) == ("NVML", None)


@pytest.mark.usefixtures("nvml")
def test_launch_that_ends_at_once_has_a_sample(tmp_path):
    with LaunchWatch(on_gpus(tmp_path), None) as watch:
        pass
    assert [device.in_steps for device in watch.platform_facts.devices] == [False, False]


@pytest.mark.usefixtures("fast")
def test_failing_driver_leaves_earlier_samples_and_the_reason(tmp_path, nvml):
    line = FakeLine()
    with LaunchWatch(on_gpus(tmp_path), line) as watch:
        line.wait_for(2)
        nvml.lost = True
        # The state is shown without the sensors.
        line.wait_for(len(line.states) + 3)
    facts = watch.platform_facts
    assert "GPU is lost" in facts.problem
    assert facts.devices
    assert nvml.num_open == 0


def test_cpu_ranks_have_no_facts_and_no_thread(tmp_path):
    # Threads of other tests may end meanwhile.
    before = set(threading.enumerate())
    with LaunchWatch(make_plan(tmp_path), None) as watch:
        assert set(threading.enumerate()) <= before
    assert watch.platform_facts is None


@pytest.mark.usefixtures("fast")
def test_line_is_cleared_at_the_end_also_of_a_launch_that_raises(tmp_path):
    line = FakeLine()

    def interrupted() -> None:
        assert line.shown.wait(HANG_S)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), LaunchWatch(make_plan(tmp_path), line):
        interrupted()
    assert line.cleared
    assert line.states[0].text.startswith("toy: 0 of 2 ranks started")


def test_command_says_every_ten_seconds_what_each_launch_waits_for(capsys):
    line = SpokenState()
    for elapsed_s in (1, 9.9, 10.2, 15, 20.3):
        line.show(LaunchState(f"first, {elapsed_s:.0f} s", False, elapsed_s))
    line.clear()
    line.show(LaunchState("second, 10 s", True, 10))
    said = capsys.readouterr().err.splitlines()
    assert said == ["aorta: first, 10 s", "aorta: first, 20 s", "aorta: second, 10 s"]
