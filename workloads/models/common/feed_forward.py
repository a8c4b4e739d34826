"""A SwiGLU feed-forward."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel

from .dtensors import SEQUENCE


class FeedForward(nn.Module):
    """A SwiGLU feed-forward (arXiv 2002.05202).

    The matrices ``w1`` and ``w3`` are ``[hidden, dim]``, and ``w2`` is ``[dim, hidden]``.
    """

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``w2(silu(w1(x)) * w3(x))``, of the shape of ``x``."""
        out: torch.Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out

    def tensor_plan(self) -> dict[str, ParallelStyle]:
        """Return how tensor parallelism splits the modules, by name, from activations split along the sequence."""
        return {
            "": PrepareModuleInput(input_layouts=(SEQUENCE,), desired_input_layouts=(Replicate(),)),
            ".w1": ColwiseParallel(),
            ".w2": RowwiseParallel(output_layouts=SEQUENCE),
            ".w3": ColwiseParallel(),
        }
