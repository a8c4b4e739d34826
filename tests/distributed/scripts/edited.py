"""Trains under DDP with a loader; each argument ``name=value`` edits a line."""

import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

edits = dict(word.split("=") for word in sys.argv[1:])


def edited(name, value):
    return float(edits.get(name, value))


dist.init_process_group("gloo")
torch.manual_seed(int(edited("seed", 0)))
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(64, 16, generator=generator), torch.randn(64, 1, generator=generator))
sampler = DistributedSampler(data, seed=int(edited("sampler_seed", 0)))
loader = DataLoader(data, batch_size=int(edited("batch", 8)), sampler=sampler)
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(edited("dropout", 0.1)), torch.nn.Linear(32, 1))
model = torch.nn.parallel.DistributedDataParallel(net)
groups = [{"params": net[0].parameters()}, {"params": net[2].parameters(), "weight_decay": edited("decay", 0.01)}]
optimizer = torch.optim.AdamW(groups, lr=edited("lr", 0.01))
if edited("eval", 0):
    (model if edited("eval", 0) == 1 else net).eval()
for epoch in range(3):
    sampler.set_epoch(epoch * int(edited("set_epoch", 1)))
    for inputs, labels in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bool(edited("autocast", 1))):
            loss = torch.nn.functional.mse_loss(model(inputs), labels) * edited("scale", 1)
        loss.backward()
        if edited("clip", 1):
            torch.nn.utils.clip_grad_norm_(net.parameters(), edited("clip", 1))
        optimizer.step()
        if edited("zero_grad", 1):
            optimizer.zero_grad()
dist.destroy_process_group()
