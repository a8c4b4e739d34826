"""Activation checkpointing: the tensors that a block keeps for backward under each value of its config key."""

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

from . import flex  # noqa: F401 - defines the operator that is named below
from .experts import GROUPED_MMS

aten = torch.ops.aten
_MATMULS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default}) | GROUPED_MMS
_ATTENTION = frozenset(
    {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aorta.flex_attention.default,
    }
)


class EverySecondMatmul:
    """Keeps the outputs of attention and of every second matrix product of a block, and recomputes all others."""

    def __init__(self) -> None:
        # Forward and recomputation count separately, since both must make the same choices.
        self._num_matmuls = {False: 0, True: 0}

    def __call__(self, context: SelectiveCheckpointContext, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        """Decide whether the output of ``op`` is kept."""
        if op in _MATMULS:
            self._num_matmuls[context.is_recompute] += 1
            kept = self._num_matmuls[context.is_recompute] % 2 == 1
        else:
            kept = op in _ATTENTION
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def keep_every_matmul(_: SelectiveCheckpointContext, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    """Keep the outputs of attention and of all matrix products, and recompute all others."""
    return CheckpointPolicy.MUST_SAVE if op in _MATMULS | _ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE


def _elementwise_contexts() -> Any:
    return create_selective_checkpoint_contexts(keep_every_matmul)


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(EverySecondMatmul())


_CONTEXTS: dict[str, dict[str, Any]] = {
    "elementwise": {"context_fn": _elementwise_contexts},
    "selective": {"context_fn": _selective_contexts},
    "full": {},
}


def run_checkpointed(kind: str, block: Callable[..., torch.Tensor], *args: torch.Tensor) -> torch.Tensor:
    """Run ``block``; ``none`` keeps all tensors for backward, ``full`` only inputs, and other kinds some outputs."""
    if kind == "none":
        return block(*args)
    if kind not in _CONTEXTS:
        raise ValueError(f"activation_checkpointing is {kind!r}, allowed are none, {', '.join(_CONTEXTS)}")
    # The model has no dropout, so there is no random state to keep.
    options = {"use_reentrant": False, "preserve_rng_state": False, **_CONTEXTS[kind]}
    out: torch.Tensor = checkpoint(block, *args, **options)
    return out
