"""Trains under DDP on shards of unequal size, saves every few steps, and goes on from the last checkpoint."""

import argparse
import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--save-every", type=int, default=3)
parser.add_argument("--resume", type=Path)
parser.add_argument("--order", default="epoch")
arguments = parser.parse_args()

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
data = torch.randn(29, 9, generator=torch.Generator().manual_seed(0))
shard = data[rank::size]
generator = torch.Generator().manual_seed(7)
loader = DataLoader(TensorDataset(shard[:, :8], shard[:, 8:]), 4, sampler=RandomSampler(shard, generator=generator))
num_batches = math.ceil(len(data) / size / 4)
net = torch.nn.Sequential(
    torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)
)
model = torch.nn.parallel.DistributedDataParallel(net)
average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.9**done)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
parts = {"model": net, "average": average, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}


step, state = 0, None
if arguments.resume:
    folder = max(arguments.resume.glob("step-*"))
    state = torch.load(folder / f"rank-{rank}.pt")
    step = state["step"]
    for name, part in parts.items():
        part.load_state_dict(state[name])
while step < arguments.steps:
    epoch, position = divmod(step, num_batches)
    if arguments.order == "epoch":
        generator.manual_seed(7 + epoch)
    elif state:
        generator.set_state(state["generator"])
    before = generator.get_state()
    batches = iter(loader)
    for _ in range(position):
        next(batches)
    if state:
        torch.set_rng_state(state["random"])
        state = None
    for inputs, labels in batches:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = torch.nn.functional.mse_loss(model(inputs).float(), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        average.update_parameters(net)
        step += 1
        if step % arguments.save_every == 0:
            saved = {name: part.state_dict() for name, part in parts.items()}
            saved |= {"step": step, "generator": before, "random": torch.get_rng_state()}
            folder = Path("checkpoints") / f"step-{step:03}"
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(saved, folder / f"rank-{rank}.pt")
            dist.barrier()
        if step == arguments.steps:
            break
dist.destroy_process_group()
