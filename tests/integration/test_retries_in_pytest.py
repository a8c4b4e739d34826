"""Tests that pytest-rerunfailures runs again, and tests that failed before they launched anything."""

import functools
import re
import xml.etree.ElementTree as ElementTree

import pytest

from pytest_aorta.verdict.baseline import read_baseline_file
from tests.integration.conftest import ALONE_AND_NIGHTLY_ON_XDIST
from tests.unit.builders import each_of

ATTEMPT = "aorta.attempt"
REPORTS = ("--aorta-report=out/report.html", "--junitxml=junit.xml")


@pytest.fixture
def reported(project, monkeypatch):
    """The project, with all reports of each run."""
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(project.path / "step.md"))
    project.run = functools.partial(project.run, *REPORTS)
    return project


@pytest.fixture
def retried(reported):
    """The project, with all reports of each run, and with pytest-rerunfailures."""
    reported.let_in("rerunfailures")
    return reported


def page(project) -> str:
    return project.read("out/report.html")


def step_summary(project) -> str:
    return project.read("step.md")


def attempts(project, name: str) -> list[str]:
    """Return the attempts in JUnit's elements of a test, in order."""
    cases = ElementTree.parse(project.path / "junit.xml").iter("testcase")
    found = [entry for case in cases if case.get("name") == name for entry in case.iter("property")]
    return [entry.get("value") for entry in found if entry.get("name") == ATTEMPT]


def wrong_weights_in_launch(*numbers: int) -> dict:
    """Return a fault of these launches of test_speed; the first launch is that of the first attempt."""
    return {"only": "test-speed", "by_launch": {str(number): {"weight_hash": "1" * 16} for number in numbers}}


@pytest.fixture
def compared(reported, recordings, monkeypatch):
    """The project with its two tests and their baselines."""
    reported.test_file()
    reported.record(recordings["recorded"])
    reported.let_in("rerunfailures")
    (reported.path / "step.md").unlink(missing_ok=True)
    return reported


@each_of("workers", {"one process": [], "xdist": ["-n1"]})
def test_test_that_passes_in_its_second_attempt_counts_once_and_both_are_labelled(compared, workers):
    compared.plant(**wrong_weights_in_launch(1))
    result = compared.run("--reruns=2", *workers)
    assert result.parseoutcomes() == {"passed": 2, "rerun": 1}
    rows = [line for line in result.outlines if line.startswith("test_toy::")]
    assert [row.split()[:5] for row in rows] == [
        ["test_toy::test_speed", "(attempt", "1):", "Regression:", "weight_hash"]
    ]
    result.stdout.fnmatch_lines(["aorta: 2 tests OK, 5 metrics unchanged, 1 attempt retried, 3 launches*"])
    found = compared.summary()
    assert (found["tests"], found["verdicts"]) == ({"passed": 2}, {"pass": 5})
    rows = {(entry["test"], entry["outcome"]) for entry in found["entries"]}
    speed, weights = "test_toy.py::test_speed", "test_toy.py::test_weights"
    assert rows == {(f"{speed} (attempt 1)", "rerun"), (f"{speed} (attempt 2)", "passed"), (weights, "passed")}
    assert page(compared).count("(attempt 1)") == page(compared).count("(attempt 2)") > 0
    text = step_summary(compared)
    assert text.partition("\n")[0].endswith("pytest-aorta: 2 of 2 tests passed, 1 retried")
    assert re.search(r"test\\_toy.py::test\\_speed \\\(attempt 1\\\).*weight\\_hash", text)
    assert "attempt 2" not in text  # it has no finding
    assert attempts(compared, "test_speed") == ["1", "2"]
    assert attempts(compared, "test_weights") == ["1"]


def test_test_that_fails_in_every_attempt_is_one_failure_with_its_last_evidence(compared):
    compared.plant(**wrong_weights_in_launch(1, 2))
    result = compared.run("--reruns=1")
    assert result.parseoutcomes() == {"passed": 1, "failed": 1, "rerun": 1}
    assert (compared.summary()["tests"]) == {"passed": 1, "failed": 1}
    assert compared.summary()["verdicts"] == {"pass": 4, "regression": 1}
    text = step_summary(compared)
    assert text.startswith("## \N{CROSS MARK} pytest-aorta")
    assert re.findall(r"<summary><code>.*attempt (\d)", text) == ["2"]


FIXTURES = {
    "teardown, whose call pytest counts as passed": ("    yield\n    if failures:\n        raise failures.pop()\n", 2),
    "setup": ("    if failures:\n        raise failures.pop()\n", 1),
}


@each_of("fixture, passed", FIXTURES)
def test_attempt_that_fails_beside_its_call_is_superseded(retried, fixture, passed):
    retried.write(
        "test_toy.py",
        f"import pytest\n\nfailures = [ValueError('too early')]\n\n@pytest.fixture\ndef unready():\n{fixture}\n"
        "def test_one(unready, workload):\n    workload.check(workload.run('toy'))\n",
    )
    result = retried.run("--reruns=1", "--update-baselines")
    assert result.parseoutcomes() == {"passed": passed, "rerun": 1}
    assert retried.summary()["tests"] == {"passed": 1}
    result.stdout.fnmatch_lines(["aorta: *, 1 attempt retried*"])
    assert attempts(retried, "test_one") == ["1", "2"]
    if passed == 2:  # the page has attempts with a launch
        assert "too early" in page(retried)


# pytest-retry repeats a test inside of pytest_runtest_makereport, and reports the last attempt with the report of the
# first.
RETRY_IN_HOOK = """

@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if call.when != "call" or call.excinfo is None:
        return
    item.ihook.pytest_runtest_teardown(item=item, nextitem=pytest.Class.from_parent(item.session, name="Other"))
    report.outcome = "retried"
    item.ihook.pytest_runtest_logreport(report=report)
    item._initrequest()
    item.ihook.pytest_runtest_setup(item=item)
    again = pytest.CallInfo.from_call(lambda: item.ihook.pytest_runtest_call(item=item), when="call")
    last = pytest.TestReport.from_item_and_call(item, again)
    report.outcome, report.longrepr = last.outcome, last.longrepr


def pytest_report_teststatus(report):
    return ("retried", "R", "RETRY") if report.outcome == "retried" else None
"""


@pytest.fixture
def retried_in_hook(reported):
    """The project, with all reports of each run, and with a plugin that retries as pytest-retry does."""
    conftest = reported.path / "conftest.py"
    conftest.write_text(conftest.read_text() + RETRY_IN_HOOK)
    return reported


@ALONE_AND_NIGHTLY_ON_XDIST
def test_launches_of_an_attempt_that_was_retried_inside_of_a_hook_are_not_recorded(retried_in_hook, workers):
    retried_in_hook.test_file(
        "attempts = []\n\ndef test_one(workload):\n    workload.check(workload.run('toy'))\n"
        "    attempts.append(1)\n    assert len(attempts) == 2\n"
    )
    # Each attempt launches twice.
    hashes = {"1": "1" * 16, "2": "1" * 16, "3": "2" * 16, "4": "2" * 16}
    retried_in_hook.plant(by_launch={number: {"weight_hash": value} for number, value in hashes.items()})
    result = retried_in_hook.run("--update-baselines", "--aorta-launches=1", *workers)
    assert result.parseoutcomes() == {"passed": 1, "retried": 1}
    [file] = retried_in_hook.baseline_files()
    assert [stored.facts.weight_hashes for stored in read_baseline_file(file).launches] == [{"4": "2" * 16}]
    result.stdout.fnmatch_lines(["aorta: 1 test OK, 1 baseline measured, 1 attempt retried, 4 launches*"])
    assert retried_in_hook.summary()["tests"] == {"passed": 1}


def test_attempts_that_fail_inside_of_a_hook_are_one_failure_with_the_last_evidence(retried_in_hook, recordings):
    retried_in_hook.test_file()
    retried_in_hook.record(recordings["recorded"])
    retried_in_hook.plant(only="test-speed", weight_hash="1" * 16)
    result = retried_in_hook.run()
    assert result.parseoutcomes() == {"passed": 1, "failed": 1, "retried": 1}
    result.stdout.fnmatch_lines(["aorta: 1 of 2 tests failed, 1 regression, *, 1 attempt retried, 3 launches*"])
    assert retried_in_hook.summary()["tests"] == {"passed": 1, "failed": 1}


# --- failed before a launch -------------------------------------------------------------------------------------------

FAILING = """
import pytest

def test_unknown_workload(workload):
    workload.run("no_such_workload")

def test_wrong_key(workload):
    workload.run("toy", sizes=3)

def test_own_mistake(workload):
    raise ValueError("my own")

@pytest.fixture
def broken():
    raise ValueError("broken fixture")

def test_setup(broken, workload):
    pass

@pytest.mark.world(size=8, device="cuda")
def test_devices(workload):
    workload.run("toy")

def test_good(workload):
    workload.run("toy")

def test_of_something_else():
    raise ValueError("not a launch")
"""
FAILED = ("unknown_workload", "wrong_key", "own_mistake", "setup")


def test_tests_that_failed_before_a_launch_are_counted(reported):
    reported.write("test_toy.py", FAILING)
    result = reported.run()
    assert result.parseoutcomes() == {"passed": 1, "failed": 4, "errors": 1, "skipped": 1}
    totals = "1 test, 1 test without a comparison, 4 tests failed before a launch, 1 test skipped for lack of devices"
    result.stdout.fnmatch_lines([f"aorta: {totals[:100]}*"])
    assert reported.summary()["tests"] == {"failed": 3, "error": 1, "skipped": 1, "passed": 1}
    text, html = step_summary(reported), page(reported)
    assert text.startswith(
        f"## \N{CROSS MARK} pytest-aorta: 4 of 6 tests failed, 1 without a comparison\n\n{totals}, 1 launch"
    )
    for name in FAILED:
        assert f"<details><summary><code>test_toy.py::test_{name}</code></summary>" in text
    assert "did you mean" in text
    assert "something_else" not in text + html


def test_devices_that_had_to_be_there_are_a_failure_before_a_launch(reported):
    reported.write("test_toy.py", FAILING)
    reported.run(
        "--aorta-without-gpus=fail",
        "-k",
        "test_devices",
        errors=1,
        shows="aorta: no test launched, 1 test failed before a launch",
    )
    assert reported.summary()["tests"] == {"error": 1}


@each_of("workers", {"one process": [], "xdist": ["-n2"]})
def test_wrong_marker_is_counted_once(reported, workers):
    reported.write("test_toy.py", "import pytest\n\n@pytest.mark.world(ranks=2)\ndef test_one(workload):\n    pass\n")
    reported.run(*workers, shows="aorta: no test launched, 1 test failed before a launch", errors=1)
    assert reported.summary()["tests"] == {"error": 1}
    assert "test_toy.py::test_one" in page(reported)
    assert "<details><summary><code>test_toy.py::test_one</code></summary>" in step_summary(reported)


def test_session_without_our_tests_has_no_section(reported):
    reported.write("test_plain.py", "def test_plain():\n    raise ValueError\n")
    result = reported.run(failed=1)
    result.stdout.no_fnmatch_line("*failed before a launch*")
    assert not (reported.path / "step.md").exists()
