"""Launches unchanged code again and again, idle and busy, and counts the costs and graphs of a step that differ.

Run: REPEAT_LAUNCHES=200 python -m pytest benchmarks/verdict/costs_repeat.py -s --aorta-launcher=forkserver
Each built-in workload and each of four scripts runs on 2 CPU ranks; every second half of the launches runs beside two
processes that keep both cores busy. All nine costs of all ranks, and each node and edge of their graphs of streams,
are compared with those of the first launch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pytest_aorta import WorkloadRunner
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.trace.profiled_steps import Cost, by_rank

LAUNCHES = int(os.environ.get("REPEAT_LAUNCHES", "10"))
WORKLOADS = ("copy_compute", "ddp_overlap", "fsdp", "llama_fsdp2", "llama_simple_fsdp", "ranking")
HEAD = """
import torch
import torch.distributed as dist
from pytest_aorta.worker import record_optimizer_steps

record_optimizer_steps(warmup=3)
dist.init_process_group("gloo")
torch.manual_seed(0)
"""
_LOADER = """
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(0.1), torch.nn.GELU(), torch.nn.Linear(64, 1))
model = torch.nn.parallel.DistributedDataParallel(model)
data = TensorDataset(torch.randn(128, 32), torch.randn(128, 1))
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
optimizer = torch.optim.AdamW(model.parameters())
for inputs, targets in loader:
    (model(inputs) - targets).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_BY_HAND = """
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
model = torch.nn.Sequential(*(torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0) for _ in range(3)))
for layer in model:
    fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(8):
    model(torch.randn(16, 4, 64)).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""
SCRIPTS = {
    "FSDP2 by hand": _BY_HAND,
    "DDP, loader": _LOADER,
    "DDP, compiled": _LOADER.replace(
        "model = torch.nn.parallel", "model = torch.compile(model, backend='aot_eager')\nmodel = torch.nn.parallel"
    ),
    "GAN": """
make = lambda *sizes: torch.nn.parallel.DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(sizes[0], 64), torch.nn.ReLU(), torch.nn.Linear(64, sizes[1]))
)
generator, critic = make(8, 32), make(32, 1)
first, second = (torch.optim.Adam(model.parameters()) for model in (critic, generator))
for step in range(8):
    fake = generator(torch.randn(16, 8))
    (critic(fake.detach()).mean() - critic(torch.randn(16, 32)).mean()).backward()
    first.step()
    first.zero_grad()
    (-critic(fake).mean()).backward()
    second.step()
    second.zero_grad()
""",
}


@contextmanager
def load(processes: int) -> Iterator[None]:
    """Keep as many cores busy as there are ``processes``."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def differing(launch: LaunchFacts, first: LaunchFacts) -> list[str]:
    """Return the costs that differ on any rank."""
    assert launch.costs
    assert not any(group.costs.problem for group in launch.costs)
    return [cost for cost in Cost if by_rank(launch.costs, cost) != by_rank(first.costs, cost)]


@pytest.mark.world(size=2, device="cpu", warm=True)
@pytest.mark.launch_timeout(280)
@pytest.mark.parametrize("name", [*WORKLOADS, *SCRIPTS])
def test_repeats(workload: WorkloadRunner, tmp_path: Path, name: str) -> None:
    """Launch the same code many times, idle and busy, and print what differs."""
    launches, graphs = [], []
    script = tmp_path / "train.py"
    script.write_text(HEAD + SCRIPTS.get(name, ""), encoding="utf-8")
    for busy in (0, 2):
        with load(busy):
            for _ in range(LAUNCHES // 2):
                sized = {"steps": 3} if name in WORKLOADS else {}
                result = workload.run(name, **sized) if sized else workload.run_script(str(script))
                launches.append(result.facts)
                graphs.append([costs.graph for costs in result.costs])
    found = Counter(cost for launch in launches[1:] for cost in differing(launch, launches[0]))
    assert all(graph and graph.nodes for graph in graphs[0])
    found["graph"] = sum(one != graphs[0] for one in graphs)
    totals = {
        cost.value: max(sum(parts.values()) for parts in ranks.values())
        for cost in Cost
        if (ranks := by_rank(launches[0].costs, cost)) is not None
    }
    print(f"\n{name}: {len(launches)} launches, differing: {dict(found)}; {len(graphs[0][0].nodes)} nodes, {totals}")
    assert not found.total()
