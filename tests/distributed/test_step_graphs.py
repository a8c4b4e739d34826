"""The step's graph of streams, as ranks of programs of many kinds record it."""

import pytest

from pytest_aorta.result.trace.schedule import play
from pytest_aorta.result.trace.step_graph import Work
from tests.unit.builders import nightly

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
rank, world = dist.get_rank(), dist.get_world_size()
works, own_optimizer = [], torch.optim.SGD

def step():
    model(batch).sum().backward()
MAKE
optimizer = own_optimizer(model.parameters(), lr=1e-6)
for _ in range(20):
    step()
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
TENSOR_PARALLEL = """
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
plan = {str(number): RowwiseParallel() if number % 2 else ColwiseParallel() for number in range(6)}
parallelize_module(model, init_device_mesh("cpu", (world,)), plan)
"""
PIPELINE = """
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
model = nn.Sequential(*layers[3 * rank : 3 * rank + 3])
stage = PipelineStage(model, rank, world, torch.device("cpu"))
schedule = SCHEDULE(stage, 4, loss_fn=lambda out, target: (out - target).pow(2).sum())
def step():
    schedule.step(target=batch) if rank else schedule.step(batch)
"""
EXPERTS = """
from torch.distributed._functional_collectives import all_to_all_single_autograd
def exchange(rows):
    return all_to_all_single_autograd(rows, [32 // world] * world, [32 // world] * world, dist.group.WORLD)
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.expert = nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)
    def forward(self, x):
        FORWARD
model = nn.Sequential(*[Experts() for _ in range(3)])
"""
BESIDE = "sent = exchange(x); shared = self.shared(x); return shared + exchange(self.expert(sent))"
IN_LINE = "shared = self.shared(x); return shared + exchange(self.expert(exchange(x)))"
SIMPLE = """
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrize
mesh = init_device_mesh("cpu", (world,))
class Whole(nn.Module):
    def forward(self, shard):
        return shard.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
for layer in layers:
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    parametrize.register_parametrization(layer, "weight", Whole(), unsafe=True)
"""
BUCKETS = """
torch._inductor.config.bucket_all_gathers_fx = torch._inductor.config.bucket_reduce_scatters_fx = "all"
"""
ZERO = """
from torch.distributed.optim import ZeroRedundancyOptimizer
model = DistributedDataParallel(model)
def own_optimizer(parameters, lr):
    return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=lr)
"""
BUCKETED = "model = DistributedDataParallel(model, bucket_cap_mb=0.3)"
TWICE = """
def step():
    with model.no_sync():
        model(batch).sum().backward()
    model(batch).sum().backward()
"""
MESH = 'mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))\n'
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
    # The step that is counted is the one in which DDP lays its buckets out, with two broadcasts.
    "DDP, static graph": (BUCKETED.replace("0.3", "0.3, static_graph=True"), "", 3, 5),
    "DDP, two micro-batches": (BUCKETED + TWICE, "", 1, 3),
    "HSDP": (MESH + UNITS.replace("layer)", "layer, mesh=mesh)").replace("model)", "model, mesh=mesh)"), "", 3, 24),
    "tensor parallel": (TENSOR_PARALLEL, "", 5, 5),
    "pipeline, 1F1B": (PIPELINE.replace("SCHEDULE", "Schedule1F1B"), "", 7, 8),
    "pipeline, GPipe": (PIPELINE.replace("SCHEDULE", "ScheduleGPipe"), "", 5, 8),
    "experts, beside": (EXPERTS.replace("FORWARD", BESIDE), "", 8, 11),
    "experts, in line": (EXPERTS.replace("FORWARD", IN_LINE), "", 11, 11),
    "ZeRO": (ZERO, "", 7, 8),
    "SimpleFSDP": (SIMPLE, "", 12, 12),
    "SimpleFSDP, aot_eager": (SIMPLE + 'model = torch.compile(model, backend="aot_eager")', "", 12, 12),
    "SimpleFSDP, inductor": (SIMPLE + "model = torch.compile(model)", "", 12, 12),
    "SimpleFSDP, buckets": (SIMPLE + BUCKETS + "model = torch.compile(model)", "", 2, 2),
}


# The others run nightly.
OFTEN = ("FSDP2, gathers wait", "DDP", "FSDP1", "tensor parallel")


def _case(name):
    rarely = () if name in OFTEN else (pytest.mark.extended,)
    return pytest.param(name, marks=[pytest.mark.world(size=4 if name == "HSDP" else 2, warm=True), *rarely])


@pytest.mark.parametrize("name", [*map(_case, PROGRAMS)])
def test_collectives_that_compute_can_not_hide_are_counted(workload, tmp_path, name):
    make, after, serialized, collectives = PROGRAMS[name]
    (script := tmp_path / "train.py").write_text(START.replace("MAKE", make).replace("AFTER", after))
    first, *others = [costs.graph for costs in workload.run_script(str(script)).costs]
    # Each stage of a pipeline has a part of the model.
    assert all(graph == first for graph in others) or "pipeline" in name, name
    assert first.problem == "", name
    assert first.unseen == (["kernels that inductor fused"] if "torch.compile(model)" in make else []), name
    played = play(first)
    assert (played.serialized, played.collectives) == (serialized, collectives), name


@pytest.mark.world(size=2, warm=True)
def test_stages_of_a_pipeline_are_played_together(workload, tmp_path):
    make = PROGRAMS["pipeline, 1F1B"][0]
    (script := tmp_path / "train.py").write_text(START.replace("MAKE", make).replace("AFTER", ""))
    schedules = {group.ranks[0]: group.schedule for group in workload.run_script(str(script)).facts.schedules}
    received = {rank: [one for one in found.issued if one.sender is not None] for rank, found in schedules.items()}
    assert {rank: [one.sender for one in rows] for rank, rows in received.items()} == {0: [1] * 4, 1: [0] * 4}
    # The second stage waits for the first micro-batch, and the first one for its return.
    assert received[0][0].late_us > received[1][0].late_us > 0


BATCH = """
def step():
    group = dist.group.WORLD
    model(batch).sum().backward()
    group._start_coalescing(batch.device)
    dist.isend(batch, 1), dist.irecv(batch, 1)
    group._end_coalescing(batch.device).wait()
    model(batch).sum().backward()
"""


@pytest.mark.world(size=2, simulated=(0,), warm=True)
def test_one_work_stands_for_a_batch_of_messages(workload, tmp_path):
    (script := tmp_path / "train.py").write_text(START.replace("MAKE", BATCH).replace("AFTER", ""))
    [costs] = workload.run_script(str(script)).costs
    played = play(costs.graph)
    assert (played.serialized, played.collectives, played.unseen) == (2, 2, [])


TRAINING = {"size": "debug", "n_layers": 2, "n_kv_heads": 4, "batch_size": 2, "steps": 3, "warmup": 0}
# Of each built-in workload: its keys, collectives that no product can hide, and all.
BUILT_IN = {
    "context parallel": ("llama_fsdp2", {"context_parallel_degree": 2}, 13, 20),
    "a bucket for each block": ("llama_simple_fsdp", {"bucketing": "transformer_block"}, 5, 12),
    "no bucket": ("llama_simple_fsdp", {"bucketing": "none"}, 63, 63),
}


@pytest.mark.extended
@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize(
    "ranks",
    [pytest.param(ranks, marks=pytest.mark.world(size=2, simulated=ranks, warm=True)) for ranks in (False, (0,))],
)
def test_simulated_rank_has_the_collectives_to_hide_of_a_real_one(workload, name, ranks):
    del ranks
    program, config, serialized, collectives = BUILT_IN[name]
    for costs in workload.run(program, **TRAINING | config).costs:
        played = play(costs.graph)
        assert (played.serialized, played.collectives, played.unseen) == (serialized, collectives, [])


@pytest.mark.parametrize("name", ["FSDP2", nightly("DDP")])
@pytest.mark.parametrize(
    "size", [pytest.param(size, marks=pytest.mark.world(size=size, simulated=(0,), warm=True)) for size in (8, 1024)]
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
@pytest.mark.parametrize("script", ["same", "train"])
def test_script(workload, script):
    workload.check(workload.run_script(f"{script}.py"))
"""
SIMULATED = ("-m", "overlap", "--aorta-gpus=8", "--aorta-without-gpus=simulate", "--aorta-baselines=baselines")


@pytest.mark.parametrize(
    "name",
    [
        "FSDP2, no prefetch",
        nightly("FSDP2, gathers wait"),
        nightly("FSDP2, in line"),
    ],
)
def test_suite_for_eight_gpus_finds_lost_overlap_without_one(pytester, inner, name):
    def write(script, program):
        make, after, *_ = PROGRAMS[program]
        (pytester.path / f"{script}.py").write_text(START.replace("MAKE", make).replace("AFTER", after))

    for script in ("same", "train"):
        write(script, "FSDP2")
    inner(SUITE, *SIMULATED, "--update-baselines").assert_outcomes(passed=2)
    write("train", name)
    result = inner(SUITE, *SIMULATED)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["E  *serialized_collectives * (2 -> *", "E * of 18 collectives have nothing to hide under, 2 before: *"]
    )
    result.stdout.fnmatch_lines("aorta: *2 launches in *")
