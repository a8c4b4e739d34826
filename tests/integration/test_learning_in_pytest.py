"""--update-baselines records, adds, replaces and refuses launches."""

import json
import re

import pytest

from pytest_aorta.verdict.baseline import read_baseline_file
from tests.integration.conftest import STEADY
from tests.unit.builders import each_of, read_json


def stored(project) -> dict:
    (path,) = project.baseline_files()
    return read_json(path)


def center_flags(project) -> list[tuple[int, bool]]:
    return [(launch["revision"], launch["center"]) for launch in stored(project)["launches"]]


# Noise that takes more launches until the tolerance of 5% is enforced, and noise for which no ten launches would do.
RESTLESS = [0.984, 1.016, 1.0, 0.989, 1.018, 0.995, 1.01, 0.986, 1.013, 1.0]
NOISY = [0.8, 1.1] * 5


@pytest.mark.parametrize(
    ("slowdown", "forced", "launches"), [(1, [], 3), (RESTLESS, [], 6), (NOISY, ["--aorta-record=noisy:shared"], 5)]
)
def test_recording_ends_once_the_tolerance_is_enforced_or_can_not_be(gpu, slowdown, forced, launches):
    gpu.plant(slowdown=slowdown)
    shows = f"aorta: 1 test OK, 1 baseline measured, {launches} launches*"
    gpu.run("--update-baselines", *forced, shows=shows, passed=1)
    assert center_flags(gpu) == [(1, True)] * launches


def test_what_the_recorded_launches_detect_is_reported(gpu):
    gpu.plant(step_ms=STEADY)
    shows = [
        "aorta: 1 test OK, 1 baseline measured, 3 launches*",
        "recorded toy-gpu-x2-nccl: test_toy.py::test_one::toy (baseline 1: 3 launches, 3 in the file)",
        "  step_time_p50: 10 ms",
        "  step_time_p50: detects from +*% with 3, +*% with 5 launches",
    ]
    gpu.run("--update-baselines", shows=shows, passed=1)
    assert stored(gpu)["forced"] == {}


def test_chosen_number_of_launches_is_recorded_for_each_label_with_what_it_detects(gpu):
    gpu.one_test("result = workload.run('toy'); [workload.check(result, label=label) for label in 'ab']")
    text = gpu.run("--update-baselines", "--aorta-launches=3", "--aorta-max-launches=2").stdout.str()
    assert "aorta: 1 test OK, 2 baselines measured, " in text
    assert text.count("fewer than 3 launches never fail a test for a metric with noise") == 2
    assert [len(read_json(path)["launches"]) for path in gpu.baseline_files()] == [3, 3]


def test_comparisons_with_one_label_are_numbered_and_have_baselines_of_their_own(project):
    project.one_test("[workload.check(workload.run('toy', steps=steps)) for steps in (4, 6)]")
    project.run(
        "--update-baselines", shows=["recorded *::test_one::toy (*", "recorded *::test_one::toy 2 (*"], passed=1
    )
    project.one_test("[workload.check(workload.run('toy', steps=steps)) for steps in (4, 5)]")
    project.run(shows="E  *Missing: the baseline was recorded with steps=6, the test has steps=5", failed=1)


def test_one_launch_is_recorded_where_nothing_has_noise(project):
    project.write("test_toy.py", "def test_one(workload): workload.check(workload.run('toy'))")
    project.run("--update-baselines", shows="aorta: 1 test OK, 1 baseline measured, 2 launches*")
    assert center_flags(project) == [(1, True)]


def test_further_launches_are_added_and_the_center_stays(gpu):
    for _ in range(2):
        gpu.run("--update-baselines", passed=1)
    (file,), document = gpu.baseline_files(), stored(gpu)
    del document["config"]["steps"]  # a key that is newer than the baseline had its default
    file.write_text(json.dumps(document))
    result = gpu.run(
        "--update-baselines",
        "--aorta-launches=2",
        shows="updated toy-gpu-x2-nccl: * (baseline 1: 3 launches, 8 in the file)",
    )
    result.stdout.no_fnmatch_line("  step_time_p50: 10 ms*")  # only what changes has a line
    assert center_flags(gpu) == [(1, True)] * 3 + [(1, False)] * 5


DIFFERENT = {
    "regression": ({"slowdown": 1.2}, "Regression: step_time_p50 +20.0% (10 -> 12 ms, limit *"),
    "improved": ({"slowdown": 0.8}, "Improved: step_time_p50 -20.0% (10 -> 8 ms, *"),
    "hash": ({"weight_hash": "f" * 16}, "Regression: weight_hash (000000000000 -> ffffffffffff, *"),
    "lost": ({"weight_hash": None}, "Missing: weight_hash, the launch has no weight_hash"),
    "new": ({"metrics": {"num_parameters": 7}}, "Missing: num_parameters, *"),
    "torch": ({"torch": "2.12.0"}, "other environment: torch '2.11.0' -> '2.12.0'"),
}


@each_of("plant, line", DIFFERENT)
def test_what_differs_from_the_baseline_is_not_added_to_it(learned, plant, line):
    before = stored(learned)
    learned.plant(**plant)
    shows = [
        "E  *BaselineError: test_toy.py::test_one::toy: not added *, because it is not shown to be unchanged:",
        f"E  *{line}",
        "E  *next: if the change is intended, replace the baseline with --update-baselines --aorta-record=replace",
    ]
    learned.run("--update-baselines", shows=shows, failed=1)
    assert stored(learned) == before


def test_new_revision_replaces_the_center_and_keeps_old_launches_for_their_variance(learned):
    learned.plant(slowdown=1.2)
    shows = [
        "updated toy-gpu-x2-nccl: * (baseline 2: 3 launches, 6 in the file)",
        "  step_time_p50: 10 ms -> 12 ms (+20.0%)",
    ]
    learned.run("--update-baselines", "--aorta-record=replace", shows=shows, passed=1)
    assert center_flags(learned) == [(1, False)] * 3 + [(2, True)] * 3
    learned.run(passed=1)


def test_another_config_is_a_new_revision_unasked(learned):
    learned.one_test("workload.check(workload.run('toy', steps=5))")
    learned.run("--update-baselines", passed=1)
    assert center_flags(learned)[-1] == (2, True)
    assert stored(learned)["config"]["steps"] == 5


def test_baseline_of_another_workload_is_missing_and_recording_starts_a_new_revision(gpu):
    gpu.write("workloads/toy2/default.yaml", gpu.read("workloads/toy/default.yaml"))
    gpu.plant(step_ms=[10.0, 10.01, 9.99])
    for name in ("toy", "toy2"):
        gpu.one_test(f"workload.check(workload.run({name!r}), label='speed')")
        if name == "toy2":
            gpu.run(shows="E *the baseline was recorded with the workload 'toy', the test has 'toy2'*", failed=1)
        gpu.run("--update-baselines", "--aorta-launches=3", passed=1)
    [file] = gpu.baseline_files()
    stored = read_baseline_file(file)
    assert (stored.workload, stored.revision, len(stored.center_launches)) == ("toy2", 2, 3)


TOO_NOISY = {
    "noise": (
        {"slowdown": [0.97, 1.03] * 5},
        "standard deviation of launches is *%, too large for a tolerance of 5%*",
        True,
    ),
    "outlier": ({"step_ms": [10.0, 15.0, *STEADY]}, "standard deviation of launches is *%, too large for *", False),
}


@each_of("plant, line, is_enough", TOO_NOISY)
def test_marked_metric_that_launches_can_not_hold_fails_the_recording(gpu, plant, line, is_enough):
    gpu.plant(**plant)
    shows = [
        "E *BaselineError: test_toy.py::test_one::toy: not recorded, *",
        f"E *step_time_p50: {line}",
        "E *next: *take step_time_p50 out of the marker; or give --aorta-record=replace,noisy:REASON",
    ]
    result = gpu.run("--update-baselines", shows=shows, failed=1)
    assert gpu.baseline_files() == []
    offered = re.search(r"set a tolerance of ([\d.]+%), or compare", result.stdout.str()) if is_enough else None
    # The next comparison of the unchanged code passes, by either way out.
    source = gpu.read("test_toy.py")
    marker = 'pytestmark = pytest.mark.tolerance(step_time_p50="5%")'
    assert marker in source
    if offered is not None:
        gpu.write("test_toy.py", source.replace('"5%"', f'"{offered[1]}"'))
    else:
        gpu.write("test_toy.py", source.replace(marker, ""))
    gpu.run("--update-baselines", passed=1)
    gpu.run(passed=1)


def test_marker_that_names_what_the_baseline_left_out_fails_the_recording(gpu):
    marked = gpu.read("test_toy.py")
    gpu.write("test_toy.py", marked.replace('pytestmark = pytest.mark.tolerance(step_time_p50="5%")', ""))
    gpu.plant(slowdown=NOISY)
    gpu.run("--update-baselines", passed=1)
    gpu.write("test_toy.py", marked)
    gpu.plant()
    gpu.run("--update-baselines", shows="E *next: *--aorta-record=replace*", failed=1)
    gpu.run("--update-baselines", "--aorta-record=replace", passed=1)
    gpu.run(passed=1)


def test_metric_that_is_too_noisy_is_left_out_by_name(versioned_gpu):
    project = versioned_gpu
    marked = project.read("test_toy.py")
    project.write("test_toy.py", marked.replace('pytestmark = pytest.mark.tolerance(step_time_p50="5%")', ""))
    project.plant(slowdown=NOISY)
    shows = ["  step_time_p50: left out: standard deviation of launches is *; compare it with --aorta-ab=REF"]
    project.run("--update-baselines", "--aorta-record=replace", shows=shows, passed=1)
    assert list(stored(project)["left_out"]) == ["step_time_p50"]
    project.plant()
    project.run(passed=1)
    project.write("test_toy.py", marked)
    shows = ["E  *Not applicable: step_time_p50, *", "E  *confirm   pytest *::test_one --aorta-ab=HEAD"]
    project.run(shows=shows, failed=1)
    project.run("--aorta-ab=HEAD", passed=1, shows="aorta: 1 test OK, * metrics unchanged*")
    project.plant(weight_hash="f" * 16)
    project.run(shows=["E  *Regression: weight_hash *", "E  *Not applicable: step_time_p50, *"], failed=1)


NO_BASELINE = {
    "hash": ({"by_launch": {"3": {"weight_hash": "f" * 16}}}, "Regression: weight_hash *"),
    "failed launch": ({"by_launch": {"3": {"raises": 0}}}, "LaunchError: *rank 0 failed first: ValueError: boom"),
}


@each_of("plant, line", NO_BASELINE)
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


def test_interrupted_recording_writes_nothing(gpu):
    gpu.plant(step_ms=STEADY, by_launch={"3": {"interrupted": True}})
    stopped = gpu.pytester.runpytest_inprocess("--update-baselines", no_reraise_ctrlc=True)
    assert stopped.ret == pytest.ExitCode.INTERRUPTED
    assert gpu.baseline_files() == []


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
    gpu.run(
        "--update-baselines",
        "--aorta-launches=2",
        shows=f"not recorded, because the test {reason}: test_toy.py::test_one::toy",
    )
    assert gpu.baseline_files() == []


def test_launches_of_the_same_code_that_compute_other_weights_are_not_recorded(project):
    call = "workload.run('toy', hash_tensors=['weights'], hash_tensors_step=4)"
    project.write("test_toy.py", f"def test_one(workload): workload.check({call})")
    project.plant(by_launch={"2": {"weight_hash": "1" * 16, "tensor_hash": "1" * 32}})
    shows = [
        "E *BaselineError: test_toy.py::test_one::toy: not recorded, because two launches of the same*",
        "E *first difference: step 4, weight_hash",
        "E *step 4, weights: 1 of 2 parameters differ, first w [[]2, 3]",
        "E *next: set the seed before the model is made, *",
    ]
    project.run("--update-baselines", shows=shows, failed=1)
    assert project.baseline_files() == []
