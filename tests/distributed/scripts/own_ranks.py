"""A training script that starts its own ranks, as ``torch.multiprocessing.spawn``, torchrun or Lightning do.

Arguments: how ranks are started, and a fault of rank 1 in step 20.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

STEPS, FAULTY, WORLD = 30, 20, 2


def train(rank: int, fault: str) -> None:
    """Train a small model, as a rank of a world that meets at the port in the environment."""
    dist.init_process_group("gloo", rank=rank, world_size=1 if fault == "absent" else WORLD)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(rank)
    for step in range(1, STEPS + 1):
        loss = model(torch.randn(8, 16, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if step == FAULTY and rank == 1:
            fail(fault)
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()
    if fault == "left at once" and rank == 1:
        os._exit(0)


def fail(fault: str) -> None:
    """Do what ``fault`` says."""
    match fault:
        case "raise":
            raise ValueError("planted in step 20")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(600)


def main(start: str, fault: str) -> None:
    """Start the ranks, and wait for their end."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(25000 + os.getpid() % 5000))
    match start:
        case "spawn" | "fork":
            mp.start_processes(train, (fault,), nprocs=1 if fault == "absent" else WORLD, start_method=start)
        case "environment":
            train(int(os.environ["RANK"]), fault)
        case "exec":
            os.execv(sys.executable, [sys.executable, sys.argv[0], "environment", fault])
        case "first is a rank" if "LOCAL_RANK" in os.environ:
            train(1, fault)
        case "first is a rank":
            with subprocess.Popen([sys.executable, *sys.argv], env=os.environ | {"LOCAL_RANK": "1"}):
                train(0, fault)
    if fault == "code":
        sys.exit(3)


if __name__ == "__main__":
    main(*sys.argv[1:])
