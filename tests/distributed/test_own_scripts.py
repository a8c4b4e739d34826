"""Scripts of the user's own, through the recorder's three lines, by `aorta run`."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_aorta.result.reading import read_result
from tests.distributed.processes import await_true, is_alive, rank_pids
from tests.unit.builders import run_python

RECORDED = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from pytest_aorta.worker import recorder

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(16, 16)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    with recorder.step(tokens=32):
        loss = model(torch.ones(2, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    recorder.loss(loss)
recorder.weights(model)
"""


def own_leases(folder: Path) -> dict[str, str]:
    """Return an environment in which a command does not wait for the devices of other tests."""
    return os.environ | {"AORTA_LEASE_DIR": str(folder / "leases")}


AORTA_RUN = [sys.executable, "-m", "pytest_aorta.cli", "run", "--gpus=0"]


def aorta(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(*AORTA_RUN[1:], *arguments, cwd=folder, env=own_leases(folder))


def test_three_lines_record_step_times_tokens_loss_and_weights(tmp_path):
    (tmp_path / "train.py").write_text(RECORDED)
    done = aorta(tmp_path, "--script", "train.py", "--", "5")
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "results" / "train" / "launches").glob("*/result.json")
    result = read_result(path)
    assert [len(times) for times in result.rank_step_times_ms] == [5, 5]
    assert (len(result.loss), list(result.weight_hashes)) == (5, ["5"])
    assert result.loss[-1] < result.loss[0]
    seconds = [sum(times) / 1000 for times in result.rank_step_times_ms]
    assert result.rank_metrics["tokens_per_s"] == pytest.approx([5 * 32 / each for each in seconds])


def test_sigterm_leaves_no_process_and_keeps_what_is_done(tmp_path):
    (tmp_path / "train.py").write_text("import time\ntime.sleep(60)\n")
    process = subprocess.Popen(
        [*AORTA_RUN, "--script", "train.py"], cwd=tmp_path, env=own_leases(tmp_path), stderr=subprocess.PIPE, text=True
    )
    await_true(lambda: len(rank_pids(tmp_path)) == 2)
    pids = rank_pids(tmp_path)
    process.send_signal(signal.SIGTERM)
    _, complaint = process.communicate(timeout=150)
    assert process.returncode == 128 + signal.SIGTERM
    assert "ended by SIGTERM" in complaint
    assert not any(map(is_alive, pids))
