"""Simulated worlds in a whole session of pytest, with a fake launcher."""

import json

import pytest

EIGHT = """
import pytest

@pytest.mark.world(size=8, device="cuda")
def test_eight(workload):
    workload.check(workload.run("toy"))

@pytest.mark.overlap
@pytest.mark.world(size=8, device="cuda")
def test_overlap(workload):
    workload.check(workload.run("toy"))

@pytest.mark.world(size=8, device="cuda")
def test_steps(workload):
    workload.compare({"workload": "toy"}, {"workload": "toy"}, steps=2)
"""
STAGES = """
import pytest

@pytest.mark.world(size=1024, simulated=(0, 512))
def test_stages(workload):
    workload.check(workload.run("toy"))
"""


def test_a_machine_without_gpus_skips_and_under_the_option_simulates(project):
    project.write("test_toy.py", EIGHT)
    project.plant(metrics={"num_parameters": 7})
    project.run(skipped=3)
    project.run("--aorta-without-gpus=simulate", "--update-baselines", passed=2, skipped=1)
    assert [file.parent.name for file in project.baseline_files()] == ["simulated-x8"] * 2
    result = project.run("--aorta-without-gpus=simulate", "-rs", passed=2, skipped=1)
    text = result.stdout.str()
    assert text.count("not simulated") == 1
    assert "simulated: 2 tests on simulated-x8" in text
    assert "missing GPUs simulated" in text
    assert "compares values step by step, which a simulated world does not have" in text


def test_costs_alone_are_compared_and_a_change_fails(project):
    project.write("test_toy.py", STAGES)
    project.plant(metrics={"num_parameters": 7})
    project.run("--update-baselines", passed=1)
    # Times and weights mean nothing: neither is compared, whatever they are.
    project.plant(metrics={"num_parameters": 7}, slowdown=5, weight_hash="f" * 16)
    project.run("-v", passed=1)
    project.plant(metrics={"num_parameters": 8})
    assert "num_parameters" in project.run(failed=1).stdout.str()


def test_a_launch_without_any_cost_fails_since_nothing_is_compared(project):
    project.write("test_toy.py", STAGES)
    assert "no cost was counted" in project.run(failed=1).stdout.str()


def test_only_the_ranks_that_are_asked_for_are_started(project):
    project.write("test_toy.py", STAGES)
    project.plant(metrics={"num_parameters": 7})
    project.run("--aorta-results=kept", "--update-baselines", passed=1)
    kept = json.loads(next((project.path / "kept").rglob("01-*/result.json")).read_text())
    assert (kept["world_size"], kept["simulated"], len(kept["ranks"])) == (1024, [0, 512], 2)
    assert (kept["backend"], kept["platform"]) == ("fake", "simulated-x1024")
    folders = next((project.path / "kept").rglob("01-*/ranks"))
    assert sorted(folder.name for folder in folders.iterdir()) == ["0", "512"]


@pytest.mark.parametrize(
    ("given", "shows"),
    [
        ("size=4, simulated=(0, 4)", "different ranks from 0 to 3"),
        ("size=4, simulated=(1, 1)", "different ranks from 0 to 3"),
        ("size=4, simulated=()", "different ranks from 0 to 3"),
        ("size=4, simulated='yes'", "different ranks from 0 to 3"),
        ("size='all', simulated=True", "contradict each other"),
        ("size=4, nodes=2, simulated=True", "contradict each other"),
    ],
)
def test_a_marker_that_can_not_be_simulated_says_what_is_allowed(project, given, shows):
    project.write("test_toy.py", STAGES.replace("size=1024, simulated=(0, 512)", given))
    assert shows in project.run(errors=1).stdout.str()
