"""Tensor parallel block with sequence parallel norms, Megatron style, written by hand."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


class ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        dist.all_reduce(x)
        return x.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts, 1)


class Block(nn.Module):
    def __init__(self, d, h, rank, world):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        up, down = torch.randn(h, d) / d**0.5, torch.randn(d, h) / h**0.5
        self.up = nn.Parameter(up.chunk(world, 0)[rank].clone())
        self.down = nn.Parameter(down.chunk(world, 1)[rank].clone())

    def forward(self, x):  # x has this rank's part of the sequence
        full = GatherSequence.apply(self.norm(x))
        return x + ScatterSequence.apply(F.gelu(full @ self.up.T) @ self.down.T)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(77)
    d = 16
    model = nn.ModuleList(Block(d, 64, rank, world) for _ in range(3))
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    shared = [p for block in model for p in block.norm.parameters()]
    g = torch.Generator().manual_seed(5)
    for step in range(args.steps):
        x = torch.randn(4, 8 * world, d, generator=g)
        h = x.chunk(world, 1)[rank]
        for block in model:
            h = block(h)
        target = x.roll(1, 2).chunk(world, 1)[rank]
        loss = (h - target).pow(2).sum() / x.numel()
        opt.zero_grad()
        loss.backward()
        for param in shared:
            dist.all_reduce(param.grad)
        opt.step()
        if step % 10 == 9:
            total = loss.detach().clone()
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step + 1} loss {total.item():.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
