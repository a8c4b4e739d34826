"""DDP with early stopping on a validation loss."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class EarlyStopping:
    def __init__(self, patience, min_delta):
        self.patience, self.min_delta, self.best, self.count = patience, min_delta, float("inf"), 0

    def __call__(self, value):
        if value < self.best - self.min_delta:
            self.best, self.count = value, 0
        else:
            self.count += 1
        return self.count >= self.patience


@torch.no_grad()
def validate(model, x, y):
    return nn.functional.mse_loss(model(x), y)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--max-steps", type=int, default=200)
    p.add_argument("--patience", type=int, default=3)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    net = nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Linear(48, 2))
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    g = torch.Generator().manual_seed(rank + 70)
    vx = torch.randn(64, 10, generator=g)
    w = torch.linspace(-1, 1, 20).view(10, 2)
    stopper = EarlyStopping(args.patience, 0.03)
    for step in range(1, args.max_steps + 1):
        x = torch.randn(16, 10, generator=g)
        loss = nn.functional.mse_loss(model(x), x @ w)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 5 == 0:
            value = validate(net, vx, vx @ w)
            dist.all_reduce(value)
            if stopper(value.item() / world):
                break
    if rank == 0:
        print("stopped after", step, "best", stopper.best)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
