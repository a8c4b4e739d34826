"""Activation checkpointing: the tensors that a block keeps for backward under each value of its config key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ..models.common import flex  # noqa: F401 - defines the operator that is named below
from ..models.common.decoder import Decoder
from ..models.common.moe import GROUPED_MMS

aten, collectives = torch.ops.aten, torch.ops._c10d_functional
_MATMULS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten._scaled_mm.default}) | GROUPED_MMS
# The outputs of these are always kept: of attention, and of the collectives whose output is a rank's own tokens.
# All-gathers are not among them; the output of one is larger, and some of them gather parameters.
_KEPT = frozenset(
    {
        collectives.all_to_all_single.default,
        collectives.reduce_scatter_tensor.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aorta.flex_attention.default,
    }
)


class EverySecondMatmul:
    """Keeps what :func:`keep_every_matmul` keeps, but only every second matrix product of a block."""

    def __init__(self) -> None:
        # Forward and recomputation count separately, since both must make the same choices.
        self._num_matmuls = {False: 0, True: 0}

    def __call__(self, context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Decide whether the output of ``op`` is kept."""
        if op in _MATMULS:
            self._num_matmuls[context.is_recompute] += 1
            if self._num_matmuls[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return keep_every_matmul(context, op, *args, **kwargs)


def keep_every_matmul(_: SelectiveCheckpointContext, op: Any, *__: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the outputs of attention, matrix products and exchanges of activations, and recompute all others."""
    # The host waits for a copy from its device, as for the number of exchanged tokens.
    is_read_on_host = op is aten._to_copy.default and kwargs.get("device") == torch.device("cpu")
    kept = op in _MATMULS or op in _KEPT or is_read_on_host
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


_CONTEXTS: dict[str, dict[str, Any]] = {
    "elementwise": {"context_fn": lambda: create_selective_checkpoint_contexts(keep_every_matmul)},
    "selective": {"context_fn": lambda: create_selective_checkpoint_contexts(EverySecondMatmul())},
    "full": {},
}


def checkpoint_blocks(model: Decoder, choice: Choice) -> None:
    """Have each block of ``model`` run under its kind of checkpointing; blocks are named by their number."""
    for name, block in model.layers.named_children():
        block.checkpoint = checkpointed(choice.kind(int(name)))  # type: ignore[assignment]


@cache
def checkpointed(kind: str) -> Callable[..., torch.Tensor]:
    """Return the value of ``Block.checkpoint``, one for all blocks, since torch.compile would compile for each anew."""
    return partial(run_checkpointed, kind)


def run_checkpointed(kind: str, block: Callable[..., torch.Tensor], *args: torch.Tensor) -> torch.Tensor:
    """Run ``block``; ``none`` keeps all tensors for backward, ``full`` only inputs, and other kinds some outputs."""
    if kind == "none":
        return block(*args)
    # The model has no dropout, so there is no random state to keep.
    options = {"use_reentrant": False, "preserve_rng_state": False, **_CONTEXTS[kind]}
    out: torch.Tensor = checkpoint(block, *args, **options)
    return out


# From the least recomputation to the most.
LADDER = ("none", "elementwise", "selective", "full")


@dataclass(frozen=True)
class Choice:
    """A kind of checkpointing for the first ``num_more`` of ``num_blocks`` blocks, and another kind for the rest.

    The first blocks are recomputed last. By then backward has freed the activations of all other blocks, so the memory
    of the recomputation does not add to the peak.
    """

    more: str
    less: str
    num_more: int
    num_blocks: int

    def kind(self, block: int) -> str:
        """Return the kind of block number ``block``, from 0."""
        return self.more if block < self.num_more else self.less

    def __str__(self) -> str:
        """Return the kinds, each with its number of blocks."""
        if self.num_more in (0, self.num_blocks):
            return f"{self.kind(0)} on all {self.num_blocks} blocks"
        rest = self.num_blocks - self.num_more
        return f"{self.more} on {self.num_more} of {self.num_blocks} blocks, {self.less} on {rest}"


def same_on_all(kind: str, num_blocks: int) -> Choice:
    """Return the choice of one kind for all blocks."""
    return Choice(kind, kind, num_blocks, num_blocks)


def choices(num_blocks: int) -> list[Choice]:
    """Return all choices from the least recomputation to the most.

    A kind is used on every block before the next kind is used on any: each kind frees fewer bytes per recomputed
    operation than the kind before it.
    """
    partial = [
        Choice(more, less, number, num_blocks) for less, more in pairwise(LADDER) for number in range(1, num_blocks + 1)
    ]
    return [same_on_all(LADDER[0], num_blocks), *partial]
