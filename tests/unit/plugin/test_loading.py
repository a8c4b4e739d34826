from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LIST_MODULES = """
import sys
import pytest

code = pytest.main(sys.argv[1:])
print("\\nmodules:", *sorted(sys.modules))
sys.exit(code)
"""
# Each of these takes long to import, and only a launch or a comparison needs it.
HEAVY = {"numpy", "scipy", "jsonschema", "jsonschema_rs", "yaml", "torch", "pynvml", "jinja2", "matplotlib"}
# Other plugins that import numpy, or much of hypothesis.
WITHOUT = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:randomly")
# The plugin's own modules, with the packages that contain them.
NEEDED = {
    "pytest_aorta", "pytest_aorta.common", "pytest_aorta.common.errors", "pytest_aorta.common.signals",
    "pytest_aorta.common.text",
    "pytest_aorta.plan", "pytest_aorta.plan.device_kind", "pytest_aorta.plan.options", "pytest_aorta.plan.profiler",
    "pytest_aorta.plan.world",
    "pytest_aorta.plugin", "pytest_aorta.plugin.disabled", "pytest_aorta.plugin.hooks", "pytest_aorta.plugin.markers",
    "pytest_aorta.plugin.options", "pytest_aorta.plugin.run",
}  # fmt: skip


def modules_after(folder: Path, test: str, *arguments: str) -> set[str]:
    (folder / "test_some.py").write_text(test)
    (folder / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-c", LIST_MODULES, "-q", *WITHOUT, *arguments],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return set(done.stdout.rpartition("modules: ")[2].split())


@pytest.mark.parametrize("argument", ["--collect-only", "--help", "--markers"])
def test_suite_without_launches_is_collected_without_packages_that_only_a_launch_needs(tmp_path, argument):
    modules = modules_after(tmp_path, "def test_other(): pass\n", argument)
    assert HEAVY & modules == set()
    assert {name for name in modules if name.partition(".")[0] == "pytest_aorta"} == NEEDED


def test_suite_without_launches_runs_with_the_modules_that_collect_it(tmp_path):
    modules = modules_after(tmp_path, "def test_other(): pass\n")
    assert HEAVY & modules == set()
    of_a_run = {"pytest_aorta.plugin.progress_line"}
    assert {name for name in modules if name.partition(".")[0] == "pytest_aorta"} == NEEDED | of_a_run


def test_test_with_a_launch_is_collected_without_importing_what_launches_it(tmp_path):
    test = "import pytest\n@pytest.mark.tolerance(step_time_p50='5%')\ndef test_speed(workload): pass\n"
    modules = modules_after(tmp_path, test, "--collect-only")
    assert {"numpy", "scipy", "jsonschema", "torch"} & modules == set()
    assert {"pytest_aorta.session.session", "pytest_aorta.session.runner", "pytest_aorta.launch"} & modules == set()
