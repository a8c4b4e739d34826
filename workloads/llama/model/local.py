"""Values of tensors that all ranks of tensor parallelism hold."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Partial


def local_value(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's copy of a replicated DTensor; other tensors are returned as they are.

    Each rank computes a part of what follows from the copy, so that the gradient is the sum of all ranks' gradients.
    """
    return tensor.to_local(grad_placements=[Partial("sum")]) if isinstance(tensor, DTensor) else tensor
