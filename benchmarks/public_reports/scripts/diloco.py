"""Semi-synchronous training: inner AdamW on each rank, an outer Nesterov step every few steps."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--sync-every", type=int, default=8)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(19)
    model = nn.Sequential(nn.Linear(10, 40), nn.Tanh(), nn.Linear(40, 5))
    anchor = [p.detach().clone().requires_grad_(True) for p in model.parameters()]
    inner = torch.optim.AdamW(model.parameters(), lr=4e-3)
    outer = torch.optim.SGD(anchor, lr=0.7, momentum=0.9, nesterov=True)
    g = torch.Generator().manual_seed(rank + 11)
    w = torch.sin(torch.arange(50.0)).view(10, 5)
    for step in range(1, args.steps + 1):
        x = torch.randn(16, 10, generator=g)
        loss = (model(x) - x @ w).pow(2).mean()
        inner.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        inner.step()
        if step % args.sync_every == 0:
            for a, q in zip(anchor, model.parameters(), strict=False):
                delta = a.detach() - q.detach()
                dist.all_reduce(delta)
                a.grad = delta / world
            outer.step()
            with torch.no_grad():
                for a, q in zip(anchor, model.parameters(), strict=False):
                    q.copy_(a)
            if rank == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
