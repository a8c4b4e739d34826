import json
import os

import pytest

pytest.importorskip("xdist")

TIMED = 'pytestmark = pytest.mark.tolerance(step_time_p50="100%")'
TWO_FILES = {
    "test_a.py": "def test_a(workload): workload.check(workload.run('toy'))",
    "test_b.py": "def test_b(workload): workload.check(workload.run('toy', steps=5))",
}
# Each process prints its pid when it writes a baseline.
SPY = """
import os
import pytest_aorta.session.baselines as updates

_write = updates.write_baseline

def write_baseline(folder, baseline):
    with open("writers.txt", "a") as file:
        file.write(f"{os.getpid()}\\n")
    return _write(folder, baseline)

updates.write_baseline = write_baseline
"""


@pytest.fixture
def spread(project):
    for name, source in TWO_FILES.items():
        project.write(name, f"import pytest\n{TIMED}\n{source}\n")
    return project


def run(project, *arguments: str) -> pytest.RunResult:
    return project.pytester.runpytest_subprocess("-n2", "--dist=loadfile", *arguments, timeout=150)


def test_verdicts_of_all_workers_are_in_one_summary_and_baselines_are_written_once(spread):
    spread.write("conftest.py", spread.read("conftest.py") + SPY)
    update = run(spread, "--update-baselines")
    update.assert_outcomes(passed=2)
    writers = spread.read("writers.txt").split()
    assert len(writers) == len(spread.baseline_files()) == 2
    assert len(set(writers)) == 1
    assert str(os.getpid()) not in writers
    spread.plant(slowdown=3, only="test-b")
    result = run(spread)
    result.assert_outcomes(passed=1, failed=1)
    text = result.stdout.str()
    assert text.count("aorta: 1 of 2 tests failed") == 1
    assert "aorta: 1 of 2 tests failed, 1 regression, 3 metrics unchanged, 4 launches in " in text
    result.stdout.fnmatch_lines(["FAILED test_b.py::test_b - Regression: step_time_p50 +200% *"])


def test_orphans_are_reported_once_by_the_controller(spread):
    path = spread.path / "test_a.py"
    path.write_text(TWO_FILES["test_a.py"].replace("test_a(", "test_other("))
    spread.run("--update-baselines", "--aorta-launches=2", passed=2)
    path.write_text(TWO_FILES["test_a.py"])
    result = run(spread, "--aorta-fail-on=none", f"--junitxml={spread.path}/report.xml")
    assert result.stdout.str().count("test_a.py::test_other does not exist; delete the file") == 1
    assert "aorta.step_time_p50" in spread.read("report.xml")


def test_results_of_a_worker_have_the_command_line_of_the_run(spread):
    run(spread, "--aorta-results=kept", "--aorta-fail-on=none").assert_outcomes(passed=2)
    results = [json.loads(path.read_text()) for path in (spread.path / "kept").glob("*/*/result.json")]
    assert len(results) == 2
    for result in results:
        words = result["provenance"]["command"]
        assert words[0] == "pytest"
        assert words[-4:] == ["-n2", "--dist=loadfile", "--aorta-results=kept", "--aorta-fail-on=none"]
