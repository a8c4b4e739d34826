"""The program of a rank, with a function of the test's own in place of the workload."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, sys, types
from pathlib import Path
from pytest_aorta.launch.process import rank

def run_rank(run_dir, folder):
    {body}

sys.modules["pytest_aorta.worker.lifecycle"] = types.ModuleType("lifecycle")
sys.modules["pytest_aorta.worker.lifecycle"].run_rank = run_rank
rank.main(Path(sys.argv[1]))
"""
FORK = "pid = os.fork()\n    if pid == 0:\n        {child}\n    os.waitpid(pid, 0)"


def run(run_dir: Path, body: str) -> int:
    (run_dir / "ranks" / "0").mkdir(parents=True)
    command = [sys.executable, "-c", PROGRAM.format(body=body), str(run_dir)]
    return subprocess.run(command, env=os.environ | {"RANK": "0"}, timeout=60, check=False).returncode


@pytest.mark.parametrize(
    ("child", "said"),
    [("raise ValueError('boom')", "ValueError: boom"), ("os.kill(os.getpid(), signal.SIGSEGV)", "Segmentation fault")],
)
def test_failure_of_a_forked_child_is_in_the_log_and_is_not_that_of_the_rank(tmp_path, child, said):
    assert run(tmp_path, FORK.format(child=child)) == 0
    folder = tmp_path / "ranks" / "0"
    assert said in (folder / "output.log").read_text()
    assert (folder / "stacks.txt").read_text() == ""
    assert not (folder / "error.json").exists()


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_rank_that_has_closed_its_output_succeeds(tmp_path, stream):
    assert run(tmp_path, f"sys.{stream}.close()") == 0
