"""The decision of ``activation_checkpointing: auto``: the same on every rank, and before training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..settings import MemorySettings
from .choice import Choice, choices, first_that_fits
from .step import StepMemory

_GIB = 1 << 30


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a rank's device in bytes; ``available`` is what no other process uses."""

    total: int
    available: int

    @classmethod
    def read(cls, device: torch.device) -> DeviceMemory | None:
        """Return the memory of a GPU; None for CPU ranks, which share the memory of their host."""
        if device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, free + torch.cuda.memory_reserved(device))


@dataclass(frozen=True)
class Decision:
    """A choice, the bytes that were estimated for it, the most of all ranks, and the bytes that were allowed."""

    choice: Choice
    estimate: int
    budget: int

    @property
    def metrics(self) -> dict[str, float]:
        """Return the bytes as metrics of the result."""
        return {"memory_estimate_bytes": float(self.estimate), "memory_budget_bytes": float(self.budget)}

    def __str__(self) -> str:
        """Return the decision as a sentence."""
        return (
            f"activation_checkpointing: auto chose {self.choice}; estimated {_gib(self.estimate)} of "
            f"{_gib(self.budget)} allowed"
        )


def own_budget(settings: MemorySettings, memory: DeviceMemory | None) -> int:
    """Return the bytes that the config allows this rank, no more than its device has available.

    Raises:
        ValueError: No device gives a total, and the config gives no bytes.
    """
    allowed = settings.memory_budget_bytes
    if memory is None:
        if allowed is None:
            raise ValueError(
                "activation_checkpointing is auto and memory_budget_bytes is null: CPU ranks have no device whose "
                "memory memory_fraction could be a fraction of; give memory_budget_bytes"
            )
        return allowed
    wanted = int(settings.memory_fraction * memory.total) if allowed is None else allowed
    return min(wanted, memory.available)


def decide(step: StepMemory, num_blocks: int, budget: int, device: torch.device) -> Decision:
    """Return the least recomputation that fits the smallest budget of all ranks; collective over the world.

    Args:
        step: the memory of this rank's step.
        num_blocks: the blocks of the whole model, which a pipeline's stages divide.
        budget: the bytes that this rank is allowed.
        device: the device that collectives run on.

    Raises:
        ValueError: Even recomputing every block needs more than the budget.
    """
    candidates = choices(num_blocks)
    needed = [step.peak([candidate.kind(block) for block in step.blocks]) for candidate in candidates]
    most = torch.tensor([-budget, *needed], dtype=torch.int64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    negative, *estimates = most.tolist()
    budget = -negative
    position = first_that_fits(estimates, budget)
    if position is None:
        raise ValueError(
            f"activation_checkpointing is auto, and even full recomputation of all {num_blocks} blocks needs an "
            f"estimated {_gib(estimates[-1])} on one rank, of {_gib(budget)} allowed. On this rank, parameters, "
            f"gradients and optimizer state take {_gib(step.persistent)} of it. Use more ranks, a smaller batch_size "
            f"or seq_len, loss_chunks, or a larger memory_fraction or memory_budget_bytes"
        )
    return Decision(candidates[position], estimates[position], budget)


def _gib(size: int) -> str:
    return f"{size / _GIB:.4g} GiB" if size >= _GIB // 10 else f"{size / (1 << 20):.4g} MiB"
