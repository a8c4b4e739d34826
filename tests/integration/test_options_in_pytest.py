import re

import pytest

from pytest_aorta.plan.options import OPTIONS

# pytest 8 gives the text itself.
CONVERTED = "could not convert string to float:" if pytest.version_tuple >= (9,) else "got"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--aorta-gpus=two"], "argument --aorta-gpus: got 'two', allowed is an integer of 0 or more"),
        (["-o", "aorta_fail_on=missing warn"], "ini key aorta_fail_on: got ['missing', 'warn'], allowed is a comma-"),
        (["-o", "aorta_launcher=mpi"], "ini key aorta_launcher: got 'mpi', allowed is one of torchrun, forkserver"),
        (["-o", "aorta_no_locate=maybe"], "ini key aorta_no_locate: "),
        (["-o", "aorta_timeout=abc"], f"ini key aorta_timeout: {CONVERTED} 'abc', allowed is a number"),
        (["-o", "aorta_workloads=absent"], "aorta_workloads, --workloads: there is no folder {}/absent"),
        (["-o", "aorta_node_launcher=srun 'a"], "ini key aorta_node_launcher: No closing quotation"),
        (["--aorta-record=replace"], "--aorta-record changes how baselines are recorded; give --update-baselines too"),
        (["--aorta-baselines=file"], "--aorta-baselines=file: {}/file is a file, allowed is a folder"),
        (["--aorta-markdown=file/a.md"], "--aorta-markdown=file/a.md: {}/file is a file, allowed is a folder"),
        (["--aorta-report=folder.html"], "--aorta-report=folder.html: {}/folder.html is a folder, allowed is a file"),
        (["--aorta-nnodes=2"], "--aorta-nnodes=2: set the ini key aorta_node_launcher, a command that starts a node "),
        (["--aorta-nnodes=2", "-o", "aorta_node_launcher=srun"], "--aorta-nnodes=2: give --aorta-results"),
        (["-o", "aorta_profiler=rocprofv3"], "ini key aorta_profiler: got 'rocprofv3', allowed is one of torch"),
    ],
)
def test_option_or_ini_value_that_is_not_allowed_is_a_usage_error(project, given, message):
    project.write("file", "")
    project.write("folder.html/inside", "")
    result = project.run(*given)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert message.format(project.path) in result.stderr.str()


def test_names_of_version_0_1_work_with_a_warning(project):
    project.write(
        "test_old.py",
        "def test_old(distributed_world):\n    assert distributed_world.launch == distributed_world.run\n",
    )
    result = project.run("--aorta-locate", "-W", "always::DeprecationWarning")
    assert result.ret == 0
    text = result.stdout.str()
    assert "DeprecationWarning: --aorta-locate: failures are located without it" in text
    assert "DeprecationWarning: launch() is run() since version 0.2" in text
    assert "--aorta-locate" not in project.run("--help").stdout.str()


KEYS = {"aorta_timeout": "60", "aorta_gpus": "0", "aorta_no_locate": "true", "aorta_max_launches": "4"}
TYPED = """
from pytest_aorta.plugin.hooks import RUN

def test_one(request):
    options = request.config.stash[RUN].options
    assert (options.timeout, options.gpus, options.no_locate, options.max_launches) == (60.0, 0, True, 4)
    assert sorted(options.fail_on) == ["improved", "missing"]
"""


@pytest.mark.parametrize(
    ("name", "head", "quote", "lists"),
    [
        ("own.ini", "[pytest]", "", "aorta_fail_on = missing,improved"),
        ("pyproject.toml", "[tool.pytest.ini_options]", '"', 'aorta_fail_on = "missing,improved"'),
        ("pyproject.toml", "[tool.pytest.ini_options]", "", 'aorta_fail_on = ["missing", "improved"]'),
        pytest.param(
            *("pytest.toml", "[pytest]", "", 'aorta_fail_on = ["missing", "improved"]'),
            marks=pytest.mark.skipif(pytest.version_tuple < (9,), reason="older versions do not read pytest.toml"),
        ),
    ],
    ids=["ini", "quoted", "unquoted", "native"],
)
def test_ini_keys_take_native_values_and_texts(project, name, head, quote, lists):
    lines = [f"{key} = {quote}{value}{quote}" for key, value in KEYS.items()]
    project.write(name, "\n".join([head, *lines, lists]) + "\n")
    project.write("test_plain.py", TYPED)
    project.run("-c", name, "-p", "no:hypothesispytest", passed=1)


def test_help_lists_each_option_once(project):
    text = project.run("--help").stdout.str()
    group = text.partition("distributed training workloads (pytest-aorta):")[2].partition("\n\n")[0]
    flags = re.findall(r"^  (--[\w-]+)", group, re.MULTILINE)
    assert flags == [option.flag for option in OPTIONS if not option.ini_only]


def test_command_line_wins_over_ini(project):
    project.test_file()
    project.ini("aorta_fail_on = none", "aorta_gpus = 8")
    project.run("--aorta-gpus=0", passed=2)
    project.run("--aorta-gpus=0", "--aorta-fail-on=missing", failed=2)
    assert project.baseline_files() == []


def test_wrong_marker_fails_its_own_test_in_setup_and_no_other(project):
    project.test_file(
        "import pytest\n@pytest.mark.world(size=-1)\nclass TestToy:\n"
        "    def test_bad(self, workload): pass\n"
        "    @pytest.mark.world(sizes=2)\n    def test_worse(self, workload): pass\n"
        "def test_good(workload): pass\n"
    )
    project.run("-k", "good", passed=1, deselected=2)
    assert project.run("--collect-only").ret == 0
    shows = [
        "E *SpecError: marker world: size=-1, allowed is an integer from 1 to 65536 or 'all'",
        "E *SpecError: marker world(*): got an unexpected keyword argument 'sizes', in (sizes=2)",
        "aorta: *2 tests failed before a launch",
    ]
    project.run("-v", shows=shows, passed=1, errors=2)


def test_markers_of_the_same_names_belong_to_the_suite_on_tests_without_a_launch(project):
    project.test_file(
        "import pytest\n@pytest.mark.tolerance(rtol=0.001)\n@pytest.mark.world(4, backend='gloo')\n"
        "@pytest.mark.numerics('fp8')\ndef test_other(): pass\n"
        "@pytest.mark.world(4, backend='gloo')\ndef test_by_name(request): request.getfixturevalue('workload')\n"
    )
    project.run(
        passed=1, failed=1, shows="E *SpecError: marker world(*): got an unexpected keyword argument 'backend', *"
    )


GPU_TEST = "@pytest.mark.world(size=4, device='cuda')"


def test_gpu_test_is_skipped_with_needed_and_given_and_counted(project):
    project.one_test("workload.run('toy')", GPU_TEST)
    shows = ["aorta: no test launched, 1 test skipped for lack of devices", "SKIPPED * needs 4 GPUs, 0 given"]
    project.run("-rs", shows=shows, skipped=1)


ALL_GPUS = "@pytest.mark.world(size='all')"


@pytest.mark.parametrize(
    ("options", "outcome"),
    [([], "skipped"), (["--aorta-without-gpus=fail"], "failed"), (["-n1"], "skipped")],
    ids=["skip", "required", "xdist"],
)
def test_workload_that_needs_more_than_all_gpus_of_the_run_lacks_devices(project, options, outcome):
    project.gpus(1)
    project.one_test("workload.check(workload.run('toy'))", ALL_GPUS)
    result = project.run("-rs", *options, shows="*workload 'toy' needs at least 2 GPUs, 1 given*", **{outcome: 1})
    result.stdout.fnmatch_lines(
        ["aorta: no test launched, 1 test " + ("skipped for lack of devices" if outcome == "skipped" else "failed*")]
    )


def test_world_that_is_too_small_for_a_workload_fails_before_it_is_launched(project):
    project.gpus(1)
    project.one_test("workload.run('toy')", "@pytest.mark.world(size=1)")
    shows = ["*workload 'toy' needs at least 2 ranks, and this world has 1*", "aorta: no test launched, *"]
    project.run(shows=shows, failed=1)


def test_required_gpus_that_a_later_workload_lacks_fail_the_test(project):
    project.gpus(1)
    project.write("train.py", "")
    project.one_test("workload.run_script('train.py'); workload.run('toy')", ALL_GPUS)
    result = project.run("--aorta-without-gpus=fail", failed=1)
    result.stdout.no_fnmatch_line("*skipped for lack of devices*")


@pytest.mark.parametrize("marks", [GPU_TEST, ""])
def test_required_gpus_that_are_lacking_fail_the_run(project, marks):
    project.one_test("workload.run('toy')", marks)
    result = project.run("--aorta-without-gpus=fail")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert result.parseoutcomes().get("passed", 0) == 0
    result.stdout.fnmatch_lines(["--aorta-without-gpus=fail: needs *GPUs, 0 given*"])
    result.stdout.no_fnmatch_line("During handling*")


def test_visible_device_that_is_none_is_reported_in_the_header_and_by_its_test(project, nvml, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-c")
    project.one_test("workload.run('toy')")
    shows = [
        "aorta: CUDA_VISIBLE_DEVICES names 'GPU-c', *",
        "E  *DevicesUnavailable: CUDA_VISIBLE_DEVICES names 'GPU-c', *",
    ]
    project.run(shows=shows, errors=1)
