"""Markers that hooks, fixtures and tests add."""

import pytest

from tests.integration.conftest import FAKE_LAUNCHER
from tests.unit.builders import each_of

SHAPE = "(distributed_world.size, distributed_world.timeout_s)"
ADDED_BY_HOOK = """
def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.{mark})
"""
ADDED_BY_FIXTURE = """
@pytest.fixture(autouse=True)
def added(request):
    request.node.add_marker(pytest.mark.{mark})
"""
ADDED = each_of("adding", {"hook": ADDED_BY_HOOK, "fixture": ADDED_BY_FIXTURE})


def add(project, adding: str, mark: str) -> None:
    project.write("conftest.py", FAKE_LAUNCHER + adding.format(mark=mark))


def failing(project, message: str, **outcomes: int) -> None:
    """Run one test, which has to fail with this message without a launch."""
    project.run("--aorta-results=kept", shows=f"E  *SpecError: {message}", **outcomes)
    assert not list((project.path / "kept").glob("*/*"))


@ADDED
@pytest.mark.parametrize(("mark", "shape"), [("world(size=3)", (3, 300.0)), ("launch_timeout(7)", (2, 7.0))])
def test_added_marker_shapes_the_world(project, adding, mark, shape):
    add(project, adding, mark)
    project.one_test(f"assert {SHAPE} == {shape}")
    project.run(passed=1)


@ADDED
def test_added_tolerance_takes_precedence_over_that_of_the_module(recorded, adding):
    recorded.plant(slowdown=3)
    recorded.run("-k", "speed", failed=1)
    add(recorded, adding, "tolerance(step_time_p50='900%')")
    recorded.run("-k", "speed", passed=1)


@ADDED
def test_wrong_marker_that_is_added_fails_the_setup(project, adding):
    add(project, adding, "tolerance(step_time='5%')")
    project.one_test("workload.run('toy')")
    failing(project, "marker tolerance: metrics [[]'step_time'[]] are unknown (did you mean *", errors=1)


def test_wrong_marker_of_a_test_that_requests_the_fixture_by_name_fails_the_test(project):
    add(project, ADDED_BY_FIXTURE, "tolerance(step_time='5%')")
    project.test_file("def test_one(request): request.getfixturevalue('workload')\n")
    failing(project, "marker tolerance: metrics [[]'step_time'[]] are unknown (did you mean *", failed=1)


RUN, LAUNCH = "workload.run('toy')", "distributed_world.run('toy')"
TOO_LATE = [
    ("world(size=3)", "world: added or removed after the fixture distributed_world was set up, so *", RUN),
    ("world(size=3)", "world: added or removed *", LAUNCH),
    ("tolerance(step_time_p50='7%')", "tolerance: added or removed *", RUN),
    ("launch_timeout(7)", "launch_timeout: added or removed *", RUN),
    ("overlap", "overlap: added or removed *", RUN),
    ("tolerance(bogus='7%')", "tolerance: metrics [[]'bogus'[]] are unknown*", RUN),
]


def test_marker_that_is_added_too_late_fails_the_next_launch(project):
    added = "request.node.add_marker(pytest.mark.{}); {}"
    project.tests_of([added.format(mark, call) for mark, _, call in TOO_LATE])
    lines = [f"E  *SpecError: marker {message}" for _, message, _ in TOO_LATE]
    project.run("--aorta-results=kept", shows=lines, failed=len(TOO_LATE))
    assert not list((project.path / "kept").glob("*/*"))


@pytest.mark.parametrize("call", ["check(result)", "compare(result, result, metrics=['weight_hash'])"])
def test_tolerance_that_is_added_after_the_launch_fails_the_next_comparison(project, call):
    project.test_file(
        "import pytest\n"
        "def test_one(workload, request):\n"
        "    result = workload.run('toy')\n"
        "    request.node.add_marker(pytest.mark.tolerance(step_time_p50='7%'))\n"
        f"    workload.{call}\n"
    )
    project.run(shows="E  *SpecError: marker tolerance: added or removed after the fixture *", failed=1)


def test_markers_of_other_plugins_can_be_added_at_any_time(project):
    project.test_file(
        "import pytest\n"
        "def test_one(workload, request):\n"
        "    request.node.add_marker(pytest.mark.xfail(reason='later'))\n"
        "    workload.run('toy')\n"
    )
    assert project.run().ret == 0
