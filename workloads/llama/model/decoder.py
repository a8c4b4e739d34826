"""A decoder of the shape of Llama 3 (arXiv 2407.21783): RMSNorm, rotary positions, grouped-query attention, SwiGLU.

The output matrix is not tied to the embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .attention import Attend
from .checkpointing import run_checkpointed
from .chunked_loss import Output
from .experts import MoeFeedForward


@dataclass(frozen=True)
class LlamaConfig:
    """The model's dimensions; every field is a config key of the workload.

    ``attention`` names a kernel of :class:`Attend`, and ``rotary`` is the form of :meth:`rotations`, ``real`` or
    ``complex``; a workload replaces ``auto`` of both before it builds the model.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_hidden: int
    vocab_size: int
    rope_theta: float
    norm_eps: float
    attention: str = "flash"
    activation_checkpointing: str = "none"
    rotary: str = "real"
    num_experts: int = 0
    experts_per_token: int = 2

    def __post_init__(self) -> None:
        """Raise ValueError if one dimension does not divide another as it must."""
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads is {self.n_heads}, not a multiple of n_kv_heads {self.n_kv_heads}")
        if self.dim % (2 * self.n_heads):
            raise ValueError(f"dim is {self.dim}, not a multiple of 2 x n_heads: rotary positions turn pairs")

    @property
    def head_dim(self) -> int:
        """Return the width of one head."""
        return self.dim // self.n_heads

    def rotations(self, positions: torch.Tensor) -> torch.Tensor:
        """Return :func:`rope_rotations` of ``positions`` ``[n]`` for this model's heads, in the form of ``rotary``."""
        rotations = rope_rotations(positions, self.head_dim, self.rope_theta)
        return torch.complex(*rotations) if self.rotary == "complex" else rotations


def rope_rotations(positions: torch.Tensor, head_dim: int, theta: float) -> torch.Tensor:
    """Return cosines and sines of every pair's angle at ``positions`` ``[n]``, float32 ``[2, n, head_dim / 2]``.

    The angle of pair ``i`` at ``position`` is ``position * theta ** (-2 * i / head_dim)`` (RoFormer, arXiv 2104.09864).
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = torch.outer(positions.float(), theta**-exponents)
    return torch.stack((angles.cos(), angles.sin()))


def apply_rope(x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """Rotate each pair of adjacent features of ``[..., seq_len, heads, head_dim]`` by its angle, in float32.

    ``rotations`` are cosines and sines ``[2, seq_len, head_dim / 2]``, or complex numbers ``[seq_len, head_dim / 2]``.
    One product of complex numbers takes less memory traffic than four of real ones, but inductor fuses only the latter.
    """
    pairs = x.float().unflatten(-1, (-1, 2))
    if rotations.is_complex():
        turned = torch.view_as_complex(pairs) * rotations.unsqueeze(-2)
        return torch.view_as_real(turned).flatten(-2).type_as(x)
    even, odd = pairs.unbind(-1)
    cos, sin = rotations.unsqueeze(-2)
    # Both halves are rounded before they are joined, so that the joined tensor is written once, in the dtype of x.
    turned_even, turned_odd = (even * cos - odd * sin).type_as(x), (even * sin + odd * cos).type_as(x)
    return torch.stack((turned_even, turned_odd), dim=-1).flatten(-2)


class Attention(nn.Module):
    """Causal grouped-query attention (arXiv 2305.13245): groups of query heads share key and value heads.

    ``attend`` maps queries, keys and values ``[batch, heads, seq_len, head_dim]`` to the attention output.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = Attend(config.attention)
        kv_dim = config.n_kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        """Attend within each sequence of ``x`` ``[batch, seq_len, dim]``; return a tensor of the same shape."""
        # -1 for the heads: under tensor parallelism a rank holds a part of them.
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.wq, self.wk, self.wv))
        # Heads are rotated in the projected order, [batch, seq_len, heads, head_dim]. Attention's output has the memory
        # order of its inputs, so new tensors in attention's order would need a copy before wo.
        q, k = apply_rope(q, rotations), apply_rope(k, rotations)
        q, k, v = (projected.transpose(1, 2) for projected in (q, k, v))
        out: torch.Tensor = self.wo(self.attend(q, k, v).transpose(1, 2).flatten(-2))
        return out


class FeedForward(nn.Module):
    """A SwiGLU feed-forward (arXiv 2002.05202).

    The matrices ``w1`` and ``w3`` are ``[ffn_hidden, dim]``, and ``w2`` is ``[dim, ffn_hidden]``.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_hidden, bias=False)
        self.w2 = nn.Linear(config.ffn_hidden, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``w2(silu(w1(x)) * w3(x))``, of the shape of ``x``."""
        out: torch.Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


def _feed_forward(config: LlamaConfig) -> nn.Module:
    if not config.num_experts:
        return FeedForward(config)
    return MoeFeedForward(config.dim, config.ffn_hidden, config.num_experts, config.experts_per_token)


class Block(nn.Module):
    """One pre-norm transformer block.

    ``checkpointing`` is the kind of activation checkpointing, which may differ between blocks.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = _feed_forward(config)
        self.checkpointing = config.activation_checkpointing

    def forward(self, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        """Run the block on ``x`` ``[batch, seq_len, dim]``; ``checkpointing`` decides what is kept for backward."""
        # Checkpointing inside the module that FSDP wraps keeps parameter names, and FSDP has gathered the parameters
        # when backward recomputes.
        return run_checkpointed(self.checkpointing, self._run, x, rotations)

    def _run(self, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotations)
        out: torch.Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Llama(nn.Module):
    """Maps token ids ``[batch, seq_len]`` to logits ``[batch, seq_len, vocab_size]``, or with labels to the loss."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = Output(config.dim, config.vocab_size)

    def forward(
        self,
        tokens: torch.Tensor,
        rotations: torch.Tensor,
        labels: torch.Tensor | None = None,
        num_tokens: int = 1,
    ) -> torch.Tensor:
        """Predict each next token; ``rotations`` belong to the tokens' positions in their sequence.

        Given ``labels`` of the shape of ``tokens``, return their cross entropy, summed and divided by ``num_tokens``,
        instead of the logits. Then only the logits of one chunk exist at a time.

        Rotations are an argument, since a buffer would be lost on the meta device and rounded by mixed precision.
        """
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, rotations)
        x = self.norm(x)
        scored: torch.Tensor = self.output(x) if labels is None else self.output(x, labels, num_tokens)
        return scored
