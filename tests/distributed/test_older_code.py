"""Launches of this repository's own older code, from before the package was divided into sub-packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The last commit whose workloads import the modules of the worker by their former names.
OLDER = "5cecbb673d1988f6ccccdc0c7e1ae0fa8dd25d67"


@pytest.mark.extended
def test_workloads_and_a_script_of_an_older_commit_train_with_the_same_bits(tmp_path):
    if subprocess.run(["git", "cat-file", "-e", f"{OLDER}^{{commit}}"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip(f"commit {OLDER[:7]} is not in this clone; fetch the whole history")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "PYTEST_"))}
    environ |= {"CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(tmp_path)}
    suite = "tests/distributed/scripts/compared_with_older_code.py"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--aorta-ab={OLDER}", suite]
    ended = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ", 6 launches, 7 metrics match (" in ended.stdout
