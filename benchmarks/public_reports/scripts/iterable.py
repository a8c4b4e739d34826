"""Streaming text data with DataLoader workers under DDP."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __init__(self, rank, world, length=20, docs=4096):
        self.rank, self.world, self.length, self.docs = rank, world, length, docs

    def __iter__(self):
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        part, parts = self.rank * workers + worker, self.world * workers
        for doc in range(self.docs):
            if doc % parts == part:
                g = torch.Generator().manual_seed(doc)
                yield torch.randint(0, 50, (self.length,), generator=g)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(31)
    model = DDP(nn.Sequential(nn.Embedding(50, 24), nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 50)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Stream(rank, world), batch_size=8, num_workers=2)
    for step, ids in enumerate(loader):
        if step == args.steps:
            break
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
    if rank == 0:
        print(f"loss {loss.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
