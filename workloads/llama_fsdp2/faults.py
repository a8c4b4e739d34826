"""Faults that tests plant to see them found; a default run has none."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Fault:
    """The config's ``fault``; ``step`` counts measured steps from 1."""

    kind: str = "none"
    step: int = 1
    rank: int = 0
    delay_ms: float = 0.0

    def check(self, *, steps: int, world_size: int) -> None:
        """Raise ValueError for a fault that could not happen in this run."""
        if self.kind != "none" and self.step > steps:
            raise ValueError(f"fault {self.kind!r} is at step {self.step} of {steps} measured steps")
        if self.kind != "none" and self.rank >= world_size:
            raise ValueError(f"fault {self.kind!r} is on rank {self.rank}; ranks are 0..{world_size - 1}")

    def within_step(self, step: int, rank: int, device: torch.device) -> None:
        """Delay the step if it is to be slow."""
        if self.kind == "slowdown" and rank == self.rank and step >= self.step:
            if device.type == "cuda":
                # Work already enqueued would hide the delay.
                torch.cuda.synchronize(device)
            time.sleep(self.delay_ms / 1e3)

    @torch.no_grad()
    def after_step(self, step: int, rank: int, model: nn.Module) -> None:
        """Change one weight if it is to change now."""
        if self.kind == "weight_ulp" and rank == self.rank and step == self.step:
            shards = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
            first = next(shard for shard in shards if shard.numel())
            # The next bit pattern is the next float.
            first.view(torch.int32).view(-1)[:1].add_(1)
