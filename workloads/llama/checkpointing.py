"""What a block keeps for backward under each value of ``activation_checkpointing``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

aten = torch.ops.aten
_MATMULS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten._grouped_mm.default})
_ATTENTION = frozenset(
    {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)


class EverySecondMatmul:
    """Keeps attention and every second matrix product of a block; the rest is cheap, or half of what costs memory."""

    def __init__(self) -> None:
        # Forward and recomputation each count their own: both have to come to the same choice.
        self._num_matmuls = {False: 0, True: 0}

    def __call__(self, context: SelectiveCheckpointContext, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        """Say whether the output of ``op`` is kept."""
        if op in _MATMULS:
            self._num_matmuls[context.is_recompute] += 1
            kept = self._num_matmuls[context.is_recompute] % 2 == 1
        else:
            kept = op in _ATTENTION
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(EverySecondMatmul())


_CONTEXTS: dict[str, dict[str, Any]] = {"selective": {"context_fn": _selective_contexts}, "full": {}}


def run_checkpointed(kind: str, block: Callable[..., torch.Tensor], *args: torch.Tensor) -> torch.Tensor:
    """Run ``block`` and keep for backward what ``kind`` says: ``none`` all, ``full`` its inputs, ``selective`` some."""
    if kind == "none":
        return block(*args)
    if kind not in _CONTEXTS:
        raise ValueError(f"activation_checkpointing is {kind!r}, allowed are none, {', '.join(_CONTEXTS)}")
    # There is no dropout, so there is no random state to keep.
    options = {"use_reentrant": False, "preserve_rng_state": False, **_CONTEXTS[kind]}
    out: torch.Tensor = checkpoint(block, *args, **options)
    return out
