"""Runs beside other plugins of pytest: pytest-randomly, -timeout, -rerunfailures, -xdist."""

import json
import sys

import pytest

from pytest_aorta.launch.leases import holders, lease
from pytest_aorta.verdict.baseline import read_baseline_file
from tests.integration.conftest import TIMED

MANY_TESTS = """
import pytest
from random import random

@pytest.mark.parametrize("steps", [4, 5, 6, 7])
def test_one(workload, steps):
    random()
    workload.check(workload.run("toy", steps=steps))
"""
SUMMARY = ("--aorta-report=out/report.html",)
COUNT = 4


@pytest.fixture
def many(project):
    """The project with four tests and their baselines."""
    project.test_file(MANY_TESTS)
    project.run("--update-baselines", "--aorta-launches=2", passed=COUNT)
    return project


def cases(project) -> list[dict]:
    return project.summary()["entries"]


def verdicts(project) -> list[tuple]:
    """Return test, metric and verdict of each comparison."""
    return sorted((case["test"], *verdict) for case in cases(project) for verdict in case["verdicts"].items())


# --- pytest-randomly --------------------------------------------------------------------------------------------------


def test_shuffled_tests_keep_their_verdicts(many):
    many.let_in("randomly")
    orders, found = [], []
    for seed in (1, 2):
        many.run(*SUMMARY, f"--randomly-seed={seed}", passed=COUNT)
        orders.append([case["test"] for case in cases(many)])
        found.append(verdicts(many))
    assert len({tuple(order) for order in orders}) > 1
    assert found[0] == found[1]
    assert {outcome for _, _, outcome in found[0]} == {"pass"}


def test_seed_does_not_change_the_order_of_an_ab(versioned_gpu):
    versioned_gpu.let_in("randomly")
    versioned_gpu.plant(candidate={"slowdown": 1.2})
    versioned_gpu.run("--aorta-ab=HEAD", "--aorta-results=kept", "--randomly-seed=9", failed=1)
    assert versioned_gpu.planned() == ["", "", "HEAD", "HEAD", "", "", "HEAD"]


# --- pytest-timeout ---------------------------------------------------------------------------------------------------


def test_time_limit_of_pytest_timeout_names_the_launch(project):
    project.test_file(
        # pytest-timeout ends this test.
        "import pytest\n@pytest.mark.timeout(4, method='signal')\ndef test_slow(workload): workload.run('toy')\n"
        "def test_next(workload): workload.run('toy')\n"
    )
    project.plant(sleeps=30, only="test-slow")
    shows = [
        "E *Failed: Timeout (>4.0s) from pytest-timeout.",
        "E *launch of 'toy' ended before its limit of 300 s; see *01-toy-*",
    ]
    project.run("--aorta-results=kept", *SUMMARY, shows=shows, failed=1, passed=1)
    [slow] = project.path.glob("kept/test-toy-py-test-slow-*/01-toy-*")
    page = project.read("out/report.html")
    assert f"see {slow}" in page
    assert "1 failed launch" in page


def test_time_limit_of_pytest_timeout_ends_the_wait_for_devices(project):
    folder = project.path / "leases"
    project.write("test_toy.py", "def test_one(workload): workload.run('toy')\n")
    with lease(("cpu-0",), 1, exclusive=True, wait_s=60, folder=folder, owner="another session"):
        project.run(
            "--timeout=2", "--timeout-method=signal", failed=1, shows="E *Failed: Timeout (>2.0s) from pytest-timeout."
        )
        assert [holder.owner.partition(" (pid")[0] for holder in holders(folder)] == ["another session"]
    project.run("--timeout=60", passed=1)


# --- pytest-rerunfailures ---------------------------------------------------------------------------------------------


def test_only_failed_launches_are_retried_on_request(many):
    many.let_in("rerunfailures")
    many.plant(only="test-one-4", by_launch={"1": {"raises": 1}})
    many.write("test_worse.py", "def test_worse(workload): workload.check(workload.run('toy'))" + TIMED.format(100))
    result = many.run_apart("--reruns=1", "--only-rerun=LaunchError", "--aorta-fail-on=missing")
    # A missing baseline is not a failed launch.
    assert result.parseoutcomes() == {"passed": COUNT, "failed": 1, "rerun": 1}


# --- pytest-xdist -----------------------------------------------------------------------------------------------------


NIGHTLY = [pytest.param(mode, marks=pytest.mark.extended) for mode in ("loadscope", "worksteal")]


@pytest.mark.parametrize("mode", ["loadgroup", *NIGHTLY])
def test_each_mode_of_distribution_finds_the_same_baselines(many, mode):
    text = many.read("test_toy.py")
    many.write("test_toy.py", text.replace("def test_one", "@pytest.mark.xdist_group('gpu')\ndef test_one"))
    result = many.run_apart("-n2", f"--dist={mode}", *SUMMARY, passed=COUNT)
    assert {case["test"].partition("[")[0] for case in cases(many)} == {"test_toy.py::test_one"}
    assert {outcome for _, _, outcome in verdicts(many)} == {"pass"}
    result.stdout.no_fnmatch_line("*delete the file*")


def test_run_that_stops_at_the_first_failure_records_what_passed(project):
    project.test_file(
        "def test_a(workload): workload.check(workload.run('toy'))\n"
        "def test_b(workload): assert False\n"
        "def test_c(workload): workload.check(workload.run('toy'))\n"
    )
    project.run_apart("-n1", "-x", "--update-baselines", "--aorta-launches=2", passed=1, failed=1)
    [file] = project.baseline_files()
    assert read_baseline_file(file).test == "test_toy.py::test_a"


# The worker whose test passes ends last.
FAILS_ON_ONE_WORKER = """
import pathlib, time

def test_one(workload, worker_id):
    workload.check(workload.run("toy"))
    failed = pathlib.Path("failed")
    if worker_id == "gw0":
        failed.touch()
        raise ValueError
    while not failed.exists():
        time.sleep(0.1)
    time.sleep(4)
"""


def test_baseline_is_not_recorded_if_the_test_failed_on_another_worker(project):
    # No time is compared, so both workers may hold devices at once.
    project.write("test_toy.py", FAILS_ON_ONE_WORKER)
    project.run_apart("-n2", "--dist=each", "--update-baselines", "--aorta-launches=2", passed=1, failed=1)
    assert project.baseline_files() == []


# --- coverage and other tracers ---------------------------------------------------------------------------------------


TRACED = {"facts": {"python_tracer": "coverage.CTracer"}}


def test_times_of_traced_ranks_are_not_applicable_and_hashes_are_compared(many):
    many.plant(**TRACED, step_ms=30.0)
    many.run(*SUMMARY, passed=COUNT)
    assert {(metric, outcome) for _, metric, outcome in verdicts(many)} == {
        ("step_time_p50", "not applicable"),
        ("weight_hash", "pass"),
    }
    many.run("--aorta-fail-on=not-applicable", failed=COUNT)


def test_traced_ranks_are_not_recorded(project):
    project.one_test("workload.check(workload.run('toy'))")
    project.plant(**TRACED)
    project.run(
        "--update-baselines",
        "--aorta-results=kept",
        failed=1,
        shows="E *BaselineError: *::test_one::toy: not recorded: ranks ran under coverage.CTracer, which slows *",
    )
    # Without the tracer, nine more launches would be recorded.
    assert len(list(project.path.glob("kept/*/*"))) == 1
    assert project.baseline_files() == []


# --- editors, and pytest's own options --------------------------------------------------------------------------------

EDITOR = """
import json, sys

def pytest_collection_finish(session):
    with open("found.json", "w") as file:
        json.dump([item.nodeid for item in session.items], file)

def pytest_sessionfinish(session):
    with open("imported.json", "w") as file:
        json.dump(sorted(sys.modules), file)
"""


def node_ids() -> list[str]:
    return [f"test_toy.py::test_one[{steps}]" for steps in (4, 5, 6, 7)]


def assert_nothing_was_launched(project) -> None:
    assert not (project.path / "leases").exists()
    assert not (project.path / "kept").exists()


@pytest.fixture
def declared(project):
    """The project with four tests that never ran."""
    project.test_file(MANY_TESTS)
    return project


def test_collection_for_an_editor_prints_node_ids_only_and_imports_no_torch(declared):
    declared.write("editor.py", EDITOR)
    # The fake launcher would import the packages that a launch needs.
    declared.write("conftest.py", "")
    options = ("--collect-only", "-q", f"--rootdir={declared.path}", "-p", "editor", "--aorta-results=kept")
    result = declared.run_apart(*options)
    assert result.ret == 0
    assert result.outlines[:-2] == node_ids()
    assert result.errlines == []
    assert json.loads(declared.read("found.json")) == node_ids()
    imported = json.loads(declared.read("imported.json"))
    assert {"torch", "numpy", "scipy", "jsonschema"} & set(imported) == set()
    assert_nothing_was_launched(declared)


SHOWING = ["--fixtures", "--fixtures-per-test", "--markers", "--cache-show", "--setup-plan", "--help"]


def test_suite_for_more_gpus_than_the_editors_machine_has_is_shown(declared):
    declared.ini("aorta_gpus = 8", "aorta_ab = absent")
    for options in (["--collect-only", "-q"], *([option] for option in SHOWING)):
        # Without the plugin cacheprovider there is no --cache-show.
        result = declared.pytester.runpytest_inprocess(*options)
        assert (result.ret, result.errlines) == (0, [])
        assert_nothing_was_launched(declared)
    declared.refused("--setup-only", shows="*")


def test_option_that_runs_no_test_keeps_the_reports_of_the_last_run(many):
    many.ini("aorta_report = out/report.html", "aorta_markdown = out/report.md")
    many.run(passed=COUNT)
    files = [many.path / "out" / name for name in ("report.html", "report.md")]
    before = [path.read_bytes() for path in files]
    many.write("test_toy.py", "def test_other(workload): workload.run('toy')\n")
    for option in ("--collect-only", "--setup-only", *SHOWING):
        result = many.pytester.runpytest_inprocess(option)
        assert result.ret == 0
        assert [path.read_bytes() for path in files] == before
        result.stdout.no_fnmatch_line("*delete the file*")


@pytest.mark.parametrize(
    "options",
    [["-p", "no:terminal"], ["-p", "no:terminal", "--collect-only"], ["-p", "no:capture"], ["--import-mode=importlib"]],
)
def test_run_without_a_part_of_pytest_passes_or_fails_as_with_it(many, options):
    assert many.run(*options).ret == 0
    if "--collect-only" not in options:
        many.plant(only="test-one-5", weight_hash="1" * 16)
        assert many.run(*options).ret == pytest.ExitCode.TESTS_FAILED


def test_two_runs_in_one_process_are_independent(many):
    many.write(
        "twice.py",
        "import pytest\n"
        "first = pytest.main(['-q', '-p', 'no:cacheprovider'])\n"
        "open('fault.json', 'w').write('{\"weight_hash\": \"1111111111111111\"}')\n"
        "second = pytest.main(['-q', '-p', 'no:cacheprovider', '-W', 'ignore::pytest.PytestAssertRewriteWarning'])\n"
        "print('codes', int(first), int(second))\n",
    )
    result = many.pytester.runpython(many.path / "twice.py")
    result.stdout.fnmatch_lines(
        ["aorta: 4 tests OK*", "4 passed in *", "aorta: 4 of 4 tests failed*", "4 failed in *", "codes 0 1"]
    )


def test_debugger_opens_in_the_frame_of_the_test(many):
    many.plant(only="test-one-5", raises=1)
    command = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--pdb")
    result = many.pytester.run(*command, stdin=b"p steps\nc\n", timeout=150)
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["*(Pdb) 5"])
