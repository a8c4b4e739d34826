"""Runs the checks of rank code in processes of their own: the pytest process never imports torch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = sorted(f"tests/rank/{path.name}" for path in Path(__file__).parent.glob("check_*.py"))
# Loading torch takes longer than most of them do.
NUM_BATCHES = 3


@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_rank_code(batch, pytestconfig):
    checks = CHECKS[batch::NUM_BATCHES]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *checks]
    ended = subprocess.run(command, cwd=pytestconfig.rootpath, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # Pytest's own counts: aorta's summary, which tells of stale baselines too, speaks of skips in any case.
    counts = ended.stdout.strip().splitlines()[-1]
    assert " passed" in counts
    assert "skipped" not in counts


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_kernel_under_its_interpreter(pytestconfig):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/rank/triton_weight_hash.py"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    folder = pytestconfig.rootpath
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
