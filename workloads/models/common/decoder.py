"""A decoder that maps token ids to logits: blocks of attention and a feed-forward, RMSNorm, an output of its own.

Models differ in the type of their attention. The output matrix is not tied to the embedding.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from ..config import ModelConfig
from .chunked_loss import Output, summed_cross_entropy
from .feed_forward import FeedForward
from .moe import MoeFeedForward


class Attention(nn.Module, ABC):
    """The attention of a block; each model has its own.

    Attributes:
        attend: maps queries, keys and values ``[batch, heads, seq_len, key_dim]`` to the output of attention.
    """

    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

    @abstractmethod
    def tensor_plan(self) -> dict[str, ParallelStyle]:
        """Return how tensor parallelism splits the modules before ``wo``, by name."""


def _feed_forward(config: ModelConfig, number: int) -> FeedForward | MoeFeedForward:
    mixture = config.mixture
    if not config.num_experts or number < mixture.n_dense_layers:
        return FeedForward(config.dim, config.ffn_hidden)
    hidden = mixture.moe_inter_dim or config.ffn_hidden
    return MoeFeedForward(config.dim, hidden, config.num_experts, config.top_k, mixture)


def _call(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> torch.Tensor:
    return function(*args)


class Block(nn.Module):
    """One pre-norm transformer block.

    Attributes:
        checkpoint: calls a function with its arguments; activation checkpointing replaces it.
    """

    checkpoint: Callable[..., torch.Tensor]

    def __init__(self, config: ModelConfig, attention: Attention, feed_forward: FeedForward | MoeFeedForward) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = attention
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = feed_forward
        self.checkpoint = _call

    def forward(self, x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
        """Run the block on ``x`` ``[batch, seq_len, dim]``."""
        # Checkpointing inside the module that FSDP wraps keeps parameter names, and FSDP has gathered the parameters
        # when backward recomputes.
        out: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = self.checkpoint(self._run, x, freqs_cis)
        if isinstance(out, tuple):
            # Outside of what is checkpointed, which may run again.
            out, counts = out
            self.feed_forward.get_buffer("tokens_per_expert").add_(counts)
        return out

    def _run(self, x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        x = x + self.attention(self.attention_norm(x), freqs_cis)
        out = self.feed_forward(self.ffn_norm(x))
        return (x + out[0], out[1]) if isinstance(out, tuple) else x + out


class Decoder(nn.Module):
    """Maps token ids ``[batch, seq_len]`` to logits ``[batch, seq_len, vocab_size]``, or with labels to the loss."""

    def __init__(self, config: ModelConfig, attention_type: Callable[[ModelConfig], Attention]) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(
            Block(config, attention_type(config), _feed_forward(config, number)) for number in range(config.n_layers)
        )
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = Output(config.dim, config.vocab_size)

    def forward(
        self, tokens: torch.Tensor, freqs_cis: torch.Tensor, labels: torch.Tensor | None = None, num_tokens: int = 1
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
