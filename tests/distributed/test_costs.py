"""Faults that one launch of CPU ranks shows by the costs of a step alone."""

from __future__ import annotations

import pytest

from pytest_aorta.result.facts import launch_facts
from pytest_aorta.verdict.comparison import PairedComparison
from pytest_aorta.verdict.metrics import Tolerance
from pytest_aorta.verdict.statistics.decision import Outcome
from tests.unit.builders import default_priors

pytestmark = [pytest.mark.world(size=2, device="cpu", warm=True), pytest.mark.launch_timeout(240)]

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from pytest_aorta.worker import record_optimizer_steps

record_optimizer_steps(warmup=3)
fault = sys.argv[1]
dist.init_process_group("gloo")
own = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
torch.manual_seed(0)
torch._dynamo.config.recompile_limit = 100
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU()) for _ in range(3)))
policy = MixedPrecisionPolicy(param_dtype=None if fault == "float32" else torch.bfloat16)
for layer in model:
    fully_shard(layer, mp_policy=policy, reshard_after_forward=fault != "no reshard")
fully_shard(model, mp_policy=policy)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
scale = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
for step in range(7):
    x = torch.ones(4, 32)
    scaled = scale(torch.ones(2 + step if fault == "recompile" else 2))
    if fault == "gather twice":
        model[1].unshard()
        model[1].reshard()
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=False) if fault == "checkpointing" else layer(x)
    loss = x.float().square().mean()
    if fault == "operator":
        scaled.neg()
    loss.backward()
    if fault == "item":
        loss.item()
    if fault == "rank 1" and dist.get_rank() == 1:
        dist.all_reduce(torch.ones(8), group=own)
    optimizer.step()
    optimizer.zero_grad()
"""
FAULTS = [
    ("gather twice", "collectives", "all_gather over 2 ranks, bfloat16 6 -> 7 a step, +0.002112 MB"),
    ("float32", "collective_bytes", "all_gather over 2 ranks, float32 +0.02534 MB"),
    ("checkpointing", "flops", "aten::addmm +24,576"),
    ("item", "host_copies", "+ aten::_local_scalar_dense x 1"),
    ("recompile", "recompilations", "3 in 3 measured steps, 0 before"),
    ("operator", "operators", "+ aten::neg x 1"),
    ("rank 1", "collectives", "all_reduce over 1 ranks, float32 0 -> 1 a step, +3.2e-05 MB on rank 1 only"),
    ("no reshard", "collectives", "all_gather over 2 ranks, bfloat16 6 -> 3 a step, -0.006336 MB"),
]


def judged(result, reference, metric):
    """Return the verdict on a cost of one launch, compared with one launch of the unchanged code."""
    pair = PairedComparison("case", {"operators": Tolerance(None)}, default_priors, version="before")
    return pair.judge([launch_facts(result)], [launch_facts(reference)])[metric]


def test_each_fault_of_a_script_is_caught_by_its_cost_in_one_launch(workload, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    reference = workload.run_script(str(script), ["none"])
    again = judged(workload.run_script(str(script), ["again"]), reference, "operators")
    assert (again.outcome, again.detail) == (Outcome.PASS, "")
    launched = {fault: workload.run_script(str(script), [fault]) for fault, _, _ in FAULTS}
    for fault, metric, text in FAULTS:
        row = judged(launched[fault], reference, metric)
        fewer = fault == "no reshard"
        assert (fault, row.outcome, row.is_open) == (fault, Outcome.IMPROVED if fewer else Outcome.REGRESSION, False)
        assert row.detail.startswith(text)
    # Here the copies are gathered again that the reference keeps.
    assert judged(reference, launched["no reshard"], "collectives").outcome is Outcome.REGRESSION
