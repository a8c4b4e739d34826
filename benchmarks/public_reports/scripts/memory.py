"""PPO-like policy training with DDP; collects statistics of an epoch."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=60)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(4)
    model = DDP(nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8)))
    opt = torch.optim.Adam(model.parameters(), lr=3e-4)
    g = torch.Generator().manual_seed(rank)
    total_loss, entropies = 0, []
    for _step in range(args.steps):
        obs = torch.randn(2048, 64, generator=g)
        act = torch.randint(0, 8, (2048,), generator=g)
        dist_ = torch.distributions.Categorical(logits=model(obs))
        entropy = dist_.entropy().mean()
        loss = -(dist_.log_prob(act) * obs.mean(1)).mean() - 0.01 * entropy
        entropies.append(entropy.detach())
        opt.zero_grad()
        loss.backward()
        opt.step()
        total_loss += loss.detach()
        # a diagnostic on the updated policy
        kl = torch.distributions.kl_divergence(dist_, torch.distributions.Categorical(logits=model.module(obs))).mean()
        entropies.append(kl.detach())
    if rank == 0:
        print("mean loss", float(total_loss) / args.steps, "mean statistic", float(torch.stack(entropies).mean()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
