"""The weight hash's kernel on a GPU has the bits of the CPU engine, for all dtypes, sizes, offsets and blocks."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pytest_aorta.session.world import DistributedWorld


@pytest.mark.world(size=1, device="cuda")
def test_kernel_has_the_bits_of_the_cpu_engine(distributed_world: DistributedWorld, pytestconfig):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/rank/triton_weight_hash.py"]
    ended = subprocess.run(command, cwd=pytestconfig.rootpath, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
