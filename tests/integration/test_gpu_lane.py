"""The order of the tests of ``./dev gpu``, and how a call goes on after another."""

import os
import re
import time
from pathlib import Path

import pytest

from tests.gpu_lane import IS_LEFT, LEFT

TESTS = """
import time, pytest

def test_long():
    time.sleep(0.4)

@pytest.mark.world(size=1)
@pytest.mark.parametrize("value", ["a/b"])
def test_short(value): ...

def test_broken():
    assert BROKEN

def test_absent():
    pytest.skip("needs 4 GPUs")
"""


BESIDE = """
import os, time, pytest
from pathlib import Path

@pytest.mark.timed
@pytest.mark.parametrize("number", [0, 1])
def test_timed(number):
    os.close(os.open("alone", os.O_CREAT | os.O_EXCL))
    time.sleep(0.3)
    os.unlink("alone")

@pytest.mark.parametrize("number", range(4))  # each worker begins with two
def test_shared(number):
    Path(f"shared-{number}").write_text(os.environ["AORTA_LEASE_DIR"])
    end_s = time.monotonic() + 20
    while not Path(f"shared-{number ^ 2}").exists():
        assert time.monotonic() < end_s
        time.sleep(0.01)
    assert not Path("alone").exists()
"""
LONGER = '<testsuites><testsuite><testcase classname="test_lane" name="test_long" time="500"/></testsuite></testsuites>'


@pytest.fixture
def folder(pytester):
    return pytester.mkdir("lane")


@pytest.fixture
def lane(pytester, folder, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))

    def run(broken=False, left_s=None, *options, tests=TESTS):
        pytester.makepyfile(test_lane=f"BROKEN = {not broken}\n{tests}")
        name = folder / f"{time.time_ns()}.xml"
        until = [] if left_s is None else [f"--lane-until={time.time() + left_s}"]
        arguments = [
            "-p",
            "tests.gpu_lane",
            f"--lane={folder}",
            f"--junitxml={name}",
            *until,
            "-p",
            "no:aorta",
            *options,
        ]
        return pytester.runpytest_subprocess("-v", *arguments)

    return run


def test_tests_run_beside_each_other_with_leases_of_their_own_except_timed_ones(pytester, lane):
    found = lane(False, None, "-n2", "--dist=load", "--maxschedchunk=1", tests=BESIDE)
    found.assert_outcomes(passed=6)
    folders = {pytester.path.joinpath(f"shared-{number}").read_text() for number in range(4)}
    assert len(folders) == 2
    assert not any(map(os.path.exists, folders))


def order(result):
    return re.findall(r"^test_lane.py::(\w+)", result.stdout.str(), re.MULTILINE)


def test_failures_come_first_and_then_tests_of_few_gpus_and_short_ones(lane):
    assert order(lane(broken=True)) == ["test_short", "test_long", "test_broken", "test_absent"]
    again = order(lane())
    assert (again[0], again[-1]) == ("test_broken", "test_long")


def test_call_with_a_time_limit_leaves_tests_to_the_next_which_goes_on(lane, folder):
    first = lane(False, 5.0)  # a test that has never run may take longer
    first.assert_outcomes(skipped=4)
    assert first.ret == IS_LEFT
    first.stdout.fnmatch_lines([f"4 tests are {LEFT}: run the same command again"])
    lane(True, 60.0, "-k", "not long").assert_outcomes(passed=1, failed=1, skipped=1, deselected=1)
    # What passed does not run again before each test has a result.
    rest = lane(False, 60.0)
    rest.assert_outcomes(passed=2, skipped=1, deselected=1)
    assert (order(rest)[0], rest.ret) == ("test_broken", 0)
    # Then all run, as far as the time suffices by the last durations.
    (folder / "9.xml").write_text(LONGER)
    found = lane(False, 90.0, "-n2", "--dist=load", "--maxschedchunk=1")
    found.assert_outcomes(passed=2, skipped=2)
    assert found.ret == IS_LEFT
