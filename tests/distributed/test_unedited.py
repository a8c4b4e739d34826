"""Scripts that do not mention the recorder, on two real ranks: none is broken by it, and its findings have a place."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from pytest_aorta.result.folder import steps_entered
from tests.distributed.test_init import run
from tests.distributed.test_own_scripts import aorta
from tests.unit.builders import nightly, read_json

COSTS = r"(?s)  collectives: (\d+).* collective_bytes: ([\d,]+) B.* flops: ([\d,]+)"
LOOPS = Path(__file__).parent / "scripts" / "own_loops.py"


def recorded(folder: Path, loop: str, *options: str) -> tuple[str, list[dict[str, Any]]]:
    """Run a loop, and return the printed lines and what its ranks recorded of their only optimizer."""
    shutil.copy(LOOPS, folder / "train.py")
    done = aorta(folder, "--launcher=forkserver", "--script", "train.py", *options, "--", loop)
    assert done.returncode == 0, done.stderr
    result = read_json(folder / "results" / "train" / "trial_0.json")
    return done.stdout, [rank["series"][0] for rank in result["ranks"]]


def hashes(series: dict[str, Any]) -> list[str]:
    assert [*series["weights"]["hashes"]] == ["0", "1", "2", "4", "8", "9"]
    return list(series["weights"]["hashes"].values())


@pytest.mark.extended
@pytest.mark.parametrize("loop", ["fsdp1", "zero", "fsdp2", "tensor_parallel", "one_rank_leaves"])
def test_script_whose_ranks_hold_what_they_hold_is_recorded(tmp_path, loop):
    shown, ranks = recorded(tmp_path, loop)
    own, other = map(hashes, ranks)
    # DDP under ZeRO, whose optimizer has all parameters, has replicas; the others hold shards or their own weights.
    assert (own == other) == (loop == "zero")
    assert "replicas differ" not in shown or loop == "one_rank_leaves"
    assert all(len(rank.get("grad_norm", {})) == 9 * (loop == "fsdp1") for rank in ranks)


def test_stages_of_a_pipeline_have_losses_and_weights_of_their_own(tmp_path):
    shown, (first, last) = recorded(tmp_path, "pipeline")
    assert (first["model"], last["model"]) == ("Linear", "Net")
    assert ("loss" in first, list(last["loss"])) == (False, [str(step) for step in range(1, 10)])
    assert (first["weights"]["names"], last["weights"]["names"][0]) == (["bias", "weight"], "a.bias")
    assert "replicas differ" not in shown


@pytest.mark.extended
def test_ranks_with_uneven_data_are_measured_in_the_steps_that_both_have(tmp_path):
    shown, ranks = recorded(tmp_path, "uneven")
    assert ([rank["num_steps"] for rank in ranks], "20 steps on cpu-x2-gloo" in shown) == ([26, 46], True)


def test_rank_that_alone_steps_an_optimizer_is_measured_alone(tmp_path):
    _, ranks = recorded(tmp_path, "learner")
    assert [rank["num_steps"] for rank in ranks] == [9]


def test_script_may_leave_its_folder_and_clear_its_environment(tmp_path):
    _, ranks = recorded(tmp_path, "elsewhere")
    assert [rank["num_steps"] for rank in ranks] == [9, 9]


@pytest.mark.extended
def test_replicas_that_are_averaged_later_are_a_finding_and_no_error(tmp_path):
    shown, (own, other) = recorded(tmp_path, "local_sgd")
    # The ranks train on their own data until the averages after steps 3, 6 and 9.
    assert [one == two for one, two in zip(hashes(own), hashes(other), strict=True)] == [True, *[False] * 4, True]
    assert "a.bias and 3 others of SGD of Net on rank 1 and on rank 0 after step 1; they are equal before the" in shown
    assert "and again after step 9" in shown


@pytest.mark.parametrize("options", [(), nightly(("half",))])
def test_ddp_is_simulated_with_the_costs_of_real_ranks(tmp_path, options):
    shutil.copy(LOOPS, tmp_path / "train.py")
    real = run(
        tmp_path, "pytest_aorta.cli", "run", "--launcher=forkserver", "--script", "train.py", "--", "hooked", *options
    ).stdout
    simulated = run(tmp_path, "pytest_aorta.cli", "scale", "train.py", "--sizes", "2", "--", "hooked", *options).stdout
    collectives, num_bytes, flops = re.search(COSTS, real).groups()  # type: ignore[union-attr]
    row = next(line.split() for line in simulated.splitlines() if line.startswith("2 "))
    assert (row[1], row[2], row[5]) == (collectives, num_bytes, flops)


@pytest.mark.extended
def test_rank_that_hangs_is_in_the_step_that_the_user_counts(tmp_path):
    shutil.copy(LOOPS, tmp_path / "train.py")
    done = aorta(tmp_path, "--script", "train.py", "--", "hang")
    assert done.returncode == 1
    # Rank 0 waits in the backward pass of step 7 until the time limit of its group.
    folders = sorted((tmp_path / "results" / "train" / "launches").glob("*/ranks/*"))
    assert [steps_entered(folder) for folder in folders] == [7, 7]


_LOCATED = """
import pytest

@pytest.mark.world(size=2)
def test_train(workload):
    workload.check(workload.run_script("train.py", record={"hash_weights": True}))
"""


_NORMED = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
torch.use_deterministic_algorithms(True)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
for step in range(1, 41):
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))
    optimizer.zero_grad()
    (model(batch) * batch).mean().backward()
    optimizer.step()
"""
# What is replaced in the script, by what, and what the failure says; the nightly lane runs those that are no buffers.
_FAULTS = {
    "buffers": (
        "Parallel(model)",
        "Parallel(model, broadcast_buffers=False)",
        "the buffers of SGD of DDP(Sequential) first differ after step 2 on rank 1, and are equal after step 1",
    ),
    "memory": (
        "    optimizer.step()",
        "    optimizer.step(); kept.append(torch.ones(rank << 20))",
        "memory of rank 1 grows by ",
    ),
    "batch of a rank": (
        "100 * step + rank",
        "100 * step + rank * (step != 6)",
        "before they are reduced, gradients of step 6 differ on rank 1",
        "E       the loss of step 6 differs on rank 1 with equal weights after step 5; look at the data",
        "the buffers of SGD of DDP(Sequential) first differ after step 6 on rank 1, and are equal after step 5",
    ),
    "optimizer": (
        "    optimizer.step()",
        "    optimizer.step()\nlast = torch.optim.SGD(model.parameters(), lr=0.0)\nlast.step()",
        " weight_hash, buffer_hash: SGD of DDP(Sequential) #2 is new",
    ),
    "parameter": ("BatchNorm1d(8))", "BatchNorm1d(8), torch.nn.Linear(8, 8, bias=False))", "module.2.weight is new"),
}


@pytest.mark.parametrize("fault", ["buffers", *(nightly(name) for name in list(_FAULTS)[1:])])
def test_fault_names_buffers_growing_memory_the_rank_or_the_new_parameter(tmp_path, fault):
    good, bad, *said = _FAULTS[fault]
    (tmp_path / "test_train.py").write_text(_LOCATED)
    (tmp_path / "train.py").write_text(_NORMED)
    recorded = run(tmp_path, "pytest", "--aorta-launcher=forkserver", "--update-baselines")
    assert recorded.returncode == 0, recorded.stdout
    (tmp_path / "train.py").write_text(_NORMED.replace(good, bad))
    failed = run(tmp_path, "pytest", "--aorta-launcher=forkserver")
    assert (failed.returncode, [one for one in said if one not in failed.stdout]) == (1, []), failed.stdout
    # What a further launch has located takes the place of what the first one showed.
    shown = failed.stdout.partition("short test summary")[0]
    assert shown.count("the weights of SGD of DDP(Sequential) first differ") <= 1, shown


@pytest.mark.extended
def test_launch_that_failed_by_a_nan_is_repeated_with_a_look_after_every_step(tmp_path):
    (tmp_path / "test_train.py").write_text(_LOCATED)
    broken = "    if (step, rank) == (6, 1): model.module[0].weight.grad.fill_(torch.nan)\n    optimizer.step()"
    # The other rank ends before this one.
    late = "import time; time.sleep(rank)\n"
    (tmp_path / "train.py").write_text(_NORMED.replace("    optimizer.step()", broken) + late)
    failed = run(tmp_path, "pytest", "--aorta-launcher=forkserver").stdout
    assert "rank 1 failed first: NotFinite: " in failed
    looked = failed.partition("launched once more, with a look after every step: ")[2].partition("\n")[0]
    assert "rank 1 failed first: NotFinite: parameter module.0.weight of rank 1 " in looked
    assert "is NaN or infinite first after step 6; " in looked


@pytest.mark.extended
def test_buffers_that_vary_between_launches_are_left_out_and_weights_are_compared(tmp_path):
    (tmp_path / "test_train.py").write_text(_LOCATED)
    varying = (
        "model[1].register_buffer('made', torch.tensor(torch.seed() >> 1))\ntorch.manual_seed(0)\nmodel = Distributed"
    )
    (tmp_path / "train.py").write_text(_NORMED.replace("model = Distributed", varying))
    recorded = run(tmp_path, "pytest", "--aorta-launcher=forkserver", "--update-baselines")
    assert "buffer_hash: left out: in two launches the buffers of SGD of DDP(Sequential)" in recorded.stdout
    assert run(tmp_path, "pytest", "--aorta-launcher=forkserver").returncode == 0
    (tmp_path / "train.py").write_text(_NORMED.replace("model = Distributed", varying).replace("lr=0.1", "lr=0.2"))
    assert "Regression: weight_hash" in run(tmp_path, "pytest", "--aorta-launcher=forkserver").stdout
