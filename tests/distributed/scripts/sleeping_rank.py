"""Trains a layer under DDP or FSDP2; rank 1 sleeps in every step. Arguments: ``ddp`` or ``fsdp2``, milliseconds.

Two further steps are profiled.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pytest_aorta.worker import capture_overlap, recorder

dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
wrapped = DistributedDataParallel(model) if sys.argv[1] == "ddp" else fully_shard(model)
optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)


def step() -> None:
    if dist.get_rank() == 1:
        time.sleep(float(sys.argv[2]) / 1e3)
    wrapped(torch.ones(2, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


for _ in range(5):
    with recorder.step():
        step()
recorder.overlap(capture_overlap(step, 2, torch.device("cpu")))
dist.destroy_process_group()
