"""Faults beside the steps' times: what each step keeps, graphs compiled before them, and slow checkpoints."""

import pytest

from pytest_aorta.verdict.comparison import PairedComparison
from pytest_aorta.verdict.metrics import METRICS
from pytest_aorta.verdict.statistics.decision import Outcome
from tests.distributed import TWO_CPU_RANKS

pytestmark = [TWO_CPU_RANKS, pytest.mark.launch_timeout(240)]

SCRIPT = """
import mmap
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

fault, folder = sys.argv[1:]
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scale = torch.compile(lambda x: x * 2, backend="aot_eager", dynamic=False)
kept = []
for step in range(60):
    rows = 16 if fault == "second graph" and step == 0 else 8
    model(scale(torch.ones(rows, 64))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    metrics = torch.ones(32768)
    if fault == "leak" and dist.get_rank() == 1:
        kept.append(metrics)
    if fault == "host leak":
        kept.append(mmap.mmap(-1, 1 << 20))
        kept[-1].write(bytes(1 << 20))
    if step % 20 == 19:
        state = {"model": model.state_dict()}
        if fault == "checkpoint":
            state["slow"] = torch.ones(16 << 20)
        dcp.save(state, checkpoint_id=folder)
"""
# Fault -> the metric that fails without a marker, and what is said of it.
FAULTS = {
    "leak": ("memory_growth", "memory of rank 1 grows by 0.1"),
    "host leak": ("resident_growth", "resident memory of rank "),
    "second graph": ("compiled_graphs", "script.py:13, tensor 'x' size mismatch"),
}


def test_fault_beside_the_times_of_steps_fails_by_its_metric_alone(workload, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT, encoding="utf-8")
    sound, slow, *faulty = (
        workload.run_script(path, [fault, str(tmp_path / "saved")]).facts for fault in ("none", "checkpoint", *FAULTS)
    )
    for (fault, (failing, text)), facts in zip(FAULTS.items(), faulty, strict=True):
        rows = PairedComparison("case", {}, version="before").judge([facts], [sound]).rows
        found = {row.metric: row.detail for row in rows if row.outcome is Outcome.REGRESSION}
        assert (fault, set(found)) == (fault, {failing})
        assert text in found[failing]
    # Times of a disk are compared where a marker names them.
    assert slow.metrics["checkpoint_ms"] > 2 * sound.metrics["checkpoint_ms"]
    for facts in (sound, *faulty):
        assert facts.metrics["compile_s"] > 0
        assert METRICS["all_reduce_ms"].measure(facts) > 0
