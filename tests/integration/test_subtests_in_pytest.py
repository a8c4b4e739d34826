"""Tests with subtests: the fixture of pytest 9, or of pytest-subtests with an older pytest, and those of unittest."""

import xml.etree.ElementTree as ElementTree

import pytest

from pytest_aorta.verdict.baseline import read_baseline_file
from tests.integration.conftest import ALONE_AND_NIGHTLY_ON_XDIST

# The first check is that of a subtest, and two more subtests end after it.
THREE_SUBTESTS = """
def test_one(workload, subtests):
    result = workload.run("toy")
    with subtests.test("hash"):
        workload.check(result)
    for number in range(2):
        with subtests.test(number=number):
            pass
"""

TWO_CHECKS = """
def test_one(workload, subtests):
    result = workload.run("toy")
    for label in ("a", "b"):
        with subtests.test(label=label):
            assert label != "wrong"
            workload.check(result, label=label)
"""

UNITTEST = """
import unittest
import pytest

class TestOne(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def keep(self, workload):
        self.workload = workload

    def test_one(self):
        result = self.workload.run("toy")
        for label in ("a", "b"):
            with self.subTest(label=label):
                assert label != "wrong"
                self.workload.check(result, label=label)
"""

# The first attempt measures other weights than the second and fails after its subtest has passed.
FAILS_ONCE = """
import pathlib

def test_one(workload, subtests):
    is_first = not pathlib.Path("second").exists()
    pathlib.Path("second").touch()
    result = workload.run("toy", weight_hash=("1" if is_first else "2") * 16)
    with subtests.test("hash"):
        workload.check(result)
    assert not is_first
"""

EACH_KIND = pytest.mark.parametrize(
    ("source", "workers"),
    [(TWO_CHECKS, []), (TWO_CHECKS, ["-n1"]), (UNITTEST, [])],
    ids=["fixture", "fixture with xdist", "unittest"],
)
REPORT = "--aorta-report=out/report.html"
UPDATE = ("--update-baselines", "--aorta-launches=2")


@ALONE_AND_NIGHTLY_ON_XDIST
def test_launches_of_a_test_with_subtests_are_stored_once(project, workers):
    project.test_file(THREE_SUBTESTS)
    result = project.run(*UPDATE, *workers)
    assert result.parseoutcomes()["passed"] == 1
    result.stdout.fnmatch_lines(["aorta: 1 *, 1 baseline measured*"])
    [file] = project.baseline_files()
    baseline = read_baseline_file(file)
    assert (len(baseline.launches), baseline.revision) == (2, 1)


@EACH_KIND
def test_regressions_in_subtests_fail_their_test_once(project, workers, source):
    project.test_file(source)
    assert project.run(*UPDATE).ret == 0
    project.plant(weight_hash="1" * 16)
    result = project.run(REPORT, "--aorta-markdown=aorta.md", "--junitxml=junit.xml", *workers)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["aorta: 1 * 2 regressions, *"])
    found = project.summary()
    assert found["tests"] == {"failed": 1}
    assert found["verdicts"]["regression"] == 2
    comment = project.read("aorta.md")
    assert [comment.count(f"baseline  {file}") for file in project.baseline_files()] == [1, 1]
    cases = list(ElementTree.parse(project.path / "junit.xml").iter("testcase"))
    names = [entry.get("name") for case in cases for entry in case.iter("property")]
    assert names.count("aorta.a.weight_hash.verdict") == 1


@EACH_KIND
def test_baselines_of_a_test_with_a_failed_subtest_are_not_written(project, workers, source):
    project.test_file(source.replace('"b"', '"wrong"'))
    result = project.run(*UPDATE, REPORT, *workers)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["not recorded, because the test failed: *::a"])
    assert project.baseline_files() == []
    assert project.summary()["tests"] == {"failed": 1}


def test_attempt_that_failed_after_a_subtest_writes_nothing(project):
    project.let_in("rerunfailures")
    project.test_file(FAILS_ONCE)
    result = project.run("--reruns=1", *UPDATE, REPORT)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["aorta: 1 test*, 1 attempt retried*"])
    assert project.summary()["tests"] == {"passed": 1}
    [file] = project.baseline_files()
    hashes = {one for launch in read_baseline_file(file).launches for one in launch.facts.weight_hashes.values()}
    assert hashes == {"2" * 16}


def test_skipped_or_expected_failures_of_subtests_do_not_fail_the_test(project):
    project.test_file(
        "import pytest\n"
        "def test_one(workload, subtests):\n"
        "    for name in ('skip', 'xfail'):\n"
        "        with subtests.test(name=name):\n"
        "            getattr(pytest, name)('reason')\n"
        "    workload.check(workload.run('toy'))\n"
    )
    assert project.run(*UPDATE, REPORT).ret == 0
    assert len(project.baseline_files()) == 1
    assert project.summary()["tests"] == {"passed": 1}


def test_undecided_test_with_a_failed_subtest_is_failed_and_not_inconclusive(learned):
    checked = "def test_one(workload, subtests):\n    workload.check(workload.run('toy'))\n"
    learned.plant(slowdown=[1.06, 1.06, 1])
    learned.test_file(checked)
    assert learned.run().parseoutcomes() == {"inconclusive": 1}
    learned.test_file(checked + "    with subtests.test('fails'): raise ValueError\n")
    result = learned.run("-v")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "INCONCLUSIVE" not in result.stdout.str()
