from __future__ import annotations

import pytest

SUITE = """
import pytest

@pytest.mark.overlap
@pytest.mark.world(size=2)
@pytest.mark.launch_timeout(60)
@pytest.mark.tolerance(step_time_p50="5%")
def test_speed(workload):
    workload.check(workload.run("fsdp"))

def test_world(distributed_world):
    pass

def test_other():
    pass
"""


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(test_suite=SUITE)
    pytester.makeini("[pytest]\naddopts = --strict-markers --strict-config\naorta_baselines = stored\n")
    return pytester


def test_each_test_with_a_launch_fails_with_one_line_while_the_plugin_is_disabled(suite):
    result = suite.runpytest_subprocess("-p", "no:aorta", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, errors=2)
    result.stdout.fnmatch_lines(
        [
            "*ERROR at setup of test_speed*",
            "workload: the plugin aorta is disabled (-p no:aorta)",
            "*ERROR at setup of test_world*",
            "distributed_world: the plugin aorta is disabled (-p no:aorta)",
        ],
        consecutive=True,
    )
    result.stdout.no_fnmatch_line("*available fixtures*")


def test_plugin_that_is_not_disabled_provides_the_fixtures_itself(suite):
    result = suite.runpytest_subprocess("--fixtures-per-test", "-p", "no:cacheprovider")
    result.stdout.fnmatch_lines(["*pytest_aorta/plugin/hooks.py:*"])
    result.stdout.no_fnmatch_line("*plugin/disabled.py*")
