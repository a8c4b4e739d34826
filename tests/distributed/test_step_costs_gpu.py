"""Costs of a step on one GPU: kernels, waits and copies to the host of a script and of a workload, equal each time."""

import pytest

from pytest_aorta import WorkloadRunner
from pytest_aorta.verdict.comparison import PairedComparison
from pytest_aorta.verdict.statistics.decision import Outcome
from tests.distributed import ONE_GPU, small_llama

pytestmark = [ONE_GPU, pytest.mark.launch_timeout(240)]

SCRIPT = """
import sys
import torch
from pytest_aorta.worker import record_optimizer_steps

record_optimizer_steps(warmup=3)
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, device="cuda") for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
for step in range(8):
    loss = model(torch.ones(8, 512, device="cuda")).square().mean()
    loss.backward()
    if "item" in sys.argv:
        loss.item()
    if "product" in sys.argv:
        torch.mm(model[0].weight.detach(), model[1].weight.detach())
    optimizer.step()
    optimizer.zero_grad()
"""


def judged(result, reference):
    """Return the verdicts on one launch, compared with one launch of the unchanged code."""
    pair = PairedComparison("case", {}, version="before")
    return pair.judge([result.facts], [reference.facts])


def test_a_script_s_further_kernel_and_wait_are_caught_in_one_launch(workload: WorkloadRunner, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    reference = workload.run_script(str(script), ["none"])
    for again in ("again", "once more"):
        rows = judged(workload.run_script(str(script), [again]), reference).rows
        costs = {row.metric: row.outcome for row in rows if row.metric in ("kernels", "operators", "flops")}
        assert costs == dict.fromkeys(("kernels", "operators", "flops"), Outcome.PASS)
    product = judged(workload.run_script(str(script), ["product"]), reference)
    assert product["kernels"].outcome is product["flops"].outcome is Outcome.REGRESSION
    item = judged(workload.run_script(str(script), ["item"]), reference)
    assert item["host_syncs"].outcome is item["host_copies"].outcome is Outcome.REGRESSION
    assert item["host_copies"].detail.startswith("+ Memcpy DtoH")


@pytest.mark.parametrize("name", ["llama_fsdp2", "llama_simple_fsdp"])
def test_costs_of_a_workload_repeat(workload: WorkloadRunner, name):
    launches = [workload.run(name, **small_llama.TRAINING).facts for _ in range(2)]
    assert launches[0].costs == launches[1].costs
    assert launches[0].costs[0].costs.kernels
