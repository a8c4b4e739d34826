"""The pytest process never imports torch, and does not need it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_blocked_torch_is_not_importable(tmp_path):
    assert "torch is not importable here" in run(tmp_path, "-c", "import torch").stderr


@pytest.mark.parametrize(
    "module",
    [
        "plugin.hooks",
        "plugin.fixtures",
        "session.runner",
        "launch.guarded",
        "launch.process.guard",
        "launch.process.rank",
    ],
)
def test_module_of_the_controller_is_imported_without_torch(tmp_path, module):
    done = run(tmp_path, "-c", f"import pytest_aorta.{module}")
    assert done.returncode == 0, done.stderr


def test_every_subcommand_is_imported_without_torch(tmp_path):
    done = run(tmp_path, "-c", "from pytest_aorta.cli.main import parser; parser()")
    assert done.returncode == 0, done.stderr


def test_help_of_the_command_imports_no_subcommand(tmp_path):
    done = run(tmp_path, "-X", "importtime", "-m", "pytest_aorta.cli", "--help", block=False)
    assert "baselines" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "pytest_aorta.cli.main" in imported
    assert {"numpy", "yaml", "pytest", "pytest_aorta.plan", "pytest_aorta.result"} & imported == set()


def test_help_works_without_torch(tmp_path):
    done = run(tmp_path, "-m", "pytest", "--help")
    assert done.returncode == 0, done.stderr
    assert "--aorta-gpus=N" in done.stdout
    assert "aorta_node_launcher" in done.stdout


def test_collection_works_without_torch(tmp_path):
    done = run(tmp_path, "-m", "pytest", "--collect-only", "-q")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_toy.py::test_toy" in done.stdout


def test_run_without_torch_says_so(tmp_path):
    done = run(tmp_path, "-m", "pytest_aorta.cli", "run", "--workload", "fsdp")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("aorta: torch is not installed for ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "results" / "fsdp" / "trial_0.json").exists()


def test_doctor_without_torch_tells_it_as_the_problem(tmp_path):
    done = run(tmp_path, "-m", "pytest_aorta.cli", "doctor")
    assert done.returncode == 1
    assert "can't be imported: ImportError: torch is not importable here" in done.stdout


@pytest.mark.parametrize("argument", ["--collect-only", "--help"])
def test_torch_is_not_imported_where_it_could_be(tmp_path, argument):
    done = run(tmp_path, "-X", "importtime", "-m", "pytest", argument, block=False)
    assert done.returncode == 0, done.stdout + done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    # The plugin itself is loaded by importlib, which the interpreter does not time.
    assert "pytest_aorta.plugin.markers" in imported
    assert {name for name in imported if name.partition(".")[0] == "torch"} == set()
