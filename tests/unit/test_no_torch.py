"""The pytest process never imports torch, and does not need it."""

import subprocess
from pathlib import Path

import pytest

from tests.unit.builders import run_python

# Loaded by `site` at start-up, before pytest and its plugins.
BLOCK_TORCH = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is not importable here")

sys.meta_path.insert(0, Block())
"""
TEST_FILE = """
import pytest

@pytest.mark.overlap
@pytest.mark.world(size=2)
@pytest.mark.tolerance(step_time_p50="5%")
def test_toy(workload):
    workload.check(workload.run("fsdp"))
"""


def run(folder: Path, *arguments: str, block: bool = True) -> subprocess.CompletedProcess[str]:
    (folder / "sitecustomize.py").write_text(BLOCK_TORCH if block else "")
    (folder / "test_toy.py").write_text(TEST_FILE)
    (folder / "pytest.ini").write_text("[pytest]\n")
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    return run_python(*arguments, cwd=folder, env=environment)


MODULES = ("plugin.hooks", "plugin.fixtures", "session.runner", "launch.guarded", "launch.process.guard")
PROGRAMS = [*(f"import pytest_aorta.{name}" for name in MODULES), "from pytest_aorta.cli.main import parser; parser()"]


@pytest.mark.parametrize("program", [*PROGRAMS, "import pytest_aorta.launch.process.rank"])
def test_modules_of_the_controller_and_subcommands_are_imported_without_torch(tmp_path, program):
    blocked = "try:\n    import torch\nexcept ImportError as error:\n    print(error)\n"
    done = run(tmp_path, "-c", blocked + program)
    assert (done.returncode, done.stdout) == (0, "torch is not importable here\n"), done.stderr


def test_help_of_the_command_imports_no_subcommand(tmp_path):
    done = run(tmp_path, "-X", "importtime", "-m", "pytest_aorta.cli", "--help", block=False)
    assert "baselines" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "pytest_aorta.cli.main" in imported
    assert {"numpy", "yaml", "pytest", "pytest_aorta.plan", "pytest_aorta.result"} & imported == set()


@pytest.mark.parametrize(
    ("arguments", "shown"), [(["--help"], "--aorta-gpus=N"), (["--collect-only", "-q"], "test_toy.py::test_toy")]
)
def test_help_and_collection_work_without_torch(tmp_path, arguments, shown):
    done = run(tmp_path, "-m", "pytest", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert shown in done.stdout
