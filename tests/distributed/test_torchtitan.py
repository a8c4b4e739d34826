"""The documented example: torchtitan's own training program, on GPUs if there are any."""

import importlib.util
import shutil
from pathlib import Path

import pytest

from pytest_aorta.result.reading import read_result
from tests.unit.builders import run_python

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "torchtitan"
NEEDED = ("torchtitan", "tokenizers", "datasets", "triton")


@pytest.mark.skipif(any(importlib.util.find_spec(name) is None for name in NEEDED), reason=f"needs {', '.join(NEEDED)}")
def test_debug_model_of_torchtitan_is_measured(tmp_path):
    shutil.copytree(EXAMPLE, tmp_path / "titan")
    yaml = tmp_path / "titan" / "workloads" / "titan" / "default.yaml"
    options = ("--workload", "titan", "--nproc", "2", "--set", "steps=5", "--set", "warmup=1")
    done = run_python("-m", "pytest_aorta.cli", "run", *options, cwd=yaml.parents[2], timeout=400)
    assert done.returncode == 0, done.stderr
    result = read_result(yaml.parents[2] / "results" / "titan" / "trial_0.json")
    assert [len(times) for times in result.rank_step_times_ms] == [4, 4]
    assert len(result.loss) == len(result.grad_norm) == 4
    assert min(result.rank_metrics["tokens_per_s"]) > 0
    assert result.environment["step_clock"] == "logged tokens_per_s"
