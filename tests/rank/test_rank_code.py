"""Runs the checks of rank code in processes of their own: the pytest process never imports torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = sorted(path.name for path in Path(__file__).parent.glob("check_*.py"))


@pytest.mark.parametrize("check", CHECKS)
def test_rank_code(check, pytestconfig):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/rank/{check}"]
    ended = subprocess.run(command, cwd=pytestconfig.rootpath, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " passed" in ended.stdout
    assert "skipped" not in ended.stdout
