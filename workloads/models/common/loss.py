"""The loss of one micro-batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy, summed over tokens in float32.

    ``logits`` are ``[batch, seq_len, vocab_size]``, ``labels`` ``[batch, seq_len]``.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")


def make_loss(compiled: bool) -> Loss:
    """Return the loss in eager operations, or fused by inductor.

    The fused loss keeps no float32 copy of the logits and rounds differently.
    """
    if not compiled:
        return summed_cross_entropy
    fused: Loss = torch.compile(summed_cross_entropy, fullgraph=True, dynamic=False)
    return fused
