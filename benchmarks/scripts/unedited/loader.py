"""A loader with workers and a distributed sampler; no seed and no call for determinism."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

if __name__ == "__main__":
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(480, 16))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data), num_workers=2)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for (batch,) in loader:
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()
