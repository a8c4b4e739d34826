"""Llama-like decoder under FSDP2, in the manner of torchtitan's train.py."""

import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

VOCAB, DIM, HEADS, LAYERS, SEQUENCE, STEPS = 64, 32, 4, 2, 16, 24


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.attention_norm(x)).chunk(3, -1)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.silu(self.up(self.mlp_norm(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Text(Dataset):
    def __init__(self):
        self.tokens = torch.randint(0, VOCAB, (128, SEQUENCE + 1), generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, number):
        return self.tokens[number, :-1], self.tokens[number, 1:]


def factor(step):
    warm, end = 4, STEPS
    return (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / (end - warm)))


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(1)
    model = Decoder()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for number, layer in enumerate(model.layers):
        model.layers[number] = checkpoint_wrapper(layer)
        fully_shard(model.layers[number], mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    named = list(model.named_parameters())
    groups = [
        {"params": [part for name, part in named if "norm" not in name], "weight_decay": 0.1},
        {"params": [part for name, part in named if "norm" in name], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    sampler = DistributedSampler(Text(), size, rank, shuffle=True, seed=0)
    loader = DataLoader(Text(), batch_size=4, sampler=sampler, drop_last=True)
    step = 0
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for tokens, labels in loader:
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            if step % 8 == 0 and rank == 0:
                print(f"step {step} loss {loss.item():.4f}")
            if step == STEPS:
                dist.destroy_process_group()
                return


if __name__ == "__main__":
    main()
