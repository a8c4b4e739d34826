"""The hooks that other plugins implement, by the example in the docs."""

import json
import re
from pathlib import Path

import pytest

from tests.integration.conftest import FAKE_LAUNCHER
from tests.unit.builders import each_of

REFERENCE = (Path(__file__).parents[2] / "docs/reference.md").read_text(encoding="utf-8")
EXAMPLE = re.search(r"### Hooks\n.*?```python\n(.*?)```", REFERENCE, re.DOTALL)[1]


@each_of("workers", {"one process": [], "xdist": ["-n1"]})
def test_hooks_receive_each_launch_and_each_comparison_once(recorded, workers):
    recorded.write("conftest.py", FAKE_LAUNCHER + EXAMPLE)
    recorded.run(*workers, passed=2)
    launches = recorded.read("launches.txt").splitlines()
    assert len(launches) == len(set(launches)) == 2
    assert all(line.startswith("toy on cpu-x2-gloo: /") for line in launches)
    comparisons = [json.loads(line) for line in recorded.read("verdicts.jsonl").splitlines()]
    assert [one["case"] for one in comparisons] == ["test_toy.py::test_speed::toy", "test_toy.py::test_weights::toy"]
    assert {one["verdicts"]["weight_hash"] for one in comparisons} == {"pass"}


RAISES = """
import pytest

def pytest_aorta_comparison(comparison):
    raise ValueError("no database")
"""


def test_error_in_a_hook_of_comparisons_fails_the_run_and_loses_nothing(project):
    project.test_file()
    project.write("conftest.py", FAKE_LAUNCHER + RAISES)
    result = project.run("--update-baselines", "--aorta-report=out/report.html", "--aorta-markdown=out.md", passed=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    shown = [line for line in result.outlines if "no database" in line]
    assert len(shown) == 1
    assert re.match(r"ERROR pytest_aorta_comparison: \S+conftest\.py:\d+ raised ValueError: no database; ", shown[0])
    assert len(project.baseline_files()) == 2
    assert (project.path / "out/report.html").is_file()
    assert (project.path / "out.md").is_file()
    project.write("conftest.py", FAKE_LAUNCHER)
    assert project.run(passed=2).ret == 0
