from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_aorta.plan.options.table import OPTIONS
from pytest_aorta.verdict.metrics import METRICS


def assert_usage_error(result: pytest.RunResult, message: str) -> None:
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert message in result.stderr.str()


FAIL_ON = "a comma-separated list of inconclusive, not-applicable, improved, missing, or none"
BAD_VALUES = [
    ("gpus", "two", "an integer of 0 or more"),
    ("gpus", "-1", "an integer of 0 or more"),
    ("gpus", "1.5", "an integer of 0 or more"),
    ("gpus", "²", "an integer of 0 or more"),
    ("timeout", "0", "a number of seconds above 0 and up to 604800 (a week)"),
    ("timeout", "-5", "a number of seconds above 0 and up to 604800 (a week)"),
    ("timeout", "inf", "a number of seconds above 0 and up to 604800 (a week)"),
    ("timeout", "nan", "a number of seconds above 0 and up to 604800 (a week)"),
    ("timeout", "5s", "a number of seconds above 0 and up to 604800 (a week)"),
    ("fail_on", "warn", FAIL_ON),
    ("fail_on", "missing,", FAIL_ON),
    ("fail_on", "none,missing", FAIL_ON),
    ("fail_on", "regression", FAIL_ON),
    ("timeout", "", "a number of seconds above 0 and up to 604800 (a week)"),
    ("baselines", "", "a folder"),
    ("results", " ", "a folder"),
    ("history", "", "a folder"),
    ("markdown", "findings.txt", "a file whose name ends in .md"),
    ("markdown", "out/.md", "a file whose name ends in .md"),
    ("max_launches", "1", "an integer from 2 to 12"),
    ("max_launches", "13", "an integer from 2 to 12"),
    ("launches", "x", "an integer from 1 to 50"),
    ("launches", "0", "an integer from 1 to 50"),
    ("force_baseline", " ", "a reason, in words"),
    ("nnodes", "0", "an integer from 1 to 4096"),
    ("ab", "-f", "a branch, tag or commit, or python:PATH of another environment's interpreter"),
    ("ab", " ", "a branch, tag or commit, or python:PATH of another environment's interpreter"),
    ("ab", "python:", "a branch, tag or commit, or python:PATH of another environment's interpreter"),
]
BAD_INI_VALUES = [
    *((name, value, allowed) for name, value, allowed in BAD_VALUES if value.strip()),
    ("device", "gpu", "one of auto, cuda, cpu"),
    ("device", "", "one of auto, cuda, cpu"),
    ("profiler", "perf", "one of torch, nsys, rocprofv3"),
    ("progress", "maybe", "one of auto, on, off"),
    ("workloads", "", "a folder"),
    ("require_gpus", "maybe", "true or false"),
    ("timeout", "", "a number of seconds above 0 and up to 604800 (a week)"),
    ("node_launcher", "", "a command, e.g. 'srun --nodes={nodes} --ntasks={nodes}'"),
    ("node_launcher", "srun 'a", "a command, quoted as for a shell (No closing quotation)"),
    ("profiler_schedule", "active=0", "words such as wait=1 warmup=1 active=3 repeat=2 shapes memory (active is an"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), BAD_VALUES)
def test_bad_option_is_a_usage_error_with_given_and_allowed(project, name, value, allowed):
    flag = "--aorta-" + name.replace("_", "-")
    result = project.run(f"{flag}={value}")
    assert_usage_error(result, f"argument {flag}: got {value!r}, allowed is {allowed}")


@pytest.mark.parametrize("flag", ["--aorta-device", "--aorta-launcher", "--aorta-profiler"])
def test_value_that_is_no_choice_is_a_usage_error_of_argparse(project, flag):
    assert_usage_error(project.run(f"{flag}=gpu"), f"argument {flag}: invalid choice: 'gpu' (choose from ")


@pytest.mark.parametrize(("name", "value", "allowed"), BAD_INI_VALUES)
def test_bad_ini_value_is_a_usage_error_with_given_and_allowed(project, name, value, allowed):
    project.ini(f"aorta_{name} = {value}")
    assert_usage_error(project.run(), f"ERROR: ini key aorta_{name}: got {value!r}, allowed is {allowed}")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--aorta-strict", "--aorta-fail-on=inconclusive,not-applicable,missing"),
        ("--aorta-fail-improved", "--aorta-fail-on=improved,missing"),
        ("--aorta-missing-baseline=record", "--aorta-fail-on=none in place of ignore, or --update-baselines in place"),
        ("--aorta-new-epoch", "--aorta-reset-baselines"),
        ("--aorta-max-pairs=6", "--aorta-max-launches"),
        ("--aorta-update-baselines", "--update-baselines"),
        ("--aorta-durations", "pytest's --durations=N, 0 for all launches"),
        ("--aorta-workloads=mine", "the ini key aorta_workloads, or -o aorta_workloads=..."),
        ("--aorta-share-host", "the ini key aorta_share_host, or -o aorta_share_host=..."),
        ("--aorta-lease-timeout=9", "the ini key aorta_lease_timeout, "),
        ("--aorta-progress=on", "the ini key aorta_progress, "),
        ("--aorta-node-launcher=srun", "the ini key aorta_node_launcher, "),
        ("--aorta-profiler-schedule=wait=1", "the ini key aorta_profiler_schedule, "),
    ],
)
def test_flag_of_an_earlier_version_is_a_usage_error_that_names_the_new_one(project, old, new):
    assert_usage_error(project.run(old), f"{old.partition('=')[0]} no longer exists; give {new}")


OLD_INI_KEYS = [
    ("aorta_strict = true", "aorta_strict no longer exists; give aorta_fail_on=inconclusive,not-applicable,missing"),
    ("aorta_missing_baseline = record", "aorta_missing_baseline no longer exists; give aorta_fail_on=none in place"),
    ("aorta_fail_improved = true", "aorta_fail_improved no longer exists; give aorta_fail_on=improved,missing"),
    ("aorta_new_epoch = true", "aorta_new_epoch no longer exists; give aorta_reset_baselines"),
    ("aorta_durations = true", "aorta_durations no longer exists; give addopts = --durations=N, 0 for all launches"),
    ("aorta_max_pairs = 12", "aorta_max_pairs no longer exists; give aorta_max_launches"),
]


@pytest.mark.parametrize(("line", "message"), OLD_INI_KEYS)
def test_ini_key_of_an_earlier_version_is_a_usage_error_that_names_the_new_one(project, line, message):
    project.ini(line)
    assert_usage_error(project.run(), f"ERROR: ini key {message}")


def test_overridden_ini_key_of_an_earlier_version_is_a_usage_error_too(project):
    assert_usage_error(project.run("-o", "aorta_strict=1"), "ERROR: ini key aorta_strict no longer exists; give ")


def test_help_has_at_most_twenty_options_and_hides_the_names_of_earlier_versions(project):
    text = project.run("--help").stdout.str()
    group = text.partition("distributed training workloads (pytest-aorta):")[2].partition("\n\n")[0]
    flags = re.findall(r"^  (--[\w-]+)", group, re.MULTILINE)
    assert flags == [option.flag for option in OPTIONS if not option.ini_only]
    assert len(flags) <= 20
    assert "--aorta-strict" not in text
    assert "--aorta-share-host" not in text


def test_ini_keys_without_a_flag_are_taken_from_the_command_line_too(project):
    project.one_test("assert distributed_world._options.share_host")
    project.run("-o", "aorta_share_host=yes").assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--aorta-require-gpus", "--aorta-gpus=0"], "--aorta-require-gpus and --aorta-gpus=0 contradict each other"),
        (
            ["--aorta-require-gpus", "--aorta-device=cpu"],
            "--aorta-require-gpus and --aorta-device=cpu contradict each other",
        ),
        (["--aorta-device=cuda", "--aorta-gpus=0"], "--aorta-device=cuda and --aorta-gpus=0 contradict each other"),
        (
            ["--aorta-reset-baselines"],
            "--aorta-reset-baselines changes how baselines are recorded; give --update-baselines too",
        ),
        (
            ["--aorta-force-baseline=noisy"],
            "--aorta-force-baseline changes how baselines are recorded; give --update-baselines too",
        ),
        (
            ["--aorta-launches=3"],
            "--aorta-launches=3 sets the number of launches to record; give --update-baselines too, set the ini key "
            "aorta_launches in place of the flag, or limit the launches of a comparison with --aorta-max-launches",
        ),
        (["--aorta-gpus=2"], "--aorta-gpus=2: 0 GPUs are visible"),
    ],
)
def test_options_that_can_not_be_met_are_a_usage_error(project, options, message):
    assert_usage_error(project.run(*options), message)


@pytest.mark.parametrize("option", ["baselines", "results", "history"])
@pytest.mark.parametrize("place", ["file", "file/below"])
def test_file_in_the_place_of_a_folder_is_a_usage_error(project, option, place):
    project.write("file", "")
    given = f"--aorta-{option}={place}"
    assert_usage_error(project.run(given), f"{given}: {project.path}/file is a file, allowed is a folder")
    project.ini(f"aorta_{option} = {place}")
    assert_usage_error(project.run(), f"--aorta-{option}={place}: ")


@pytest.mark.parametrize("given", ["--aorta-markdown=file/a.md", "--aorta-report=file/a.html"])
def test_report_below_a_file_is_a_usage_error(project, given):
    project.write("file", "")
    assert_usage_error(project.run(given), f"{given}: {project.path}/file is a file, allowed is a folder")


@pytest.mark.parametrize("given", ["--aorta-markdown=a.md", "--aorta-report=a.html"])
def test_folder_in_the_place_of_a_report_is_a_usage_error(project, given):
    folder = project.path / given.partition("=")[2]
    folder.mkdir()
    assert_usage_error(project.run(given), f"{given}: {folder} is a folder, allowed is a file")


def test_unknown_option_is_a_usage_error(project):
    assert project.run("--aorta-gpu-count=2").ret == pytest.ExitCode.USAGE_ERROR


def test_ini_values_are_as_good_as_options(project):
    project.test_file()
    project.ini("aorta_update_baselines = true", "aorta_baselines = stored", "aorta_results = kept")
    project.run().assert_outcomes(passed=2)
    assert len(list((project.path / "stored").rglob("*.json"))) == 2
    assert len(list((project.path / "kept").iterdir())) == 2


@pytest.mark.skipif(pytest.version_tuple < (9,), reason="older versions of pytest do not read pytest.toml")
@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("aorta_timeout = 60", 'expects a string, got int: 60; write the value in quotes, as in aorta_timeout = "60"'),
        ("aorta_strict = true", 'got bool: True; write the value in quotes, as in aorta_strict = "true"'),
    ],
)
def test_toml_value_without_quotes_is_a_usage_error_that_shows_the_quotes(project, line, shown):
    # pytest.toml replaces the ini file, which turns this plugin off.
    project.write("pytest.toml", f"[pytest]\naddopts = ['-p', 'no:hypothesispytest']\n{line}\n")
    assert_usage_error(project.run(), shown)


def test_command_line_wins_over_ini(project):
    project.test_file()
    project.ini("aorta_fail_on = none")
    project.run().assert_outcomes(passed=2)
    project.run("--aorta-fail-on=missing").assert_outcomes(failed=2)
    assert project.baseline_files() == []


def test_ini_flag_works(project):
    project.test_file()
    project.ini("aorta_update_baselines = yes")
    project.run().assert_outcomes(passed=2)
    assert len(project.baseline_files()) == 2


def test_gpus_of_the_ini_file_do_not_keep_a_run_from_cpu_ranks(project):
    project.one_test("assert distributed_world.device == 'cpu'")
    project.ini("aorta_gpus = 8")
    project.run("--aorta-device=cpu").assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ("tolerance(step_time_p50='5')", "tolerance of step_time_p50: got '5', allowed is a percentage above 0%"),
        ("tolerance(step_time_p50='-3%')", "tolerance of step_time_p50: got '-3%', allowed is a percentage above 0%"),
        (
            "tolerance(step_time='5%')",
            "marker tolerance: metrics ['step_time'] are unknown (did you mean 'step_time_p50' or 'step_time_p99' or "
            f"'step_time_mean'?); allowed are {sorted(METRICS)}",
        ),
        ("world(size=0)", "marker world: size=0, allowed is an integer from 1 to 65536 or 'all'"),
        (
            "world(sizes=2)",
            "marker world has no keywords ['sizes'] (did you mean 'size'?); there are ['device', 'nodes', 'size', ",
        ),
        ("world(device='gpu')", "marker world: device='gpu', allowed is one of any, cuda, cpu"),
        ("launch_timeout(0)", "marker launch_timeout takes a number of seconds above 0"),
        ("overlap('yes')", "marker overlap takes no arguments, got ('yes')"),
    ],
)
def test_bad_marker_is_a_collection_error_that_names_the_test(project, mark, message):
    project.one_test("pass", f"@pytest.mark.{mark}")
    result = project.run("--collect-only")
    result.assert_outcomes(errors=1)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert f"test_toy.py::test_one: {message}" in result.stdout.str()


def test_bad_marker_of_a_class_is_found_in_each_of_its_tests(project):
    project.test_file(
        "import pytest\n@pytest.mark.world(size=-1)\nclass TestToy:\n"
        "    def test_a(self, workload): pass\n    def test_b(self, workload): pass\n"
    )
    text = project.run("--collect-only").stdout.str()
    assert "test_toy.py::TestToy::test_a: marker world: size=-1" in text
    assert "test_toy.py::TestToy::test_b: marker world: size=-1" in text


def test_markers_of_the_same_names_belong_to_the_suite_on_tests_without_a_launch(project):
    project.test_file(
        "import pytest\n@pytest.mark.tolerance(rtol=0.001)\n@pytest.mark.world(4, backend='gloo')\n"
        "@pytest.mark.numerics('fp8')\ndef test_other(): pass\n"
        "@pytest.mark.world(4, backend='gloo')\ndef test_by_name(request): request.getfixturevalue('workload')\n"
    )
    result = project.run()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["E *SpecError: marker world has no keywords [[]'backend'[]]; *"])


def without_installed_plugins(project, monkeypatch, *options: str) -> pytest.RunResult:
    """Run pytest with this plugin alone."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return project.run("-p", "pytest_aorta.plugin.hooks", "-W", "ignore::pytest.PytestUnknownMarkWarning", *options)


def test_marker_of_pytest_timeout_is_an_error_that_names_launch_timeout_where_that_plugin_is_not_installed(
    project, monkeypatch
):
    project.one_test("pass", "@pytest.mark.timeout(9)")
    result = without_installed_plugins(project, monkeypatch, "--collect-only")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*test_toy.py::test_one: marker timeout: *not installed*launch_timeout(SECONDS)"])


@pytest.mark.parametrize("options", [[], ["-p", "no:timeout", "-W", "ignore::pytest.PytestUnknownMarkWarning"]])
def test_marker_of_pytest_timeout_is_ignored_where_that_plugin_is_installed(project, options):
    project.one_test("assert distributed_world.timeout_s == 300", "@pytest.mark.timeout(90)")
    project.run(*options).assert_outcomes(passed=1)


def test_marker_of_pytest_timeout_is_ignored_if_that_plugin_is_loaded_by_the_name_of_its_module(project, monkeypatch):
    project.one_test("pass", "@pytest.mark.timeout(90)")
    result = without_installed_plugins(project, monkeypatch, "-p", "pytest_timeout")
    result.assert_outcomes(passed=1)


def test_marker_named_timeout_of_a_test_without_launches_is_ignored(project, monkeypatch):
    project.test_file("import pytest\n@pytest.mark.timeout('long')\ndef test_other(): pass\n")
    without_installed_plugins(project, monkeypatch).assert_outcomes(passed=1)


def test_markers_are_documented(project):
    project.run("--markers").stdout.fnmatch_lines(["@pytest.mark.world(size=2, device='any'): ranks to launch*"])


GPU_TEST = "@pytest.mark.world(size=4, device='cuda')"


def test_gpu_test_is_skipped_with_needed_and_given_and_counted(project):
    project.one_test("workload.run('toy')", GPU_TEST)
    result = project.run("-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(
        ["aorta: no test launched; 1 test skipped for lack of devices", "SKIPPED * needs 4 GPUs, 0 given"]
    )


ALL_GPUS = "@pytest.mark.world(size='all')"


@pytest.mark.parametrize(
    ("options", "outcome"),
    [([], "skipped"), (["--aorta-require-gpus"], "failed"), (["-n1"], "skipped")],
    ids=["skip", "required", "xdist"],
)
def test_workload_that_needs_more_than_all_gpus_of_the_run_lacks_devices(project, options, outcome):
    project.gpus(1)
    project.one_test("workload.check(workload.run('toy'))", ALL_GPUS)
    result = project.run("-rs", *options)
    result.assert_outcomes(**{outcome: 1})
    result.stdout.fnmatch_lines(["*workload 'toy' needs at least 2 GPUs, 1 given*"])
    result.stdout.fnmatch_lines(
        ["aorta: no test launched; 1 test " + ("skipped for lack of devices" if outcome == "skipped" else "failed*")]
    )


def test_world_that_a_test_chose_itself_is_launched_however_small(project):
    project.gpus(1)
    project.one_test("workload.run('toy')", "@pytest.mark.world(size=1)")
    project.run().assert_outcomes(passed=1)


def test_required_gpus_that_a_later_workload_lacks_fail_the_test(project):
    project.gpus(1)
    project.write("train.py", "")
    project.one_test("workload.run_script('train.py'); workload.run('toy')", ALL_GPUS)
    result = project.run("--aorta-require-gpus")
    result.assert_outcomes(failed=1)
    result.stdout.no_fnmatch_line("*skipped for lack of devices*")


@pytest.mark.parametrize("marks", [GPU_TEST, ""])
def test_required_gpus_that_are_lacking_fail_the_run(project, marks):
    project.one_test("workload.run('toy')", marks)
    result = project.run("--aorta-require-gpus")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert result.parseoutcomes().get("passed", 0) == 0
    result.stdout.fnmatch_lines(["--aorta-require-gpus: needs *GPUs, 0 given*"])
    result.stdout.no_fnmatch_line("During handling*")


def test_visible_device_that_is_none_is_reported_in_the_header_and_by_its_test(project, monkeypatch):
    nvml = SimpleNamespace(
        NVMLError=OSError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=int,
        nvmlDeviceGetUUID=str,
        nvmlDeviceGetHandleByUUID=lambda name: Path("/nowhere", name).stat(),
        nvmlDeviceGetName=str,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-c")
    project.one_test("workload.run('toy')")
    result = project.run()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        [
            "aorta: CUDA_VISIBLE_DEVICES names 'GPU-c', *",
            "E  *DevicesUnavailable: CUDA_VISIBLE_DEVICES names 'GPU-c', *",
        ]
    )


def test_required_gpus_do_not_matter_to_a_test_of_cpu_ranks(project):
    project.one_test("workload.run('toy')", "@pytest.mark.world(size=2, device='cpu')")
    project.run("--aorta-require-gpus").assert_outcomes(passed=1)


def test_too_many_cpu_ranks_are_skipped_with_needed_and_limit(project):
    project.one_test("workload.run('toy')", "@pytest.mark.world(size=60000, device='cpu')")
    result = project.run("-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED * needs 60000 ranks; * cores take at most * CPU ranks"])
