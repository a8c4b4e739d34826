"""A few cells of the matrix of unedited scripts and faults, by its one command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.extended
@pytest.mark.parametrize("script", ["gan", "spawn"])
def test_faults_in_unedited_scripts_are_found_by_the_three_commands(tmp_path, script):
    out = tmp_path / "matrix.json"
    command = [sys.executable, "-m", "benchmarks.scripts.matrix", f"--out={out}", f"--scripts={script}"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environ |= {"CUDA_VISIBLE_DEVICES": "", "AORTA_LEASE_DIR": str(tmp_path / "leases")}
    faults = "--faults=clean,last step,raise,exit code"
    done = subprocess.run(
        [*command, faults], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stderr
    cells = json.loads(out.read_text())
    assert [(cell["fault"], cell["absent"]) for cell in cells] == [
        ("clean", []), ("last step", []), ("raise", []), ("exit code", [])
    ]  # fmt: skip
    assert f"| {script} |" in done.stdout
    assert "4 of 4 cells as expected" in done.stdout
