"""A decoder of the shape of Llama 3 (arXiv 2407.21783): RMSNorm, rotary positions, grouped-query attention, SwiGLU.

With latent attention and a mixture of experts, the decoder has the shape of DeepSeek-V3 (arXiv 2412.19437). The output
matrix is not tied to the embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from .attention import SDPA
from .checkpointing import run_checkpointed
from .chunked_loss import Output
from .experts import MixtureConfig, MoeFeedForward
from .feed_forward import FeedForward
from .latent import LatentAttention, LatentConfig
from .loss import summed_cross_entropy
from .rotary import apply_rope, rope_rotations


@dataclass(frozen=True)
class LlamaConfig:
    """The model's dimensions; every field is a config key of the workload.

    ``attention`` names a kernel of :class:`SDPA`, and ``rotary`` is the form of :meth:`freqs_cis`, ``real`` or
    ``complex``; a workload replaces ``auto`` of both before it builds the model. ``mixture`` and ``latent`` group keys.
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
    top_k: int = 2
    mixture: MixtureConfig = field(default_factory=MixtureConfig)
    latent: LatentConfig = field(default_factory=LatentConfig)

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

    @property
    def key_dim(self) -> int:
        """Return the width of one head's keys, which is that of queries too."""
        return self.head_dim + self.latent.qk_rope_head_dim

    @property
    def num_key_heads(self) -> int:
        """Return the number of heads of keys and values that attention takes."""
        return self.n_heads if self.latent.kv_lora_rank else self.n_kv_heads

    def freqs_cis(self, positions: torch.Tensor) -> torch.Tensor:
        """Return :func:`rope_rotations` of ``positions`` ``[n]`` for this model's heads, in the form of ``rotary``."""
        freqs_cis = rope_rotations(positions, self.latent.qk_rope_head_dim or self.head_dim, self.rope_theta)
        return torch.complex(*freqs_cis) if self.rotary == "complex" else freqs_cis


class Attention(nn.Module):
    """Causal grouped-query attention (arXiv 2305.13245): groups of query heads share key and value heads.

    ``attend`` maps queries, keys and values ``[batch, heads, seq_len, head_dim]`` to the attention output.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = SDPA(config.attention)
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


def _attention(config: LlamaConfig) -> nn.Module:
    if not config.latent.kv_lora_rank:
        return Attention(config)
    return LatentAttention(
        config.dim, config.n_heads, config.head_dim, config.latent, norm_eps=config.norm_eps, kernel=config.attention
    )


def _feed_forward(config: LlamaConfig, number: int) -> nn.Module:
    mixture = config.mixture
    if not config.num_experts or number < mixture.n_dense_layers:
        return FeedForward(config.dim, config.ffn_hidden)
    hidden = mixture.moe_inter_dim or config.ffn_hidden
    return MoeFeedForward(config.dim, hidden, config.num_experts, config.top_k, mixture)


class Block(nn.Module):
    """One pre-norm transformer block, with its number in the model.

    ``checkpointing`` is the kind of activation checkpointing, which may differ between blocks.
    """

    def __init__(self, config: LlamaConfig, number: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = _attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = _feed_forward(config, number)
        self.checkpointing = config.activation_checkpointing

    def forward(self, x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
        """Run the block on ``x`` ``[batch, seq_len, dim]``; ``checkpointing`` decides what is kept for backward."""
        # Checkpointing inside the module that FSDP wraps keeps parameter names, and FSDP has gathered the parameters
        # when backward recomputes.
        return run_checkpointed(self.checkpointing, self._run, x, freqs_cis)

    def _run(self, x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), freqs_cis)
        out: torch.Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Llama(nn.Module):
    """Maps token ids ``[batch, seq_len]`` to logits ``[batch, seq_len, vocab_size]``, or with labels to the loss."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, number) for number in range(config.n_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = Output(config.dim, config.vocab_size)

    def forward(
        self,
        tokens: torch.Tensor,
        freqs_cis: torch.Tensor,
        labels: torch.Tensor | None = None,
        num_tokens: int = 1,
    ) -> torch.Tensor:
        """Predict each next token; ``freqs_cis`` belong to the tokens' positions in their sequence.

        Given ``labels`` of the shape of ``tokens``, return their cross entropy, summed and divided by ``num_tokens``,
        instead of the logits; if the output divides tokens into chunks, only the logits of one chunk exist at a time.

        Rotations are an argument, since a buffer would be lost on the meta device and rounded by mixed precision.
        """
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, freqs_cis)
        x = self.norm(x)
        if labels is not None and self.output.num_chunks:
            loss: torch.Tensor = self.output(x, labels, num_tokens)
            return loss
        logits: torch.Tensor = self.output(x)
        return logits if labels is None else summed_cross_entropy(logits, labels) / num_tokens
