"""--update-baselines records, adds, replaces and refuses launches."""

from __future__ import annotations

import json

import pytest

from pytest_aorta.result.provenance import code_digest
from pytest_aorta.verdict.baseline import read_baseline_file
from tests.integration.conftest import STEADY, TOY_YAML


def stored(project) -> dict:
    (path,) = project.baseline_files()
    return json.loads(path.read_text())


def center_flags(project) -> list[tuple[int, bool]]:
    return [(launch["revision"], launch["center"]) for launch in stored(project)["launches"]]


def test_ten_launches_are_recorded_and_what_they_detect_is_reported(gpu):
    gpu.plant(step_ms=STEADY)
    gpu.run("--update-baselines", passed=1).stdout.fnmatch_lines(
        [
            "aorta: 1 test, 10 launches; 1 baseline measured",
            "recorded toy-gpu-x2-nccl: test_toy.py::test_one::toy (baseline 1: 10 launches, 10 kept in all)",
            "  step_time_p50: - -> 10 ms",
            "  step_time_p50: detects from +*% with 3, +*% with 5 launches",
        ]
    )
    assert center_flags(gpu) == [(1, True)] * 10
    assert stored(gpu)["forced"] == {}


def test_chosen_number_of_launches_is_recorded_for_each_label_with_what_it_detects(gpu):
    gpu.one_test("result = workload.run('toy'); [workload.check(result, label=label) for label in 'ab']")
    text = gpu.run("--update-baselines", "--aorta-launches=3", "--aorta-max-launches=2").stdout.str()
    assert "; 2 baselines measured" in text
    assert text.count("fewer than 3 launches never fail a test for a metric with noise") == 2
    assert [len(json.loads(path.read_text())["launches"]) for path in gpu.baseline_files()] == [3, 3]


def test_one_launch_is_recorded_where_nothing_has_noise(project):
    project.write("test_toy.py", "def test_one(workload): workload.check(workload.run('toy'))")
    project.run("--update-baselines").stdout.fnmatch_lines(["aorta: 1 test; 1 baseline measured"])
    assert center_flags(project) == [(1, True)]


def test_further_launches_are_added_and_the_center_stays(gpu):
    for _ in range(2):
        gpu.run("--update-baselines", "--aorta-launches=6").assert_outcomes(passed=1)
    result = gpu.run("--update-baselines", "--aorta-launches=2")
    result.stdout.fnmatch_lines(["updated toy-gpu-x2-nccl: * (baseline 1: 6 launches, 14 kept in all)"])
    assert center_flags(gpu) == [(1, True)] * 6 + [(1, False)] * 8


@pytest.mark.parametrize("first", [1, 3])
def test_few_launches_that_are_ten_times_slower_are_not_added(gpu, first):
    gpu.run("--update-baselines", f"--aorta-launches={first}").assert_outcomes(passed=1)
    before = stored(gpu)
    gpu.plant(slowdown=10.0)
    gpu.run("--update-baselines", "--aorta-launches=1").assert_outcomes(failed=1)
    assert stored(gpu) == before


@pytest.mark.parametrize(
    ("plant", "line"),
    [
        ({"slowdown": 1.2}, "step_time_p50: regression: 12 ms, baseline 10 ms, change +20.0% *"),
        ({"slowdown": 0.8}, "step_time_p50: improved: 8 ms, baseline 10 ms, change -20.0% *"),
        ({"weight_hash": "f" * 16}, "weight_hash: regression: ffffffffffff, baseline 000000000000, *"),
        ({"weight_hash": None}, "weight_hash: missing: *(the launch has no weight_hash)"),
        ({"metrics": {"num_parameters": 7}}, "num_parameters: missing: *"),
        ({"torch": "2.12.0"}, "torch is '2.12.0', the baseline's '2.11.0'"),
    ],
    ids=["regression", "improved", "hash", "lost", "new", "torch"],
)
def test_what_differs_from_the_baseline_is_not_added_to_it(learned, plant, line):
    before = stored(learned)
    learned.plant(**plant)
    learned.run("--update-baselines", failed=1).stdout.fnmatch_lines(
        [
            "E  *BaselineError: test_toy.py::test_one::toy: not added *, because it is not shown to be unchanged:",
            f"E  *{line}",
            "E  *next: if the change is intended, replace the baseline with --update-baselines --aorta-record=replace",
        ]
    )
    assert stored(learned) == before


def test_new_revision_replaces_the_center_and_keeps_old_launches_for_their_variance(learned):
    learned.plant(slowdown=1.2)
    learned.run("--update-baselines", "--aorta-record=replace", passed=1).stdout.fnmatch_lines(
        [
            "updated toy-gpu-x2-nccl: * (baseline 2: 10 launches, 20 kept in all)",
            "  step_time_p50: 10 ms -> 12 ms (+20.0%)",
        ]
    )
    assert center_flags(learned) == [(1, False)] * 10 + [(2, True)] * 10
    learned.run().assert_outcomes(passed=1)


def test_another_config_is_a_new_revision_unasked(learned):
    learned.one_test("workload.check(workload.run('toy', steps=5))")
    learned.run("--update-baselines").assert_outcomes(passed=1)
    assert center_flags(learned)[-1] == (2, True)
    assert stored(learned)["config"]["steps"] == 5


NOISY = [0.8, 1.1] * 5


def test_baseline_of_another_workload_is_missing_and_recording_starts_a_new_revision(gpu):
    gpu.write("workloads/toy2/default.yaml", (gpu.path / "workloads/toy/default.yaml").read_text())
    gpu.plant(step_ms=[10.0, 10.01, 9.99])
    for name in ("toy", "toy2"):
        gpu.one_test(f"workload.check(workload.run({name!r}), label='speed')")
        if name == "toy2":
            result = gpu.run()
            result.assert_outcomes(failed=1)
            result.stdout.fnmatch_lines(
                ["E *the baseline was recorded with the workload 'toy', the test has 'toy2'*; record it again with: *"]
            )
        gpu.run("--update-baselines", "--aorta-launches=3").assert_outcomes(passed=1)
    [file] = gpu.baseline_files()
    stored = read_baseline_file(file)
    assert (stored.workload, stored.revision, len(stored.center_launches)) == ("toy2", 2, 3)


@pytest.mark.parametrize(
    ("plant", "line"),
    [
        ({"slowdown": NOISY}, "standard deviation of launches is 18.*%, too large for a tolerance of 5%*"),
        ({"step_ms": [*STEADY[:5], 15.0, *STEADY[6:]]}, "launch 6 is an outlier, +4*% from the median*"),
        ({"step_ms": [10 + 0.06 * number for number in range(10)]}, "*drifts over the launches by *"),
    ],
    ids=["noise", "outlier", "drift"],
)
def test_metric_that_is_too_noisy_is_left_out_by_name_and_the_exact_ones_are_recorded(versioned_gpu, plant, line):
    project = versioned_gpu
    project.plant(**plant)
    project.run("--update-baselines", "--aorta-record=replace", passed=1).stdout.fnmatch_lines(
        [f"  step_time_p50: left out: {line}; compare it with --aorta-ab=REF"]
    )
    assert list(stored(project)["left_out"]) == ["step_time_p50"]
    project.plant()
    project.run(failed=1).stdout.fnmatch_lines(
        ["E  *step_time_p50: not applicable: *", "E  *next: compare side by side: pytest *::test_one --aorta-ab=HEAD"]
    )
    project.run("--aorta-ab=HEAD", passed=1).stdout.fnmatch_lines(["aorta: 1 test, * metrics match *"])
    project.plant(weight_hash="f" * 16)
    project.run(failed=1).stdout.fnmatch_lines(["E  *step_time_p50: not applicable*", "E  *weight_hash: regression: *"])


@pytest.mark.parametrize(
    ("plant", "line"),
    [
        ({"by_launch": {"7": {"weight_hash": "f" * 16}}}, "weight_hash: regression: *"),
        ({"by_launch": {"4": {"raises": 0}}}, "LaunchError: *rank 0 failed first: ValueError: boom"),
    ],
    ids=["hash", "failed launch"],
)
def test_launches_that_make_no_baseline_fail_the_test(gpu, plant, line):
    gpu.plant(**plant)
    gpu.run("--update-baselines", shows=f"E  *{line}", failed=1)
    assert gpu.baseline_files() == []


@pytest.mark.parametrize(("slowdown", "forced"), [(NOISY, {"1": "shared machine"}), (1, {})])
def test_noisy_launches_are_taken_by_force_and_the_reason_is_kept_if_it_was_needed(gpu, slowdown, forced):
    gpu.plant(slowdown=slowdown)
    result = gpu.run("--update-baselines", "--aorta-record=noisy:shared machine", passed=1)
    assert ("  recorded although it is noisy: shared machine" in result.outlines) is bool(forced)
    assert stored(gpu)["forced"] == forced


def kept_files(project) -> list:
    return list(project.path.glob(".pytest_cache/d/aorta-recordings/*/*/*.json"))


def commit(project, body: str | None = None):
    """Commit the test, with another body if one is given."""
    if body is not None:
        project.one_test(body)
    project.git("commit", "-qam", "another test", "--allow-empty")
    code_digest.cache_clear()


@pytest.fixture
def interrupted(versioned, gpu, monkeypatch):
    """The project in a repository, after Ctrl-C in the fourth of ten launches of a recording."""
    monkeypatch.delenv("CI", raising=False)
    gpu.git("add", "test_toy.py")
    gpu.git("commit", "-qm", "test")
    gpu.plant(step_ms=STEADY, by_launch={"4": {"interrupted": True}})
    stopped = gpu.pytester.runpytest_inprocess("--update-baselines", no_reraise_ctrlc=True)
    assert stopped.ret == pytest.ExitCode.INTERRUPTED
    assert gpu.baseline_files() == []
    stopped.stdout.fnmatch_lines(
        [
            "not recorded yet: test_toy.py::test_one::toy; 3 launches kept",
            "  next: to continue, run pytest test_toy.py::test_one --update-baselines; --cache-clear starts over",
        ]
    )
    stopped.stdout.no_fnmatch_line("aorta: no test launched*")
    gpu.plant(step_ms=STEADY)
    return gpu


def test_interrupted_recording_continues_with_its_launches_and_once_only(interrupted):
    for used in (7, 10):
        result = interrupted.pytester.runpytest_inprocess("--update-baselines")
        result.stdout.fnmatch_lines([f"aorta: 1 test, {used} launches; 1 baseline measured"])
        assert ("  3 launches of an interrupted recording among them" in result.outlines) == (used == 7)
        result.stdout.no_fnmatch_line("not recorded*")
    assert center_flags(interrupted) == [(1, True)] * 10 + [(1, False)] * 10


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("workloads/toy/default.yaml", TOY_YAML + "# changed", "the code has changed since"),
        ("sample.py", "", "the baseline was recorded with steps=5, the test has steps=4"),
    ],
    ids=["code", "config"],
)
def test_interrupted_recording_of_other_code_or_config_is_not_continued(interrupted, file, text, reason):
    interrupted.write(file, text)
    if file == "sample.py":
        [kept] = kept_files(interrupted)
        kept.write_text(kept.read_text().replace('"steps": 4', '"steps": 5'))
    code_digest.cache_clear()
    result = interrupted.pytester.runpytest_inprocess("--update-baselines")
    result.stdout.fnmatch_lines(
        ["aorta: 1 test, 10 launches; *", f"  launches of an interrupted recording are not used: {reason}"]
    )
    assert kept_files(interrupted) == []


@pytest.mark.parametrize(
    ("end", "marks", "reason"),
    [
        ("pytest.skip('enough')", "", "was skipped after its comparison"),
        ("assert False", "@pytest.mark.xfail", "failed, as its mark xfail expects"),
        ("pass", "@pytest.mark.xfail", "passed in spite of its mark xfail"),
        ("pass", "@pytest.mark.xfail(strict=True)", "failed"),
    ],
)
def test_test_that_is_not_recorded_is_reported_with_its_outcome(gpu, end, marks, reason):
    gpu.one_test(f"workload.check(workload.run('toy')); {end}", marks)
    result = gpu.run("--update-baselines", "--aorta-launches=2")
    result.stdout.fnmatch_lines([f"not recorded, because the test {reason}: test_toy.py::test_one::toy"])
    assert gpu.baseline_files() == []


TWO_LABELS = "result = workload.run('toy'); [workload.check(result, label=label) for label in 'ab']"


def test_comparison_that_was_recorded_before_the_interruption_of_its_test_is_kept_too(interrupted):
    before = kept_files(interrupted)
    commit(interrupted, TWO_LABELS)
    interrupted.plant(step_ms=STEADY, by_launch={"13": {"interrupted": True}})
    stopped = interrupted.pytester.runpytest_inprocess("--update-baselines", no_reraise_ctrlc=True)
    assert stopped.ret == pytest.ExitCode.INTERRUPTED
    stopped.stdout.fnmatch_lines(
        ["not recorded yet: *::a; 10 launches kept", "not recorded yet: *::b; 3 launches kept"]
    )
    interrupted.plant(step_ms=STEADY)
    result = interrupted.pytester.runpytest_inprocess("--update-baselines")
    result.stdout.fnmatch_lines(
        [
            "aorta: 1 test, 7 launches; 2 baselines measured",
            "  9 launches of an interrupted recording among them",
            "  3 launches of an interrupted recording among them",
        ]
    )
    assert kept_files(interrupted) == before


def test_launches_are_kept_if_their_baseline_can_not_be_written(interrupted):
    write = interrupted.obstacle("baselines")
    commit(interrupted, f"workload.check(workload.run('toy')); {write}")
    result = interrupted.pytester.runpytest_inprocess("--update-baselines")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["ERROR */baselines: can't be locked: *", "not recorded yet: *; 10 launches kept"])


def test_launches_of_a_test_that_fails_after_its_comparison_are_not_kept(interrupted):
    commit(interrupted, "workload.check(workload.run('toy')); assert False")
    result = interrupted.pytester.runpytest_inprocess("--update-baselines")
    result.stdout.fnmatch_lines(["not recorded, because the test failed: *"])
    result.stdout.no_fnmatch_line("not recorded yet: *")
    assert kept_files(interrupted) == []


def test_attempt_does_not_continue_with_the_launches_of_the_attempt_before(interrupted):
    interrupted.let_in("rerunfailures")
    interrupted.test_file(
        "attempts = []\n\ndef test_one(workload):\n    workload.check(workload.run('toy'))\n"
        "    attempts.append(1)\n    assert len(attempts) == 2\n"
    )
    interrupted.git("commit", "-qam", "failing once")
    result = interrupted.pytester.runpytest_subprocess("--reruns=1", "--update-baselines", timeout=150)
    assert result.parseoutcomes() == {"passed": 1, "rerun": 1}
    result.stdout.fnmatch_lines(["aorta: 1 test, 20 launches; 1 baseline measured; 1 attempt retried"])
    result.stdout.no_fnmatch_line("*among them")
    assert kept_files(interrupted) == []


def test_second_run_of_a_test_in_one_session_does_not_continue_with_the_launches_of_the_first(interrupted):
    commit(interrupted)
    twice = ("--keep-duplicates", "test_toy.py", "test_toy.py")
    result = interrupted.pytester.runpytest_inprocess(*twice, "--update-baselines")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["aorta: 2 tests, 20 launches; *"])
    result.stdout.no_fnmatch_line("*among them")
