"""Tests whose files are outside of pytest's root folder, as with ``pytest -c ci/pytest.ini tests``."""

import pytest

from pytest_aorta.verdict.baseline import read_baseline_file
from tests.integration.conftest import FAKE_LAUNCHER, TIMED

ONE = f"def test_one(workload): workload.check(workload.run('toy')){TIMED.format(100)}"


@pytest.fixture
def outside(project, tmp_path):
    """The project with two tests of one name in two files, in a folder outside of the project."""
    project.write("fake_launcher.py", FAKE_LAUNCHER)
    project.write("conftest.py", "")
    project.pytester.syspathinsert()
    for name in ("test_a.py", "test_b.py"):
        (tmp_path / name).write_text(ONE)
    return project


def run(project, *arguments: object) -> pytest.RunResult:
    return project.run("-p", "fake_launcher", "-c", str(project.path / "tox.ini"), *map(str, arguments))


def cases(project) -> set[str]:
    return {read_baseline_file(path).case.rpartition("/")[2] for path in project.baseline_files()}


def test_tests_of_one_name_in_two_files_have_baselines_of_their_own(outside, tmp_path):
    files = (tmp_path / "test_a.py", tmp_path / "test_b.py")
    result = run(outside, *files, "--update-baselines", "--aorta-launches=2")
    result.assert_outcomes(passed=2)
    assert cases(outside) == {"test_a.py::test_one::toy", "test_b.py::test_one::toy"}
    result.stdout.no_fnmatch_line("*not recorded*")
    result.stdout.no_fnmatch_line("*delete the file*")


@pytest.mark.parametrize("given", [".", "test_a.py", "test_a.py::test_one"])
def test_baseline_is_found_however_the_test_is_named_on_the_command_line(outside, tmp_path, given):
    run(outside, tmp_path, "--update-baselines", "--aorta-launches=2").assert_outcomes(passed=2)
    result = run(outside, tmp_path / given)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["aorta: * unchanged*"])
    result.stdout.no_fnmatch_line("*delete the file*")


def test_commands_of_a_failure_name_the_test_as_seen_from_the_starting_folder(outside, monkeypatch):
    outside.write("suite/test_a.py", ONE)
    monkeypatch.chdir(outside.path / "suite")
    result = run(outside, "test_a.py", "--aorta-markdown=found.md")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E *accept    pytest test_a.py::test_one * --update-baselines"])
    assert "pytest test_a.py::test_one -c " in outside.read("found.md")


def test_checkout_that_is_named_through_a_link_has_the_same_baselines(outside, tmp_path):
    outside.write("suite/test_a.py", ONE)
    run(outside, outside.path / "suite", "--update-baselines", "--aorta-launches=2").assert_outcomes(passed=1)
    (tmp_path / "link").symlink_to(outside.path)
    run(outside, tmp_path / "link/suite").assert_outcomes(passed=1)
