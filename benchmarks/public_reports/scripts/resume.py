"""DDP with checkpoints: resumes in the middle of an epoch from ckpt.pt if there is one."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--save-every", type=int, default=9)
    p.add_argument("--ckpt", default="ckpt.pt")
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    sched = torch.optim.lr_scheduler.StepLR(opt, 6, gamma=0.7)
    step = 0
    if os.path.exists(args.ckpt):
        state = torch.load(args.ckpt, weights_only=True)
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        sched.load_state_dict(state["sched"])
        step = state["step"]
        if rank == 0:
            print("resumed at", step)
    dist.barrier()
    ddp = DDP(model)
    g = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(96, 8, generator=g), torch.randint(0, 3, (96,), generator=g))
    sampler = DistributedSampler(data, seed=2)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    per_epoch = len(loader)
    epoch, skip = divmod(step, per_epoch)
    while step < args.steps:
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            if i < skip:
                continue
            loss = nn.functional.cross_entropy(ddp(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            step += 1
            if step % args.save_every == 0 and rank == 0:
                torch.save(
                    {"model": model.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict(), "step": step},
                    args.ckpt,
                )
            if step >= args.steps:
                break
        skip = 0
        epoch += 1
    if rank == 0:
        print(f"step {step} loss {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
