"""The ablation of the Llama benchmark, tried with the debug model on CPU ranks."""

import json
import os
from pathlib import Path

import pytest

from tests.unit.builders import run_python

ROOT = Path(__file__).parents[2]


@pytest.mark.extended
def test_ablation_writes_the_effect_of_each_lever_and_why_others_are_left_out(tmp_path):
    asked = "FSDP2 eager: rotary;FSDP2 eager: loss_chunks;FSDP2 eager for torchtitan"
    variables = {"LLAMA_OUT": str(tmp_path), "LLAMA_TINY": "2", "LLAMA_ROUNDS": "1", "LLAMA_LEVERS": asked}
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "benchmarks/training/llama.py"]
    done = run_python(*command, cwd=ROOT, env=os.environ | variables)
    assert done.returncode == 0, done.stdout
    written = json.loads((tmp_path / "llama.json").read_text())
    assert written["facts"]["ranks"] == 2
    plain, turned, chunked = (
        next(one["measured"][0] for one in written["programs"] if one["program"] == f"FSDP2 eager{name}")
        for name in ("", ", rotary real", ", loss_chunks 8")
    )
    assert [len(lever["pairs"]) for lever in written["levers"]] == [1, 1]
    assert all(low < change < high for change, low, high in (lever["change"] for lever in written["levers"]))
    assert turned["last_loss"] == plain["last_loss"]
    assert chunked["last_loss"] == pytest.approx(plain["last_loss"], rel=1e-5)
    assert "torchtitan" in written["left_out"]["FSDP2 eager for torchtitan FSDP2 eager"]
    assert "| FSDP2 eager: rotary real | FSDP2 eager | 1 |" in (tmp_path / "llama.md").read_text()
