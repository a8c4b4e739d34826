"""The documented example: torchtitan's own training program, on GPUs if there are any."""

import importlib.util
import shutil
from pathlib import Path

import pytest

from tests.unit.builders import run_python

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "torchtitan"
NEEDED = ("torchtitan", "tokenizers", "datasets", "triton")


@pytest.mark.skipif(any(importlib.util.find_spec(name) is None for name in NEEDED), reason=f"needs {', '.join(NEEDED)}")
def test_debug_model_of_torchtitan_is_recorded_and_compared(tmp_path):
    folder = shutil.copytree(EXAMPLE, tmp_path / "titan")
    recorded = run_python("-m", "pytest", "--update-baselines", "--aorta-launches=2", cwd=folder, timeout=400)
    assert recorded.returncode == 0, recorded.stdout
    compared = run_python("-m", "pytest", "-v", cwd=folder, timeout=400)
    assert compared.returncode == 0, compared.stdout
    for metric in ("weight_hash", "flops", "collectives"):
        assert f"{metric}: " in compared.stdout
