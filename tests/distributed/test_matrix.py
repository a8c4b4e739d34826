"""A few cells of the matrix of unedited scripts and faults, by its one command."""

import json
from pathlib import Path

import pytest

from tests.distributed.processes import own_environ
from tests.unit.builders import run_python

ROOT = Path(__file__).parents[2]


@pytest.mark.extended
@pytest.mark.parametrize("script", ["gan", "spawn"])
def test_faults_in_unedited_scripts_are_found_by_the_three_commands(tmp_path, script):
    out = tmp_path / "matrix.json"
    options = (f"--out={out}", f"--scripts={script}", "--faults=clean,last step,raise,exit code")
    environ = own_environ(tmp_path / "leases")
    done = run_python("-m", "benchmarks.scripts.matrix", *options, cwd=ROOT, env=environ, timeout=1800)
    assert done.returncode == 0, done.stderr
    cells = json.loads(out.read_text())
    assert [(cell["fault"], cell["absent"]) for cell in cells] == [
        ("clean", []),
        ("last step", []),
        ("raise", []),
        ("exit code", []),
    ]
    assert f"| {script} |" in done.stdout
    assert "4 of 4 cells as expected" in done.stdout
