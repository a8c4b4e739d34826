"""Activation checkpointing: the tensors that a block keeps for backward under each value of its config key."""

from collections import Counter
from collections.abc import Callable, Sequence
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


def checkpoint_blocks(model: Decoder, kinds: Sequence[str]) -> None:
    """Have each block of ``model`` run under its kind of checkpointing; blocks are named by their number."""
    for name, block in model.layers.named_children():
        block.checkpoint = checkpointed(kinds[int(name)])  # type: ignore[assignment]


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


def choices(num_blocks: int) -> list[tuple[str, ...]]:
    """Return the kinds of all blocks, from the least recomputation to the most.

    A kind is used on every block before the next kind is used on any: each kind frees fewer bytes per recomputed
    operation than the kind before it. The first blocks recompute more. They are recomputed last; by then backward has
    freed the activations of all other blocks, so the memory of the recomputation does not add to the peak.
    """
    mixed = [
        (more,) * number + (less,) * (num_blocks - number)
        for less, more in pairwise(LADDER)
        for number in range(1, num_blocks + 1)
    ]
    return [(LADDER[0],) * num_blocks, *mixed]


def describe(kinds: Sequence[str]) -> str:
    """Return the kinds of blocks in words, each with its number of blocks."""
    (first, number), *others = Counter(kinds).items()
    if not others:
        return f"{first} on all {number} blocks"
    return ", ".join([f"{first} on {number} of {len(kinds)} blocks", *(f"{kind} on {rest}" for kind, rest in others)])
