"""A trainer class that saves a snapshot and goes on from it, as minGPT's DDP example does."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def batches(steps, size=16):
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        yield torch.randn(8, size, generator=generator)


class Trainer:
    def __init__(self):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.begin = 0
        if os.path.exists("snapshot.pt"):
            snapshot = torch.load("snapshot.pt", weights_only=True)
            self.begin = snapshot["epoch"]
            self.model.load_state_dict(snapshot["model"])
            self.optimizer.load_state_dict(snapshot["optimizer"])
        self.model = DistributedDataParallel(self.model)

    def train(self, epochs):
        for epoch in range(self.begin, epochs):
            for batch in batches(10):
                loss = (self.model(batch) - batch).square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
            if dist.get_rank() == 0:
                states = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}
                torch.save({"epoch": epoch + 1, **states}, "snapshot.pt")


dist.init_process_group("gloo")
Trainer().train(3)
dist.destroy_process_group()
