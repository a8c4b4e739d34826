"""Two pipeline stages, 1F1B, gradient accumulation over several schedule steps."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


class Mlp(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        return x + self.net(x)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=25)
    p.add_argument("--accum", type=int, default=2)
    p.add_argument("--microbatches", type=int, default=4)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    d = 32
    layers = [Mlp(d) for _ in range(2 * world)]
    part = nn.Sequential(*layers[2 * rank : 2 * rank + 2])
    stage = PipelineStage(part, rank, world, torch.device("cpu"))
    scale = args.accum * args.microbatches

    def loss_fn(out, target):
        return (out - target).pow(2).mean() / scale

    schedule = Schedule1F1B(stage, args.microbatches, loss_fn=loss_fn, scale_grads=False)
    opt = torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9)
    g = torch.Generator().manual_seed(9)
    for step in range(args.steps):
        opt.zero_grad()
        total = 0.0
        for _ in range(args.accum):
            x = torch.randn(16, d, generator=g)
            y = torch.roll(x, 1, dims=1)
            if rank == 0:
                schedule.step(x)
            else:
                losses = []
                schedule.step(target=y, losses=losses)
                total += sum(part.item() for part in losses)
        opt.step()
        if rank == world - 1 and step % 8 == 0:
            print(f"step {step} loss {total:.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
