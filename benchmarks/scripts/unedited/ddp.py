"""DistributedDataParallel, as in PyTorch's first tutorial."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def batches(steps, size=16):
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        yield torch.randn(8, size, generator=generator)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for batch in batches(30):
    loss = (model(batch) - batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
