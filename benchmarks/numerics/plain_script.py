"""A training loop without a wrapper of any kind: ``plain_script.py STEPS FAULT CAPTURED``.

``FAULT`` is the block ``fault`` of a workload's config, as JSON. It has one more kind, ``unwaited``: a rank reads its
gradients before their all-reduces have ended. ``CAPTURED`` is the step whose operators are captured; 0 captures none.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import repeat

import torch
import torch.distributed as dist
import torch.nn.functional as F
from aorta_workloads.common.faults import Fault
from torch import nn

from pytest_aorta.worker import OperatorCapture, RankEnv, hash_parameters, recorder

# A rank that does not wait reads the result long before the other ranks have entered the collective.
LATE_S = 0.1


class Block(nn.Module):
    """Masked attention and a feed-forward, each after a norm."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the block's output for ``[batch, position, dim]``."""
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*heads, attn_mask=mask)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        grown: torch.Tensor = self.down(F.silu(self.up(self.feed_forward_norm(x))))
        return x + grown


def main() -> None:
    """Train ``STEPS`` steps; sum gradients over ranks by hand, undo a loss scale, clip and step."""
    fault, captured_step = Fault(**json.loads(sys.argv[2])), int(sys.argv[3])
    env = RankEnv.read()
    device = env.join("plain_script")
    torch.manual_seed(0)
    embedding, block, head = nn.Embedding(64, 32), Block(32, 4), nn.Linear(32, 64)
    model = nn.ModuleDict({"embedding": embedding, "block": block, "head": head}).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    capture = OperatorCapture(model)
    random = torch.Generator().manual_seed(env.rank)
    recorder.start(device)
    drawn = (torch.randint(64, size, generator=random) for size in repeat((4, 17)))
    given = fault.given(drawn, env.rank, warmup=0)
    for step in range(1, int(sys.argv[1]) + 1):
        host = next(given)
        captured = capture if step == captured_step else None
        with fault.planted(step, env.rank, model, optimizer, captured), recorder.step():
            tokens = host.to(device, copy=True)
            mask = torch.zeros(16, 16, device=device).masked_fill_(
                torch.ones(16, 16, dtype=torch.bool, device=device).triu(1), -torch.inf
            )
            optimizer.zero_grad()
            logits = head(block(embedding(tokens[:, :-1]), mask))
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            (loss * 1024).backward()
            is_race = (fault.kind, fault.step) == ("unwaited", step)
            if is_race and env.rank != fault.rank:
                time.sleep(LATE_S)
            works = [dist.all_reduce(parameter.grad, async_op=True) for parameter in model.parameters()]
            for parameter, work in zip(model.parameters(), works, strict=True):
                if not (is_race and env.rank == fault.rank):
                    work.wait()
                assert parameter.grad is not None
                parameter.grad.div_(1024 * env.world_size)
            recorder.grad_norm(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        recorder.loss(total)
        recorder.weight_hash(step, hash_parameters(model.named_parameters()).hex)


main()
