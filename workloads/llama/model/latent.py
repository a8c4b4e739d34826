"""Multi-head latent attention: keys and values of all heads come from one narrow vector per token.

DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .attention import Attend
from .local import local_value
from .rotary import apply_rope


@dataclass(frozen=True)
class LatentConfig:
    """The widths of latent attention, which are config keys; ``kv_latent_dim`` 0 is grouped-query attention.

    ``q_latent_dim`` 0 projects queries directly. ``rotary_dim`` is the width of the part of queries and keys that is
    rotated. All heads share the rotated part of a key.
    """

    kv_latent_dim: int = 0
    q_latent_dim: int = 0
    rotary_dim: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError if the widths contradict each other."""
        given = f"kv_latent_dim is {self.kv_latent_dim}"
        if not self.kv_latent_dim and (self.q_latent_dim or self.rotary_dim):
            raise ValueError(
                f"{given}, q_latent_dim is {self.q_latent_dim} and rotary_dim is {self.rotary_dim}: grouped-query "
                f"attention has neither; allowed are 0 and 0"
            )
        if self.kv_latent_dim and (self.rotary_dim % 2 or not self.rotary_dim):
            raise ValueError(f"{given} and rotary_dim is {self.rotary_dim}: allowed are multiples of 2, from 2 on")


class LatentAttention(nn.Module):
    """Causal attention whose keys and values are projected from a latent vector.

    Each head's queries and keys have ``head_dim`` features without positions and ``rotary_dim`` rotated ones.
    ``attend`` maps queries, keys and values ``[batch, heads, seq_len, head_dim + rotary_dim]`` to the attention output.
    """

    def __init__(
        self, dim: int, n_heads: int, head_dim: int, latent: LatentConfig, *, norm_eps: float, kernel: str
    ) -> None:
        super().__init__()
        self.head_dim, self.latent = head_dim, latent
        self.attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = Attend(kernel)
        if latent.q_latent_dim:
            self.wq_down = nn.Linear(dim, latent.q_latent_dim, bias=False)
            self.q_norm = nn.RMSNorm(latent.q_latent_dim, eps=norm_eps)
        self.wq = nn.Linear(latent.q_latent_dim or dim, n_heads * (head_dim + latent.rotary_dim), bias=False)
        self.wkv_down = nn.Linear(dim, latent.kv_latent_dim + latent.rotary_dim, bias=False)
        self.kv_norm = nn.RMSNorm(latent.kv_latent_dim, eps=norm_eps)
        self.wkv = nn.Linear(latent.kv_latent_dim, n_heads * 2 * head_dim, bias=False)
        self.wo = nn.Linear(n_heads * head_dim, dim, bias=False)

    def forward(self, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        """Attend within each sequence of ``x`` ``[batch, seq_len, dim]``; return a tensor of the same shape."""
        q = self._queries(x, rotations)
        k, v = self._keys_and_values(x, rotations)
        # Not every kernel takes values that are narrower than keys, so values are filled up with zeros.
        v = F.pad(v, (0, self.latent.rotary_dim))
        attended = self.attend(*(tensor.transpose(1, 2) for tensor in (q, k, v))).transpose(1, 2)
        out: torch.Tensor = self.wo(attended[..., : self.head_dim].flatten(-2))
        return out

    def _queries(self, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        """Return ``[batch, seq_len, heads, head_dim + rotary_dim]``."""
        compressed = self.q_norm(self.wq_down(x)) if self.latent.q_latent_dim else x
        plain, turned = (
            self.wq(compressed)
            .unflatten(-1, (-1, self.head_dim + self.latent.rotary_dim))
            .split((self.head_dim, self.latent.rotary_dim), dim=-1)
        )
        return torch.cat((plain, apply_rope(turned, rotations)), dim=-1)

    def _keys_and_values(self, x: torch.Tensor, rotations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys ``[batch, seq_len, heads, head_dim + rotary_dim]``, and values with ``head_dim`` features."""
        compressed, turned = self.wkv_down(x).split((self.latent.kv_latent_dim, self.latent.rotary_dim), dim=-1)
        plain, v = self.wkv(self.kv_norm(compressed)).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        # All heads share this part; under tensor parallelism a rank has a part of the heads.
        shared = apply_rope(local_value(turned).unsqueeze(-2), rotations).expand(*plain.shape[:-1], -1)
        return torch.cat((plain, shared), dim=-1), v
