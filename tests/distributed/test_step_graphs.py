"""The step's graph of streams, as ranks of programs of many kinds record it."""

import pytest

from pytest_aorta.result.trace.schedule import play
from pytest_aorta.result.trace.step_graph import Work

pytestmark = [pytest.mark.launch_timeout(120)]

START = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
layers = [nn.Linear(256, 256, bias=False) for _ in range(6)]
model, batch = nn.Sequential(*layers), torch.randn(32, 256)
works = []
MAKE
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for _ in range(20):
    model(batch).sum().backward()
    for work in works:
        work.wait()
    AFTER
    works.clear()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
UNITS = "for layer in layers: fully_shard(layer)\nmodel = fully_shard(model)\n"
STATE = "model._get_fsdp_state()._comm_ctx"
HOOK = "for layer in layers:\n    layer.register_forward_pre_hook(lambda *_: (WHAT, None)[1], prepend=True)\n"
REDUCED = """
for weight in model.parameters():
    weight.register_post_accumulate_grad_hook(lambda weight: works.append(dist.all_reduce(weight.grad, async_op=True)))
"""
ALL = "for weight in model.parameters(): dist.all_reduce(weight.grad)"
FSDP1 = """
def own(module):
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"))
model = own(nn.Sequential(*map(own, layers)))
"""
GATHERED = """
from torch.distributed._functional_collectives import all_gather_tensor
class Gathered(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(128, 256) / 16 for _ in range(6))
    def forward(self, batch):
        for whole in [all_gather_tensor(part, 0, dist.group.WORLD) for part in self.parts]:
            batch = batch @ whole
        return batch
model = Gathered()
"""
# Of each program: what makes the model, what follows backward, collectives that no product can hide, and all.
PROGRAMS = {
    "FSDP2": (UNITS, "", 2, 18),
    "FSDP2, no prefetch": (UNITS + "for layer in layers: layer.set_modules_to_backward_prefetch([layer])", "", 12, 18),
    # The gathers that nothing used are waited for at the end of the backward pass.
    "FSDP2, prefetch in the wrong order": (
        UNITS + "for at, layer in enumerate(layers): layer.set_modules_to_backward_prefetch(layers[at + 1 : at + 2])",
        "",
        10,
        23,
    ),
    "FSDP2, gathers wait": (
        UNITS + HOOK.replace("WHAT", f"{STATE}.all_gather_stream.wait_stream(torch.cpu.current_stream())"),
        "",
        7,
        18,
    ),
    "FSDP2, in line": (
        UNITS + f"{STATE}.get_all_gather_streams = lambda *_: (torch.cpu.current_stream(),) * 2",
        "",
        17,
        18,
    ),
    "FSDP2, a value is read": (UNITS + HOOK.replace("WHAT", "batch.sum().item()"), "", 7, 18),
    "FSDP2, one unit": ("model = fully_shard(model)", "", 2, 2),
    "DDP": ("model = DistributedDataParallel(model, bucket_cap_mb=0.3)", "", 1, 3),
    "DDP, two buckets": ("model = DistributedDataParallel(model)", "", 1, 2),
    "by hand in backward": (REDUCED, "", 1, 6),
    "by hand after backward": ("", ALL, 6, 6),
    "FSDP1": (FSDP1, "", 2, 18),
    # Their weights were gathered first, so backward reduces them last.
    "functional collectives": (GATHERED, "", 7, 12),
}


# The others run nightly.
OFTEN = ("FSDP2", "FSDP2, gathers wait", "DDP", "by hand in backward", "FSDP1")


@pytest.mark.world(size=2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.extended) for name in PROGRAMS]
)
def test_collectives_that_compute_can_not_hide_are_counted(workload, tmp_path, name):
    make, after, serialized, collectives = PROGRAMS[name]
    (script := tmp_path / "train.py").write_text(START.replace("MAKE", make).replace("AFTER", after))
    first, second = [costs.graph for costs in workload.run_script(str(script)).costs]
    assert first == second, name
    assert first.problem == "", name
    assert first.unseen == [], name
    played = play(first)
    assert (played.serialized, played.collectives) == (serialized, collectives), name


@pytest.mark.parametrize("name", ["FSDP2", pytest.param("DDP", marks=pytest.mark.extended)])
@pytest.mark.parametrize(
    "size", [pytest.param(size, marks=pytest.mark.world(size=size, simulated=(0,))) for size in (8, 1024)]
)
def test_graph_is_that_of_any_number_of_ranks(workload, tmp_path, name, size):
    make, after, serialized, collectives = PROGRAMS[name]
    (script := tmp_path / "train.py").write_text(START.replace("MAKE", make).replace("AFTER", after))
    [costs] = workload.run_script(str(script)).costs
    assert {node.group_size for node in costs.graph.nodes if node.work is Work.COLLECTIVE} == {size}
    played = play(costs.graph)
    assert (played.serialized, played.collectives) == (serialized, collectives)


SUITE = """
import pytest

@pytest.mark.overlap
@pytest.mark.world(size=8)
def test_train(workload):
    workload.check(workload.run_script("train.py"))
"""
SIMULATED = ("-m", "overlap", "--aorta-gpus=8", "--aorta-without-gpus=simulate", "--aorta-baselines=baselines")


@pytest.mark.parametrize(
    "name",
    [
        "FSDP2, no prefetch",
        pytest.param("FSDP2, gathers wait", marks=pytest.mark.extended),
        pytest.param("FSDP2, in line", marks=pytest.mark.extended),
    ],
)
def test_suite_for_eight_gpus_finds_lost_overlap_without_one(pytester, inner, name):
    def write(program):
        make, after, *_ = PROGRAMS[program]
        (pytester.path / "train.py").write_text(START.replace("MAKE", make).replace("AFTER", after))

    write("FSDP2")
    inner(SUITE, *SIMULATED, "--update-baselines").assert_outcomes(passed=1)
    inner(SUITE, *SIMULATED).assert_outcomes(passed=1)
    write(name)
    result = inner(SUITE, *SIMULATED)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E  *serialized_collectives * (2 -> *", "E * of 18 collectives have nothing to hide under, 2 before: *"]
    )
    result.stdout.no_fnmatch_line("*2 launches*")
