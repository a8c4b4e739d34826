"""Faults that one launch shows by the costs of a step alone, on CPU ranks and simulated at 1,024 ranks."""

import pytest

from pytest_aorta import ComparisonFailed
from pytest_aorta.verdict.comparison import PairedComparison
from pytest_aorta.verdict.metrics import Tolerance
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Decided
from tests.distributed import TWO_CPU_RANKS

pytestmark = [TWO_CPU_RANKS, pytest.mark.launch_timeout(240)]

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
# FSDP2 pads a parameter with fewer rows than ranks.
table = torch.nn.Linear(*((1024, 8) if fault == "few rows" else (8, 1024)), bias=False)
fully_shard(table)
optimizer = torch.optim.SGD([*model.parameters(), *table.parameters()], lr=0.01, foreach=True)
scale = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
for step in range(7):
    x = torch.ones(4, 32, dtype=policy.param_dtype)
    scaled = scale(torch.ones(2 + step if fault == "recompile" else 2))
    if fault == "gather twice":
        model[1].unshard()
        model[1].reshard()
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=False) if fault == "checkpointing" else layer(x)
    loss = x.float().square().mean() + table(torch.ones(4, table.in_features)).mean()
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
# A GAN whose training ends while steps of its first optimizer are profiled.
TWO_OPTIMIZERS = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
nets = {name: torch.nn.Linear(8, 8) for name in ("discriminator", "generator")}
for net in nets.values():
    fully_shard(net)
optimizers = {name: torch.optim.AdamW(net.parameters()) for name, net in nets.items()}
for _ in range(27):
    for name, net in nets.items():
        if name == sys.argv[1]:
            net.unshard()
            net.reshard()
        net(torch.ones(4, 8)).square().mean().backward()
        optimizers[name].step()
"""
SIMULATED = pytest.mark.world(size=1024, simulated=True, warm=True)
SIMPLE_FSDP = {"steps": 2, "warmup": 1, "n_layers": 2, "profile_steps": 0}
FAULTS = [
    ("gather twice", "collectives", "all_gather over {size} ranks, bfloat16 6 -> 7 a step"),
    ("float32", "collective_bytes", "all_gather over {size} ranks, float32 +"),
    ("checkpointing", "flops", "aten::addmm +24,576"),
    ("item", "host_copies", "+ aten::_local_scalar_dense x 1"),
    ("recompile", "recompilations", "3 in 3 measured steps, 0 before"),
    ("operator", "operators", "+ aten::neg x 1"),
    ("rank 1", "collectives", "all_reduce over 1 ranks, float32 0 -> 1 a step, +32 B"),
    ("no reshard", "collectives", "all_gather over {size} ranks, bfloat16 6 -> 3 a step"),
]
# Without data any size fits, and 1,024 ranks divide these rows. Of others, DTensors pad the part of each rank.
WIDE = {"dim": 1024, "n_kv_heads": 4, "ffn_hidden": 1024, "vocab_size": 1024}
# Nothing that 2 ranks show.
FEW_ROWS = ("few rows", "collective_bytes", "all_gather over {size} ranks, float32 +")
# Those that every run of the tests launches, on simulated ranks; the night launches all, on real ranks too.
OFTEN = {"gather twice", "item", "few rows"}


def judged(result, reference, metric):
    """Return the verdict on a cost of one launch, compared with one launch of the unchanged code."""
    pair = PairedComparison("case", {"operators": Tolerance(None)}, version="before")
    return pair.judge([result.facts], [reference.facts])[metric]


def check_faults(workload, folder, faults):
    """Launch the unchanged script once, and once with each fault, which costs alone have to show."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    reference = workload.run_script(str(script), ["none"])
    for fault, metric, text in faults:
        launched = workload.run_script(str(script), [fault])
        row = judged(launched, reference, metric)
        fewer = fault == "no reshard"
        assert (fault, row.state) == (fault, Decided(Outcome.IMPROVED if fewer else Outcome.REGRESSION))
        assert row.detail.startswith(text.format(size=launched.world_size))
        assert row.detail.endswith(" on rank 1 only") is (fault == "rank 1")
        if fewer:  # here the copies are gathered again that the reference keeps
            assert judged(reference, launched, metric).outcome is Outcome.REGRESSION
    return reference


@pytest.mark.extended
def test_each_fault_of_a_script_is_caught_by_its_cost_in_one_launch(workload, tmp_path):
    reference = check_faults(workload, tmp_path, FAULTS)
    for same, metric in (("again", "operators"), ("few rows", "collective_bytes")):
        row = judged(workload.run_script(str(tmp_path / "train.py"), [same]), reference, metric)
        assert (row.outcome, row.detail) == (Outcome.PASS, "")


def test_all_gather_of_either_of_two_optimizers_is_caught_in_an_unedited_script(workload, tmp_path):
    script = tmp_path / "gan.py"
    script.write_text(TWO_OPTIMIZERS)
    reference = workload.run_script(str(script), ["none"], record={})
    for name in ("discriminator", "generator"):
        row = judged(workload.run_script(str(script), [name], record={}), reference, "collectives")
        assert row.outcome is Outcome.REGRESSION
        assert row.detail.startswith("all_gather over 2 ranks, float32 2 -> 3 a step")


PLANTED = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
for layer in net:
    fully_shard(layer)
fully_shard(net)
optimizer = torch.optim.SGD(net.parameters())
planted = "planted" in sys.argv
for _ in range(8):
    loss = net(torch.ones(4, 8)).square().mean()
    if planted:
        net[1].unshard()  # gathers
        net[1].reshard()
    loss.backward()
    if planted:
        dist.all_reduce(loss.detach())  # reduces
    optimizer.step()
    if planted and loss.item():  # copies
        optimizer.zero_grad()
"""
LINES = [*enumerate(PLANTED.splitlines(), 1)]


def test_lines_of_a_collective_and_of_a_copy_in_an_unedited_script_are_named(workload, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PLANTED)
    plain, planted = (workload.run_script(str(script), args, record={}) for args in ([], ["planted"]))
    with pytest.raises(ComparisonFailed) as found:
        workload.compare(planted, plain, metrics=["collectives", "host_copies"])
    assert set(found.value.metrics) == {"collectives", "host_copies"}
    place = f"{tmp_path.parent.name}/{tmp_path.name}/train.py"
    at = {text.split("#")[1].strip(): f"{place}:{n} {text.strip()}" for n, text in LINES if "#" in text}
    assert f"all_gather over 2 ranks, float32 4 -> 5 a step, +288 B (module 1 at {at['gathers']})" in str(found.value)
    assert f"all_reduce over 2 ranks, float32 0 -> 1 a step, +4 B ({at['reduces']})" in str(found.value)
    assert f"+ aten::_local_scalar_dense x 1 ({at['copies']})" in str(found.value)


@SIMULATED
def test_1024_simulated_ranks_show_faults_too(workload, tmp_path):
    check_faults(workload, tmp_path, [row for row in (*FAULTS, FEW_ROWS) if row[0] in OFTEN])


@SIMULATED
@pytest.mark.extended
def test_1024_simulated_ranks_show_all_faults_of_one_rank(workload, tmp_path):
    check_faults(workload, tmp_path, [row for row in FAULTS if row[0] not in {"rank 1", *OFTEN}])


@SIMULATED
@pytest.mark.extended
def test_lost_bucketing_of_simple_fsdp_is_caught_in_one_launch(workload):
    config = SIMPLE_FSDP | WIDE
    reference = workload.run("llama_simple_fsdp", **config)
    row = judged(workload.run("llama_simple_fsdp", **config, bucketing="none"), reference, "collectives")
    assert row.outcome is Outcome.REGRESSION
    assert row.detail.startswith("all_gather over 1024 ranks, float32 ")
