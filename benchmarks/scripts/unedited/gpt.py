"""GPT under DDP in the manner of nanoGPT: accumulation, a rate set by hand, recomputed blocks, an evaluation."""

import math
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

settings = {"layers": 2, "width": 32, "heads": 2, "context": 16, "vocabulary": 64, "batch": 4, "steps": 22, "parts": 2}
peak, decay, clip = 2e-3, 0.1, 1.0


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop, self.heads = nn.Dropout(0.1), heads

    def forward(self, x):
        parts = self.attention(self.ln_1(x)).split(x.size(-1), dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.drop(self.projection(y))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, layers, width, heads, context, vocabulary):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.size(1)))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits = self.lm_head(self.ln_f(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches(data, seed):
    generator = torch.Generator().manual_seed(seed)
    context, size = settings["context"], settings["batch"]
    while True:
        at = torch.randint(len(data) - context - 1, (size,), generator=generator)
        yield torch.stack([data[i : i + context] for i in at]), torch.stack([data[i + 1 : i + context + 1] for i in at])


def rate(step):
    return peak * min(1, step / 5) * (0.55 + 0.45 * math.cos(math.pi * step / settings["steps"]))


@torch.no_grad()
def evaluate(model, batch):
    model.eval()
    loss = model(*batch)
    model.train()
    return loss


dist.init_process_group("gloo")
torch.manual_seed(1337 + dist.get_rank())
model = GPT(*(settings[name] for name in ("layers", "width", "heads", "context", "vocabulary")))
ddp = DistributedDataParallel(model)
matrices = [part for part in model.parameters() if part.dim() > 1]
vectors = [part for part in model.parameters() if part.dim() < 2]
groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95))
data = torch.randint(settings["vocabulary"], (4096,), generator=torch.Generator().manual_seed(0))
train, validation = batches(data[:3584], dist.get_rank()), batches(data[3584:], 99)
for step in range(1, settings["steps"] + 1):
    for group in optimizer.param_groups:
        group["lr"] = rate(step)
    for part in range(settings["parts"]):
        with nullcontext() if part == settings["parts"] - 1 else ddp.no_sync():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = ddp(*next(train)) / settings["parts"]
            loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if step % 11 == 0:
        print(step, evaluate(model, next(validation)).item())
dist.destroy_process_group()
