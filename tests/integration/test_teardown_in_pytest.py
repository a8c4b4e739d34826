"""Comparisons that run while pytest tears a test's fixtures down."""

import functools

import pytest

from pytest_aorta.verdict.baseline import read_baseline_file
from tests.integration.conftest import ALONE_AND_NIGHTLY_ON_XDIST

REPORTS = ("--aorta-report=out/report.html", "--junitxml=junit.xml")
UPDATE = ("--update-baselines", "--aorta-launches=2")


@pytest.fixture
def reported(project):
    """The project, with reports of each run."""
    project.run = functools.partial(project.run, *REPORTS)
    return project


# The fixture checks the result of the test's launch while pytest tears it down.
CHECKS_IN_TEARDOWN = """
import pytest

@pytest.fixture
def checked(workload):
    results = []
    yield results
    workload.check(results[0])

def test_one(workload, checked):
    checked.append(workload.run("toy"))
"""


@ALONE_AND_NIGHTLY_ON_XDIST
def test_comparison_in_the_teardown_of_a_fixture_is_recorded_and_counted(reported, workers):
    reported.test_file(CHECKS_IN_TEARDOWN)
    result = reported.run(*UPDATE, *workers)
    assert result.parseoutcomes() == {"passed": 1}
    result.stdout.fnmatch_lines(["aorta: 1 test OK, 1 baseline measured, 2 launches*"])
    [file] = reported.baseline_files()
    assert len(read_baseline_file(file).launches) == 2
    reported.run(*workers, shows="aorta: 1 test OK, 2 metrics unchanged*")
    assert (reported.summary()["tests"], reported.summary()["verdicts"]) == ({"passed": 1}, {"pass": 2})
    assert 'name="aorta.weight_hash.verdict" value="pass"' in reported.read("junit.xml")


def test_regression_in_the_teardown_of_a_fixture_fails_the_test_once(reported):
    reported.test_file(CHECKS_IN_TEARDOWN)
    assert reported.run(*UPDATE).ret == 0
    reported.plant(weight_hash="1" * 16)
    reported.run(shows="aorta: 1 of 1 test failed, 1 regression, 1 metric unchanged*", passed=1, errors=1)
    assert (reported.summary()["tests"], reported.summary()["verdicts"]) == ({"error": 1}, {"regression": 1, "pass": 1})


def test_baselines_of_a_teardown_that_fails_afterwards_are_not_written(reported):
    reported.test_file(CHECKS_IN_TEARDOWN.replace("(results[0])", "(results[0])\n    raise ValueError('too late')"))
    reported.run(*UPDATE, shows="not recorded, because the test failed: *", passed=1, errors=1)
    assert reported.baseline_files() == []
    assert "ValueError: too late" in reported.read("out/report.html")


def test_skipped_test_does_not_pass_by_a_comparison_in_the_teardown(reported):
    reported.test_file(CHECKS_IN_TEARDOWN + "    pytest.skip('reason')\n")
    result = reported.run(*UPDATE)
    assert result.parseoutcomes() == {"skipped": 1}
    assert reported.baseline_files() == []
