"""FSDP2 training that clips and logs the gradient norm with helpers of its own."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def grad_norm(parameters):
    squares = torch.zeros(())
    for p in parameters:
        g = p.grad
        local = g.to_local() if isinstance(g, DTensor) else g
        squares += local.pow(2).sum()
    dist.all_reduce(squares)
    return squares.sqrt()


def clip(parameters, max_norm):
    parameters = [p for p in parameters if p.grad is not None]
    norm = grad_norm(parameters)
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for p in parameters:
        (p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad).mul_(coefficient)
    return norm


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(13)
    model = nn.Sequential(nn.Linear(20, 40), nn.GELU(), nn.Linear(40, 40), nn.GELU(), nn.Linear(40, 20))
    for m in model:
        if isinstance(m, nn.Linear):
            fully_shard(m, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.SGD(model.parameters(), lr=0.3)
    g = torch.Generator().manual_seed(rank)
    for step in range(args.steps):
        x = torch.randn(12, 20, generator=g)
        loss = (model(x) - 4 * x).pow(2).mean()
        loss.backward()
        norm = clip(model.parameters(), 0.5)
        opt.step()
        opt.zero_grad()
        if step % 10 == 9 and rank == 0:
            print(f"step {step + 1} loss {loss.item():.4f} norm {norm.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
