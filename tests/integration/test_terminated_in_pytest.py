"""Runs that SIGTERM ends, as a scheduler does at its time limit; recorded baselines are kept."""

import pytest

from tests.unit.builders import each_of

TESTS = """
import os, signal, time

def test_another():
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

def test_first(workload):
    workload.check(workload.run("toy"))

def test_second(workload):
    workload.check(workload.run("toy", steps=5))
    os.kill({victim}, signal.SIGTERM)
    time.sleep(6)

def test_third(workload):
    workload.check(workload.run("toy", steps=6))
"""


@each_of("victim, options", {"one process": ("os.getpid()", ()), "xdist": ("os.getppid()", ("-n1",))})
def test_baselines_of_tests_that_passed_are_written(project, victim, options):
    project.pytester.makepyfile(test_own=TESTS.format(victim=victim))
    result = project.pytester.runpytest_subprocess("--update-baselines", *options, timeout=150)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*Terminated*"])
    result.stdout.no_fnmatch_line("FAILED *")
    [baseline] = project.pytester.path.glob("baselines/**/*.json")
    assert "test-first" in baseline.name
