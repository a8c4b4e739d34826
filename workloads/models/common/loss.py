"""The loss of one micro-batch."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy, summed over tokens in float32.

    ``logits`` are ``[batch, seq_len, vocab_size]``, ``labels`` ``[batch, seq_len]``.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")


@cache
def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` compiled by inductor; it keeps no float32 copy of logits, and rounds differently."""
    compiled: Callable[..., Any] = torch.compile(function, fullgraph=True, dynamic=False)
    return compiled
