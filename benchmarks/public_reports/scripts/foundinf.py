"""Parameters sharded by hand (each rank steps its own part), fp16-like loss scaling with a shared overflow check."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 12))
    params = list(model.parameters())
    mine = params[rank::world]
    opt = torch.optim.Adam(mine, lr=3e-3)
    scale, good_steps = 2.0**14, 0
    g = torch.Generator().manual_seed(rank)
    for step in range(args.steps):
        x = torch.randn(8, 12, generator=g)
        if step == 13:
            x = x * 3  # a batch with large values
        loss = (model(x) - x).pow(2).mean()
        (loss * scale).backward()
        for q in params:
            half = q.grad.half()
            total = half.float()
            dist.all_reduce(total)
            q.grad = total / (scale * world)
        overflow = torch.tensor(float(any(not torch.isfinite(q.grad).all() for q in mine)))
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX)
        if overflow:
            scale, good_steps = scale / 2, 0
        else:
            opt.step()
            good_steps += 1
            if good_steps % 10 == 0:
                scale *= 2
        model.zero_grad()
        for i, q in enumerate(params):
            dist.broadcast(q.data, src=i % world)
    if rank == 0:
        print(f"loss {loss.item():.5f} scale {scale}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
