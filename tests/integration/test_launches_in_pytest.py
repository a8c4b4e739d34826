from __future__ import annotations

import json

import pytest


def failing(project, *arguments: str) -> pytest.RunResult:
    """Run one test, which has to fail in its body and not in its setup."""
    return project.run(*arguments, failed=1)


def test_failed_launch_is_a_failed_test_with_rank_and_traceback(project):
    project.plant(raises=1)
    project.one_test("workload.run('toy')")
    failing(project).stdout.fnmatch_lines(
        [
            "E  *LaunchError: toy on 2 cpu ranks: rank exception: rank 1 failed first: ValueError: boom",
            "E  *at train.py:7",
            "E  *plan, logs and stacks: *test-toy-py-test-one-*",
        ]
    )


def test_failure_shows_only_the_tests_own_frames(project):
    project.plant(raises=1)
    project.one_test("workload.run('toy')")
    text = failing(project).stdout.str()
    assert "pytest_aorta/" not in text
    assert "During handling of" not in text


def test_failed_checks_of_a_workload_are_reported_with_their_location(project):
    project.plant(wrong=9)
    project.one_test("workload.run('toy')")
    result = failing(project)
    result.stdout.fnmatch_lines(
        [
            "E  *WorkloadFailed: toy: 9 of its own checks failed on cpu-x2-gloo",
            "E  *all_gather: iteration 2, layer 3, on rank 1, from source rank 0: 7 of 16 elements wrong, first at "
            "index 5: expected 1, got 0 (zeroed)",
            "E  *... and 1 more",
        ]
    )


def test_launch_of_the_world_returns_results_with_failed_checks(project):
    project.plant(wrong=1)
    project.one_test("assert not distributed_world.launch('toy').passed")
    project.run().assert_outcomes(passed=1)


def test_invalid_result_is_a_failed_test_with_file_and_place(project):
    project.plant(metrics={"tokens_per_s": "many"})
    project.one_test("workload.run('toy')")
    failing(project).stdout.fnmatch_lines(["E  *ResultError: result invalid: */ranks/0/result.json: $.metrics*"])


@pytest.mark.parametrize("script", ["'train.py'", "'pkg.train'", "__import__('pathlib').Path('train.py')"])
def test_script_is_launched_with_its_arguments(project, script):
    project.write("train.py", "")
    project.one_test(f"assert workload.run_script({script}, ['--lr', 1]).config == {{'args': ['--lr', '1']}}")
    project.run("--aorta-results=kept").assert_outcomes(passed=1)
    (plan,) = (project.path / "kept").rglob("plan.json")
    assert json.loads(plan.read_text())["args"] == ["--lr", "1"]


def test_control_characters_of_a_rank_reach_neither_the_terminal_nor_a_file(project):
    project.one_test("workload.run('toy', fault={'raises': 1, 'message': '\\x1b[2Jgone \\x9b31m'})")
    result = failing(project, "-rf", "--junitxml=junit.xml", "--aorta-markdown=aorta.md")
    written = [result.stdout.str(), *((project.path / name).read_text() for name in ("junit.xml", "aorta.md"))]
    shown = r"rank 1 failed first: ValueError: \x1b[2Jgone \x9b31m"
    assert [text.count("\x1b") + text.count("\x9b") for text in written] == [0, 0, 0]
    assert all(shown in text for text in written)


def test_scripts_results_are_compared_with_baselines_too(project):
    project.write("train.py", "")
    project.one_test("workload.check(workload.run_script('train.py'))")
    project.run("--update-baselines").assert_outcomes(passed=1)
    project.run().assert_outcomes(passed=1)


def test_every_launch_is_kept_in_the_results_folder(recorded):
    for _ in range(2):
        recorded.run("--aorta-results=kept").assert_outcomes(passed=2)
    runs = sorted(path.name.rpartition("-")[0] for path in (recorded.path / "kept").glob("*speed*/*"))
    assert runs == ["01-toy", "02-toy"]
    for folder in (recorded.path / "kept").glob("*/*"):
        assert {"plan.json", "result.json", "ranks"} <= {path.name for path in folder.iterdir()}


def test_results_folder_that_can_not_be_written_fails_the_test(project):
    project.one_test(f"{project.obstacle('kept')}; workload.run('toy')")
    failing(project, "--aorta-results=kept").stdout.fnmatch_lines(
        [f"E  *LaunchError: results folder {project.path}/kept/* can't be written: Not a directory"]
    )


def test_results_folder_on_a_full_disk_is_named(project):
    project.plant(full_disk=True)
    project.one_test("workload.run('toy')")
    failing(project, "--aorta-results=kept").stdout.fnmatch_lines(
        [f"E  *LaunchError: results folder {project.path}/kept/*/01-toy-* can't be written: No space left on device"]
    )


def test_markers_shape_the_world(project):
    project.one_test(
        "world = distributed_world; assert (world.size, world.device, world.backend, world.platform, world.timeout_s)"
        " == (3, 'cpu', 'gloo', 'cpu-x3-gloo', 7.0)",
        "@pytest.mark.world(size=3)\n@pytest.mark.launch_timeout(7)",
    )
    project.run("--aorta-timeout=9").assert_outcomes(passed=1)


def test_option_sets_the_time_limit_without_a_marker(project):
    project.one_test("assert distributed_world.timeout_s == 9.0")
    project.run("--aorta-timeout=9").assert_outcomes(passed=1)


def test_tolerance_of_a_metric_that_needs_more_steps_is_reported(project):
    project.one_test("workload.check(workload.run('toy'))", "@pytest.mark.tolerance(step_time_p99='10%')")
    failing(project).stdout.fnmatch_lines(
        ["E  *SpecError: tolerance of step_time_p99: 4 steps were measured, but step_time_p99 needs at least 100; *"]
    )


def test_own_workload_with_the_name_of_an_installed_workload_is_reported(project):
    project.write("workloads/fsdp/default.yaml", (project.path / "workloads/toy/default.yaml").read_text())
    project.one_test("workload.run('fsdp')")
    failing(project).stdout.fnmatch_lines(["E  *SpecError: workload 'fsdp' is defined twice, in *"])


def test_folder_of_own_workloads_can_be_elsewhere(project):
    (project.path / "workloads").rename(project.path / "mine")
    project.one_test("workload.run('toy')")
    project.run("-o", "aorta_workloads=mine").assert_outcomes(passed=1)
