"""Faults that ``aorta selftest`` plants into real ranks, and the command on a test of this repository."""

import pytest

from pytest_aorta.cli.selftest import SIGNS
from pytest_aorta.plan.options import LauncherKind
from pytest_aorta.plan.plants import Plant, Planted
from pytest_aorta.result.diagnosis import LaunchFailure, launch_failure
from pytest_aorta.result.reading import collect_result
from pytest_aorta.verdict.metrics import METRICS
from tests.unit.builders import make_plan, nightly

# Trains under FSDP2 or DDP, by its argument, and records every step.
SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from pytest_aorta.worker import record_optimizer_steps

record_optimizer_steps(warmup=4, hash_weights=True)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
if sys.argv[1] == "fsdp2":
    for layer in model:
        fully_shard(layer)
wrapped = fully_shard(model) if sys.argv[1] == "fsdp2" else torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for step in range(10):
    wrapped(torch.full((4, 8), 0.1 + dist.get_rank())).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(params=["fsdp2", nightly("ddp")])
def run(request, servers, tmp_path, monkeypatch):
    """Provide a function that launches the script with a fault, and returns its result or failure, and the mark."""
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(fault=None, size=0.0, timeout_s=120.0):
        name = fault or "unchanged"
        mark = tmp_path / f"planted {name} {timeout_s:g}"
        for variable, value in (Planted(fault, size, mark).environ() if fault else {}).items():
            monkeypatch.setenv(variable, value)
        plan = make_plan(
            tmp_path / f"{name} {timeout_s:g}",
            name="train.py",
            config={},
            script=str(tmp_path / "train.py"),
            args=(request.param,),
            cwd=request.config.rootpath,
            launcher=LauncherKind.FORKSERVER,
            timeout_s=timeout_s,
        )
        outcome = servers.launch(plan)
        failure = launch_failure(plan, outcome)
        return failure or collect_result(plan, outcome), mark.exists()

    return run


def test_each_fault_shows_in_what_the_ranks_leave(run, request):
    unchanged, _ = run()
    ended, is_planted = run(Plant.IN_LINE)
    assert is_planted, ended
    assert ended.weight_hashes == unchanged.weight_hashes
    hidden = [METRICS["scheduled_overlap_ratio"].measure(result.facts) for result in (ended, unchanged)]
    # The one bucket of DDP has nothing to hide under.
    assert hidden[0] < hidden[1] if request.node.callspec.params["run"] == "fsdp2" else hidden == [0, 0]
    slow, is_planted = run(Plant.SLOW_RANK, size=300.0)
    assert is_planted
    assert min(slow.step_times_ms) > 300
    assert run(Plant.MEMORY, size=64.0)[1] is False  # CPU ranks have no device memory
    for fault in (Plant.BIT, Plant.LOST_GRADIENT):
        changed, is_planted = run(fault)
        assert is_planted
        # Ranks with a bit of their own fail as replicas that differ, or have other weights.
        if isinstance(changed, LaunchFailure):
            assert changed.kind in SIGNS[fault].failures, changed.text
        else:
            assert changed.weight_hashes != unchanged.weight_hashes
    for fault in (Plant.NAN, Plant.EXIT_CODE):
        failure, is_planted = run(fault)
        assert is_planted
        assert failure.kind in SIGNS[fault].failures, failure.text
    # DDP gives the NaN of a rank to all, and the exit code was the last failure.
    assert failure.rank == 1
    for limit_s in (6.0, 24.0, 96.0):  # the first suffices on idle cores
        failure, is_planted = run(Plant.HANG, timeout_s=limit_s)
        if is_planted:
            break
    assert failure.kind in SIGNS[Plant.HANG].failures, failure.text
    assert failure.rank == 1
