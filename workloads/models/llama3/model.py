"""Llama 3 (arXiv 2407.21783): grouped-query attention, rotary positions, SwiGLU."""

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle

from ..common.attention import SDPA
from ..common.decoder import Attention
from ..common.rope import apply_rope
from ..config import ModelConfig


class GroupedQueryAttention(Attention):
    """Causal grouped-query attention (arXiv 2305.13245): groups of query heads share key and value heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.attend = SDPA(config.attention)
        kv_dim = config.n_kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
        """Attend within each sequence of ``x`` ``[batch, seq_len, dim]``; return a tensor of the same shape."""
        # -1 for the heads: under tensor parallelism a rank holds a part of them.
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.wq, self.wk, self.wv))
        # Heads are rotated in the projected order, [batch, seq_len, heads, head_dim]. Attention's output has the memory
        # order of its inputs, so new tensors in attention's order would need a copy before wo.
        q, k = apply_rope(q, freqs_cis), apply_rope(k, freqs_cis)
        q, k, v = (projected.transpose(1, 2) for projected in (q, k, v))
        out: torch.Tensor = self.wo(self.attend(q, k, v).transpose(1, 2).flatten(-2))
        return out

    def tensor_plan(self) -> dict[str, ParallelStyle]:
        """Split heads."""
        return {"wq": ColwiseParallel(), "wk": ColwiseParallel(), "wv": ColwiseParallel()}
