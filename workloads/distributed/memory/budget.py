"""Choices of checkpointing and unsharded blocks by available memory: equal on every rank, and made before training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...config import LlamaSettings, MemorySettings
from ..activation_checkpoint import Choice, choices, first_that_fits, same_on_all
from .step import StepMemory

_GIB = 1 << 30
# The values of keys that leave a choice open.
_OPEN = {"activation_checkpointing": "auto", "no_reshard_blocks": "null"}


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a rank's device in bytes; ``available`` excludes the bytes that other processes use."""

    total: int
    available: int

    @classmethod
    def read(cls, device: torch.device) -> DeviceMemory | None:
        """Return the memory of an accelerator; None for CPU ranks, which share the memory of their host."""
        if device.type == "cpu":
            return None
        free, total = torch.accelerator.get_memory_info(device)
        return cls(total, free + torch.accelerator.memory_reserved(device))


@dataclass(frozen=True)
class Options:
    """The variants of a step among which the available memory decides.

    Attributes:
        checkpointing: choices of activation checkpointing, from the least recomputation to the most.
        unsharded: numbers of blocks that may keep gathered parameters, 0 or the only number first.
        num_blocks: number of blocks of the whole model, which the stages of a pipeline divide among them.
    """

    checkpointing: tuple[Choice, ...]
    unsharded: tuple[int, ...]
    num_blocks: int

    @classmethod
    def of(cls, settings: LlamaSettings) -> Options:
        """Return the variants that the config leaves open."""
        num_blocks, communication = settings.model.n_layers, settings.communication
        checkpointing = [same_on_all(settings.activation_checkpointing, num_blocks)]
        unsharded = communication.no_reshard_blocks
        return cls(
            tuple(choices(num_blocks) if settings.chooses_checkpointing else checkpointing),
            tuple(communication.whole_buckets(num_blocks)) if unsharded is None else (unsharded,),
            num_blocks,
        )


@dataclass(frozen=True)
class Decision:
    """A decision by memory.

    Attributes:
        choice: the activation checkpointing.
        unsharded: the number of last blocks that keep gathered parameters.
        facts: config key that left a choice open -> the decision, as text for the result.
        estimate: estimated peak in bytes, the largest of all ranks.
        budget: allowed bytes, the smallest number of all ranks.
    """

    choice: Choice
    unsharded: int
    facts: Mapping[str, str]
    estimate: int
    budget: int

    @property
    def metrics(self) -> dict[str, float]:
        """Return the bytes as metrics of the result."""
        return {"memory_estimate_bytes": float(self.estimate), "memory_budget_bytes": float(self.budget)}

    def __str__(self) -> str:
        """Return the decision as a sentence."""
        chosen = ", ".join(f"{key}: {_OPEN[key]} chose {fact}" for key, fact in self.facts.items())
        return f"{chosen}; estimated {_gib(self.estimate)} of {_gib(self.budget)} allowed"


def own_budget(settings: MemorySettings, memory: DeviceMemory | None) -> int:
    """Return the bytes that the config allows this rank, at most the available bytes of its device.

    Raises:
        ValueError: The rank has no device with memory of its own, and ``memory_budget_bytes`` is None.
    """
    allowed = settings.memory_budget_bytes
    if memory is None:
        if allowed is None:
            raise ValueError(
                "activation_checkpointing auto and no_reshard_blocks null need a budget, and memory_budget_bytes is "
                "null: CPU ranks have no device whose memory memory_fraction could be a fraction of; give "
                "memory_budget_bytes"
            )
        return allowed
    wanted = int(settings.memory_fraction * memory.total) if allowed is None else allowed
    return min(wanted, memory.available)


def decide(step: StepMemory, options: Options, budget: int, device: torch.device) -> Decision:
    """Return the least recomputation that fits the smallest budget of all ranks, then the most unsharded blocks.

    Collective over the world. Recomputation costs compute, but gathering again mostly costs communication that compute
    hides, so memory goes to activations first. If the config fixes the checkpointing and nothing fits, no block is kept
    unsharded.

    Args:
        step: the memory of this rank's step.
        options: the variants that the config leaves open.
        budget: the bytes that this rank is allowed.
        device: the device that collectives run on.

    Raises:
        ValueError: The checkpointing is left open, and even recomputing every block needs more than the budget.
    """
    fewest = step.keeping(options.unsharded[0])
    needed = [fewest.peak([choice.kind(block) for block in step.blocks]) for choice in options.checkpointing]
    negative, *estimates = _most_of_ranks([-budget, *needed], device)
    budget = -negative
    position = first_that_fits(estimates, budget)
    is_open = len(options.checkpointing) > 1
    if position is None and is_open:
        raise ValueError(
            f"activation_checkpointing is auto, and even full recomputation of all {options.num_blocks} blocks needs "
            f"an estimated {_gib(estimates[-1])} on one rank, of {_gib(budget)} allowed. On this rank, parameters, "
            f"gradients and optimizer state take {_gib(step.persistent)} of it. Use more ranks, a smaller batch_size "
            f"or seq_len, loss_chunks, or a larger memory_fraction or memory_budget_bytes"
        )
    choice = options.checkpointing[position or 0]
    kinds = [choice.kind(block) for block in step.blocks]
    # From the most unsharded blocks to the fewest; if no number fits, the fewest are used.
    numbers = options.unsharded[::-1]
    estimates = _most_of_ranks([step.keeping(number).peak(kinds) for number in numbers], device)
    kept = first_that_fits(estimates, budget)
    kept = len(numbers) - 1 if kept is None else kept
    facts = {"activation_checkpointing": str(choice)} if is_open else {}
    if len(numbers) > 1:
        facts["no_reshard_blocks"] = f"{numbers[kept]} of {options.num_blocks}"
    return Decision(choice, numbers[kept], facts, estimates[kept], budget)


def _most_of_ranks(values: list[int], device: torch.device) -> list[int]:
    most = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    reduced: list[int] = most.tolist()
    return reduced


def _gib(size: int) -> str:
    return f"{size / _GIB:.4g} GiB" if size >= _GIB // 10 else f"{size / (1 << 20):.4g} MiB"
