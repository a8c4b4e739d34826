"""Faults that tests plant to see them found; a default run has none."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Fault:
    """The config's ``fault``; ``step`` counts measured steps from 1."""

    kind: str = "none"
    step: int = 1
    rank: int | None = 0
    delay_ms: float = 0.0
    every: int = 1

    def check(self, *, steps: int, world_size: int) -> None:
        """Raise ValueError for a fault that could not happen in this run."""
        if self.kind != "none" and self.step > steps:
            raise ValueError(f"fault {self.kind!r} is at step {self.step} of {steps} measured steps")
        if self.kind != "none" and (self.rank or 0) >= world_size:
            raise ValueError(f"fault {self.kind!r} is on rank {self.rank}; ranks are 0..{world_size - 1}")

    def slows(self, step: int, rank: int) -> bool:
        """Whether this step of this rank is to be slow."""
        return self.kind == "slowdown" and self.rank in (None, rank) and step >= self.step and step % self.every == 0

    @torch.no_grad()
    def after_step(self, step: int, rank: int, model: nn.Module) -> None:
        """Change one weight if it is to change now."""
        if self.kind == "weight_ulp" and self.rank in (None, rank) and step == self.step:
            shards = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
            first = next(shard for shard in shards if shard.numel())
            # The next bit pattern is the next float.
            first.view(torch.int32).view(-1)[:1].add_(1)
