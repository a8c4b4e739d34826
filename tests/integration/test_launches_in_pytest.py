import re
import threading

import pytest

from pytest_aorta.launch.leases import lease
from tests.distributed.processes import await_true
from tests.integration.conftest import ALONE_AND_NIGHTLY_ON_XDIST
from tests.unit.builders import each_of, read_json

RUN, P99 = "workload.run('toy')", "@pytest.mark.tolerance(step_time_p99='10%')"


FAILED_LAUNCHES = {
    "rank": (
        {"raises": 1},
        RUN,
        "",
        [
            "LaunchError: toy on 2 cpu ranks: rank exception: rank 1 failed first: ValueError: boom",
            "at train.py:7",
            "plan, logs and stacks: */kept/test-toy-py-test-one-*",
        ],
    ),
    "own checks": (
        {"wrong": 9},
        RUN,
        "",
        [
            "WorkloadFailed: toy: 9 of its own checks failed on cpu-x2-gloo",
            "all_gather: iteration 2, layer 3, on rank 1, from source rank 0: 7 of 16 elements wrong, first at *",
            "... and 1 more",
        ],
    ),
    "invalid result": (
        {"metrics": {"tokens_per_s": "many"}},
        RUN,
        "",
        ["ResultError: result invalid: */ranks/0/result.json: $.metrics*"],
    ),
    "file in place of a folder": (
        {},
        "open('kept', 'x').close(); " + RUN,
        "",
        ["LaunchError: results folder */kept/* can't be written: Not a directory"],
    ),
    "full disk": (
        {"full_disk": True},
        RUN,
        "",
        ["LaunchError: results folder */kept/*/01-toy-* can't be written: No space left on device"],
    ),
    "too few steps": (
        {},
        "workload.check(workload.run('toy'))",
        P99,
        ["SpecError: tolerance of step_time_p99: 4 steps were measured, *needs at least 100; *use step_time_tail5*"],
    ),
}


@each_of("plant, body, marks, lines", FAILED_LAUNCHES)
def test_failed_launch_fails_its_test_with_the_evidence(project, plant, body, marks, lines):
    project.plant(**plant)
    project.one_test(body, marks)
    text = project.run("--aorta-results=kept", shows=[f"E  *{line}" for line in lines], failed=1).stdout.str()
    assert "pytest_aorta/" not in text
    assert "During handling of" not in text


def test_launch_of_the_world_returns_results_with_failed_checks(project):
    project.plant(wrong=1)
    project.one_test("assert not distributed_world.run('toy').passed")
    project.run(passed=1)


@pytest.mark.parametrize("script", ["'train.py'", "'pkg.train'", "__import__('pathlib').Path('train.py')"])
def test_script_is_launched_with_its_arguments(project, script):
    project.write("train.py", "")
    project.one_test(f"assert workload.run_script({script}, ['--lr', 1]).config == {{'args': ['--lr', '1']}}")
    project.run("--aorta-results=kept", passed=1)
    (plan,) = (project.path / "kept").rglob("plan.json")
    assert read_json(plan)["args"] == ["--lr", "1"]


def test_control_characters_of_a_rank_reach_neither_the_terminal_nor_a_file(project):
    project.one_test("workload.run('toy', fault={'raises': 1, 'message': '\\x1b[2Jgone \\x9b31m'})")
    result = project.run("-rf", "--junitxml=junit.xml", "--aorta-markdown=aorta.md", failed=1)
    written = [result.stdout.str(), *(project.read(name) for name in ("junit.xml", "aorta.md"))]
    shown = r"rank 1 failed first: ValueError: \x1b[2Jgone \x9b31m"
    assert [text.count("\x1b") + text.count("\x9b") for text in written] == [0, 0, 0]
    assert all(shown in text for text in written)


def test_scripts_results_are_compared_with_baselines_too(project):
    project.write("train.py", "")
    project.one_test("workload.check(workload.run_script('train.py'))")
    project.run("--update-baselines", passed=1)
    project.run(passed=1)


def test_every_launch_is_kept_in_the_results_folder(recorded):
    for _ in range(2):
        recorded.run("--aorta-results=kept", passed=2)
    runs = sorted(path.name.rpartition("-")[0] for path in (recorded.path / "kept").glob("*speed*/*"))
    assert runs == ["01-toy", "02-toy"]
    for folder in (recorded.path / "kept").glob("*/*"):
        assert {"plan.json", "result.json", "ranks"} <= {path.name for path in folder.iterdir()}


def test_markers_shape_the_world(project):
    project.one_test(
        "world = distributed_world; assert (world.size, world.device, world.backend, world.platform, world.timeout_s)"
        " == (3, 'cpu', 'gloo', 'cpu-x3-gloo', 7.0)",
        "@pytest.mark.world(size=3)\n@pytest.mark.launch_timeout(7)",
    )
    project.run("--aorta-timeout=9", passed=1)


def test_folder_of_own_workloads_can_be_elsewhere(project):
    (project.path / "workloads").rename(project.path / "mine")
    project.one_test("workload.run('toy')")
    project.run("-o", "aorta_workloads=mine", passed=1)


@ALONE_AND_NIGHTLY_ON_XDIST
def test_run_that_waits_for_the_lease_of_another_says_for_whose(project, workers):
    project.one_test("workload.run('toy')")
    held = lease(("cpu-0",), 1, exclusive=True, wait_s=9, folder=project.path / "leases", owner="other.py::one")
    said = r"aorta: test_toy.py::test_one: waited \d+ s for .*\n  cpu-0 held by other.py::one \(pid \d+\), since \d\d:"
    output = project.path / "stderr"  # of the run below

    def release_when_said():
        with held:
            await_true(lambda: output.exists() and re.search(said, output.read_text()))

    releasing = threading.Thread(target=release_when_said)
    releasing.start()
    result = project.run_apart(*workers, passed=1)
    releasing.join()
    assert re.search(said, result.stderr.str())


@ALONE_AND_NIGHTLY_ON_XDIST
def test_log_says_which_launch_of_a_test_follows(project, workers):
    project.one_test("workload.run('toy'); workload.run('toy')")
    said = project.run_apart(*workers, passed=1).stderr.str()
    assert re.search(r"aorta: test_toy.py::test_one: launch 1 took \d+\.\d s; launch 2 follows", said)
