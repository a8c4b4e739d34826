"""FSDP2 language model with tied embeddings, materialised from the meta device."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.mix = nn.Linear(d, d)

    def forward(self, x):
        return x + torch.tanh(self.mix(self.norm(x)))


class LM(nn.Module):
    def __init__(self, vocab=96, d=32, layers=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(Layer(d) for _ in range(layers))
        self.lm_head = nn.Linear(d, vocab, bias=False)
        self.tie()

    def tie(self):
        self.lm_head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=32)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(21)
    full = LM().state_dict()  # stands for the checkpoint; has lm_head.weight as an alias
    with torch.device("meta"):
        model = LM()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    model.tie()
    set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    g = torch.Generator().manual_seed(rank)
    for _step in range(args.steps):
        ids = torch.randint(0, 96, (4, 16), generator=g)
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
    if rank == 0:
        print(f"done, loss {loss.item():.4f}, parameters {sum(p.numel() for p in model.parameters())}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
