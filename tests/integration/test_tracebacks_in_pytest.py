"""Tracebacks of errors that pytest shows while this plugin's hooks run around a test."""

import pytest

PLACES = """
import pytest

@pytest.fixture
def broken():
    raise ValueError("in the setup")

@pytest.fixture
def torn():
    yield
    raise ValueError("in the teardown")

def test_setup(broken): pass
def test_call(): raise ValueError("in the call")
def test_teardown(torn): pass
"""


def test_tracebacks_of_other_tests_contain_no_frame_of_the_plugin(project):
    project.write("test_plain.py", PLACES)
    result = project.run(failed=1, errors=2, passed=1)
    text = result.stdout.str()
    for place in ("setup", "call", "teardown"):
        assert f"ValueError: in the {place}" in text
    assert "hooks.py" not in text


@pytest.mark.parametrize("style", ["long", "short"])
def test_error_of_a_fixture_of_the_plugin_shows_no_frame_of_pytest(project, style):
    project.write(
        "test_toy.py",
        "import pytest\n@pytest.mark.tolerance(collectives='bogus')\ndef test_one(workload): pass\n",
    )
    text = project.run(f"--tb={style}", shows="E*SpecError: tolerance of collectives: *", errors=1).stdout.str()
    assert "_pytest/" not in text
    assert "pluggy/" not in text


@pytest.mark.parametrize("call", ["workload.run('toy')", "workload.check(workload.run('toy'))"])
def test_frames_of_the_plugin_are_shown_under_full_trace_only(recorded, call):
    recorded.one_test(call)
    recorded.plant(raises=1)
    short = recorded.run().stdout.str()
    assert "pytest_aorta.LaunchError: " in short
    assert "session/launcher.py" not in short
    full = recorded.run("--full-trace").stdout.str()
    assert "session/launcher.py" in full
