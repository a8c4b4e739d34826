"""Small convnet with BatchNorm, DDP, evaluation of each epoch on all ranks."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def net():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


def make(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 1, 12, 12, generator=g)
    y = torch.randint(0, 4, (n,), generator=g)
    for i in range(n):
        x[i, 0, y[i] * 3 : (y[i] + 1) * 3] += 1.0
    return TensorDataset(x, y)


@torch.no_grad()
def evaluate(model, data):
    model.eval()
    hits = total = 0
    for x, y in DataLoader(data, batch_size=32):
        hits += (model(x).argmax(1) == y).sum().item()
        total += len(y)
    model.train()
    t = torch.tensor([hits, total], dtype=torch.float64)
    dist.all_reduce(t)
    return (t[0] / t[1]).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    args = p.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(42)
    model = DDP(net())
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train, valid = make(320, 1), make(64, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            opt.step()
        acc = evaluate(model, valid)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} acc {acc:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
