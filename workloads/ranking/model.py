"""A ranking model: one token per feature, a transformer encoder over the tokens, and one logit for a click."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ..common.seeding import generator

_EMBEDDING_STD = 0.02


@dataclass(frozen=True)
class RankingConfig:
    """The model's dimensions; every field is a config key of the workload."""

    dim: int
    n_layers: int
    n_heads: int
    ffn_hidden: int
    num_dense: int
    num_tables: int
    rows_per_table: int


class EncoderBlock(nn.Module):
    """One pre-norm transformer block; every token attends to all tokens of its sample."""

    def __init__(self, config: RankingConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.attention_norm = nn.LayerNorm(config.dim)
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)
        self.ffn_norm = nn.LayerNorm(config.dim)
        self.up = nn.Linear(config.dim, config.ffn_hidden, bias=False)
        self.down = nn.Linear(config.ffn_hidden, config.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map tokens ``[batch, tokens, dim]`` to tokens of the same shape."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.n_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.ffn_norm(x))))
        return out


class ClickHead(nn.Module):
    """Maps the mean over tokens to one logit, in float32."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.hidden = nn.Linear(dim, dim)
        self.logit = nn.Linear(dim, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map tokens ``[batch, tokens, dim]`` to logits ``[batch, 1]``."""
        logits: torch.Tensor = self.logit(F.relu(self.hidden(self.norm(x.float().mean(dim=1)))))
        return logits.float()


class RankingModel(nn.Module):
    """Maps dense features and rows of embedding tables to the logit of a click.

    As in DLRM (arXiv 1906.00091), the small multi-layer perceptrons, ``dense_tower`` and ``head``, are meant to be
    replicated, and the tables to be sharded.
    """

    def __init__(self, config: RankingConfig) -> None:
        super().__init__()
        # All tables as one matrix; a bag's embedding is the sum of its rows, which are counted over all tables.
        self.tables = nn.EmbeddingBag(config.num_tables * config.rows_per_table, config.dim, mode="sum")
        self.dense_tower = nn.Sequential(
            nn.Linear(config.num_dense, config.dim), nn.ReLU(), nn.Linear(config.dim, config.dim)
        )
        self.blocks = nn.ModuleList(EncoderBlock(config) for _ in range(config.n_layers))
        self.head = ClickHead(config.dim)

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Score ``dense`` ``[batch, num_dense]`` and ``rows`` ``[batch, num_tables, bag_size]``: ``[batch, 1]``."""
        sparse = self.tables(rows.flatten(0, 1)).unflatten(0, rows.shape[:2])
        x = torch.cat([self.dense_tower(dense).to(sparse.dtype).unsqueeze(1), sparse], dim=1)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


@torch.no_grad()
def initialize(model: RankingModel, seed: int) -> None:
    """Fill every parameter, unsharded, from a seed of its name; values differ between kinds of devices."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
        else:
            std = _EMBEDDING_STD if name.startswith("tables.") else parameter.shape[1] ** -0.5
            parameter.normal_(0.0, std, generator=generator(parameter.device, "ranking", seed, name))
