from pathlib import Path

import pytest

from tests.unit.builders import run_python

LIST_MODULES = """
import sys
import pytest

code = pytest.main(sys.argv[1:])
print("\\nmodules:", *sorted(sys.modules))
sys.exit(code)
"""
# Each of these takes long to import, and only a launch or a comparison needs it.
HEAVY = {"msgspec", "numpy", "scipy", "jsonschema", "yaml", "torch", "pynvml", "jinja2", "matplotlib"}
# Other plugins that import numpy, or much of hypothesis.
WITHOUT = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:randomly")
# What only tests with launches need.
LAUNCHING = ("session", "launch", "verdict", "result", "report", "worker", "cli")


def of_launches(modules: set[str]) -> list[str]:
    """Return the modules of this package that a suite without launches does not need."""
    return [name for name in modules if name.startswith(tuple(f"pytest_aorta.{package}" for package in LAUNCHING))]


def modules_after(folder: Path, test: str, *arguments: str) -> set[str]:
    (folder / "test_some.py").write_text(test)
    (folder / "pytest.ini").write_text("[pytest]\n")
    environ = {"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""}
    done = run_python("-c", LIST_MODULES, "-q", *WITHOUT, *arguments, cwd=folder, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return set(done.stdout.rpartition("modules: ")[2].split())


@pytest.mark.parametrize("arguments", [("--collect-only",), ("--help",), ("--markers",), ()])
def test_suite_without_launches_runs_without_packages_that_only_a_launch_needs(tmp_path, arguments):
    modules = modules_after(tmp_path, "def test_other(): pass\n", *arguments)
    assert HEAVY & modules == set()
    assert of_launches(modules) == []


def test_test_with_a_launch_is_collected_without_importing_what_launches_it(tmp_path):
    test = "import pytest\n@pytest.mark.tolerance(step_time_p50='5%')\ndef test_speed(workload): pass\n"
    modules = modules_after(tmp_path, test, "--collect-only")
    assert HEAVY & modules == set()
    assert of_launches(modules) == []
