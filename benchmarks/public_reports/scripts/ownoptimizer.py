"""DDP with a distributed Muon: each rank orthogonalises its share of the matrices, then shares the result."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


def orthogonalize(m, rounds=4):
    x = m / (m.norm() + 1e-7)
    if m.shape[0] > m.shape[1]:
        x = x.T
    for _ in range(rounds):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x.T if m.shape[0] > m.shape[1] else x


class Muon:
    """Not a torch optimizer: a plain class, as in speed-run code."""

    def __init__(self, params, lr=0.02, momentum=0.95):
        self.param_groups, self.state = [{"params": list(params), "lr": lr, "momentum": momentum}], {}
        for p in self.param_groups[0]["params"]:
            self.state[p] = {}

    @torch.no_grad()
    def step(self):
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            params = group["params"]
            for base in range(0, len(params), world):
                mine = base + rank
                if mine < len(params):
                    p = params[mine]
                    buf = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                    buf.lerp_(p.grad, 1 - group["momentum"])
                    p.add_(orthogonalize(buf), alpha=-group["lr"])
                for owner in range(min(world, len(params) - base)):
                    dist.broadcast(params[base + owner].data, src=owner)

    def gather_state(self):
        """Sends each buffer from its owner to all ranks, for a checkpoint of rank 0."""
        world = dist.get_world_size()
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                buf = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                dist.broadcast(buf, src=i % world)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--save")
    p.add_argument("--load")
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
    opts = [Muon([p for p in net.parameters() if p.ndim == 2])]
    start = 0
    model = DDP(net)
    for step in range(start, args.steps):
        g = torch.Generator().manual_seed(1000 * rank + step)
        x = torch.randn(8, 16, generator=g)
        loss = (model(x) - x.flip(1)).pow(2).mean()
        model.zero_grad()
        loss.backward()
        for opt in opts:
            opt.step()
    if rank == 0:
        print(f"loss {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
