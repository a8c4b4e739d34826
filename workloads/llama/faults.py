"""Faults that tests plant to prove that checks find them; a default run has none."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .bit_flips import BitFlip

OPERATOR_OUTPUT, OPERATOR_INPUT = "operator_output", "operator_input"


@dataclass(frozen=True)
class Fault:
    """The block ``fault`` of a config; ``step`` counts measured steps from 1."""

    kind: str = "none"
    step: int = 1
    rank: int | None = 0
    delay_ms: float = 0.0
    every: int = 1
    operator: str = ""
    call: int = 1

    def check(self, *, steps: int, world_size: int) -> None:
        """Raise ValueError if the fault could not happen in this run."""
        if self.kind != "none" and self.step > steps:
            raise ValueError(f"fault {self.kind!r} is at step {self.step} of {steps} measured steps")
        if self.kind != "none" and (self.rank or 0) >= world_size:
            raise ValueError(f"fault {self.kind!r} is on rank {self.rank}; ranks are 0..{world_size - 1}")
        if self.kind in (OPERATOR_OUTPUT, OPERATOR_INPUT) and not self.operator:
            raise ValueError(f"fault {self.kind!r} names no operator; give its name, such as 'aten.mm.default'")

    def slows(self, step: int, rank: int) -> bool:
        """Return whether this step is slow on this rank."""
        return self.kind == "slowdown" and self.rank in (None, rank) and step >= self.step and step % self.every == 0

    def gradient_scale(self, step: int, rank: int) -> float:
        """Return the factor of this rank's part of the gradients in this step; 0 drops the part."""
        return 0.0 if self.kind == "drop_gradient" and rank == self.rank and step == self.step else 1.0

    def flips(self, kind: str, step: int, rank: int) -> AbstractContextManager[object]:
        """Return the context of a step in which a bit flips, if the fault is of ``kind`` in this step on this rank."""
        if self.kind != kind or step != self.step or self.rank not in (None, rank):
            return nullcontext()
        return BitFlip(self.operator, self.call, of_input=kind == OPERATOR_INPUT)

    @torch.no_grad()
    def after_step(self, step: int, rank: int, model: nn.Module) -> None:
        """Change weights if the fault changes them after this step."""
        if self.rank not in (None, rank) or step != self.step:
            return
        shards = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
        if self.kind == "weight_ulp":
            first = next(shard for shard in shards if shard.numel())
            # The next bit pattern is the next float.
            first.view(torch.int32).view(-1)[:1].add_(1)
        elif self.kind == "read_uninitialized":
            first = next(shard for shard in shards if shard.numel())
            first.view(-1)[:1].add_(torch.empty(1, dtype=first.dtype, device=first.device))
        elif self.kind == "swap_shards":
            _swap(*_first_interchangeable(shards))


def _first_interchangeable(shards: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first two shards of one shape whose values differ; weights of untrained norms are all equal."""
    for number, one in enumerate(shards):
        for other in shards[number + 1 :]:
            if one.shape == other.shape and not torch.equal(one, other):
                return one, other
    raise RuntimeError("fault 'swap_shards': no two shards on this rank have the same shape and other values")


def _swap(one: torch.Tensor, other: torch.Tensor) -> None:
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)
