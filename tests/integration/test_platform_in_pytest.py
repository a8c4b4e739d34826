"""Sensors, profilers and the progress line in a whole session of pytest, with a fake driver and a fake launcher."""

import re

import pytest

from tests.integration.conftest import ALONE_AND_NIGHTLY_ON_XDIST
from tests.unit.builders import read_json

# The text of the progress line, which is later erased.
SLOW_LAUNCH = ("    prepare_folder(plan)\n", "    prepare_folder(plan)\n    import time\n    time.sleep(1.2)\n")


@pytest.fixture
def nvml(nvml):
    nvml.names = ("GPU-0", "GPU-1")
    return nvml


def test_regression_on_throttled_gpus_fails_and_names_the_throttling(nvml, learned):
    nvml.hot = ("GPU-1",)
    learned.plant(slowdown=1.3)
    result = learned.run("-v", failed=1)
    hot = "GPU 1 throttled (hw_thermal_slowdown in 100% of samples, SM clock 1,200 of 1,980 MHz)"
    text = result.stdout.str()
    assert "regression" in text
    assert "  cause     GPUs throttled in 3 of 3 launches" in text
    for number in (1, 2, 3):
        assert f"  cause     launch {number}: {hot}" in text
        assert f"note: launch {number}: {hot}" in text


def test_times_of_throttled_launches_are_left_out_unless_forced(nvml, gpu):
    nvml.hot = ("GPU-0",)
    gpu.run("--update-baselines", failed=1, shows="E *  step_time_p50: launch 1: GPU 0 throttled *")
    gpu.run("--update-baselines", "--aorta-record=replace,noisy:hot summer", passed=1)
    assert read_json(gpu.baseline_files()[0])["left_out"] == {}


def test_gpus_without_a_driver_to_ask_pass_and_the_result_says_why(nvml, learned):
    nvml.error = nvml.NVMLError("Driver Not Loaded")
    learned.run("--aorta-results=kept", passed=1)
    kept = read_json(next((learned.path / "kept").rglob("result.json")))["platform_facts"]
    assert "Driver Not Loaded" in kept["problem"]


def test_profiled_launch_keeps_its_traces_and_makes_no_baseline(nvml, learned):
    shows = ["test_toy::test_one: traces of torch in *", "aorta: 1 test OK, *"]
    learned.run("--aorta-profiler=torch", shows=shows, passed=1)
    contradiction = "*--update-baselines and --aorta-profiler=torch contradict each other*"
    learned.refused("--aorta-profiler=torch", "--update-baselines", shows=contradiction)


def test_profiler_that_leaves_no_trace_fails_the_test(nvml, learned):
    learned.plant(without_trace=True)
    learned.run("--aorta-profiler=torch", shows="E *ResultError: profiler torch left no trace in *agent.log*", failed=1)


@pytest.fixture
def slow(project):
    """The project with a test whose launch takes a second, and which prints."""
    conftest = project.path / "conftest.py"
    assert SLOW_LAUNCH[0] in conftest.read_text()
    conftest.write_text(conftest.read_text().replace(*SLOW_LAUNCH))
    project.one_test("print('said by the test'); workload.run('toy')")
    return project


@ALONE_AND_NIGHTLY_ON_XDIST
def test_launch_that_takes_long_is_said_and_not_captured(slow, workers):
    conftest = slow.path / "conftest.py"
    conftest.write_text(f"{conftest.read_text()}\nfrom pytest_aorta.plugin import run\nrun._SAY_S = 0.0\n")
    result = slow.run_apart("-rP", f"--junitxml={slow.path}/junit.xml", *workers, passed=1)
    assert re.search(r"^aorta: toy: 0 of 2 ranks started, \d+ s$", result.stderr.str(), re.MULTILINE)
    assert "said by the test" in result.stdout.str()
    assert "ranks started" not in result.stdout.str() + slow.read("junit.xml")


def test_gpu_of_another_kind_than_that_of_the_baseline_is_refused(learned):
    conftest = learned.path / "conftest.py"
    conftest.write_text(conftest.read_text().replace('"Toy GPU"', '"Other GPU"'))
    learned.run(failed=1, shows=["E *Missing: no baseline", "E * measured  toy on other-gpu-x2-nccl, *"])
