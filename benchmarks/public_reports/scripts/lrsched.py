"""FSDP2 fine-tune of an MLP with linear warmup and cosine decay."""

import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.RMSNorm(d)
        self.up = nn.Linear(d, 2 * d)
        self.down = nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


class Scheduler:
    """Steps the wrapped schedule when the optimizer has stepped."""

    def __init__(self, inner, times=1):
        self.inner, self.times = inner, times

    def step(self):
        for _ in range(self.times):
            self.inner.step()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--max-steps", type=int, default=40)
    p.add_argument("--warmup", type=int, default=10)
    args = p.parse_args()
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(7)
    d = 32
    model = nn.Sequential(nn.Linear(d, d), *(Block(d) for _ in range(3)), nn.Linear(d, d))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def factor(step):
        if step < args.warmup:
            return (step + 1) / args.warmup
        done = (step - args.warmup) / max(1, args.max_steps - args.warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    sched = Scheduler(torch.optim.lr_scheduler.LambdaLR(opt, factor))
    g = torch.Generator().manual_seed(100 + dist.get_rank())
    for _step in range(args.max_steps):
        x = torch.randn(16, d, generator=g)
        loss = (model(x) - x.flip(-1)).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        opt.zero_grad()
    final = loss.detach()
    dist.all_reduce(final)
    if dist.get_rank() == 0:
        print("final loss", (final / world).item(), "lr", opt.param_groups[0]["lr"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
