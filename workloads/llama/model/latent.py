"""Multi-head latent attention: keys and values of all heads come from one narrow vector per token.

DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .attention import SDPA
from .local import local_value
from .rotary import apply_rope


@dataclass(frozen=True)
class LatentConfig:
    """The widths of latent attention, which are config keys; ``kv_lora_rank`` 0 is grouped-query attention.

    ``q_lora_rank`` 0 projects queries directly. ``qk_rope_head_dim`` is the width of the part of queries and keys that
    is rotated. All heads share the rotated part of a key.
    """

    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    qk_rope_head_dim: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError if the widths contradict each other."""
        given = f"kv_lora_rank is {self.kv_lora_rank}"
        if not self.kv_lora_rank and (self.q_lora_rank or self.qk_rope_head_dim):
            raise ValueError(
                f"{given}, q_lora_rank is {self.q_lora_rank} and qk_rope_head_dim is {self.qk_rope_head_dim}: "
                f"grouped-query attention has neither; allowed are 0 and 0"
            )
        if self.kv_lora_rank and (self.qk_rope_head_dim % 2 or not self.qk_rope_head_dim):
            raise ValueError(
                f"{given} and qk_rope_head_dim is {self.qk_rope_head_dim}: allowed are multiples of 2, from 2 on"
            )


class LatentAttention(nn.Module):
    """Causal attention whose keys and values are projected from a latent vector.

    Each head's queries and keys have ``head_dim`` features without positions and ``qk_rope_head_dim`` rotated ones.
    ``attend`` maps queries, keys and values ``[batch, heads, seq_len, head_dim + qk_rope_head_dim]`` to the output of
    attention.
    """

    def __init__(
        self, dim: int, n_heads: int, head_dim: int, latent: LatentConfig, *, norm_eps: float, kernel: str
    ) -> None:
        super().__init__()
        self.head_dim, self.latent = head_dim, latent
        self.attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = SDPA(kernel)
        if latent.q_lora_rank:
            self.wq_down = nn.Linear(dim, latent.q_lora_rank, bias=False)
            self.q_norm = nn.RMSNorm(latent.q_lora_rank, eps=norm_eps)
        self.wq = nn.Linear(latent.q_lora_rank or dim, n_heads * (head_dim + latent.qk_rope_head_dim), bias=False)
        self.wkv_down = nn.Linear(dim, latent.kv_lora_rank + latent.qk_rope_head_dim, bias=False)
        self.kv_norm = nn.RMSNorm(latent.kv_lora_rank, eps=norm_eps)
        self.wkv = nn.Linear(latent.kv_lora_rank, n_heads * 2 * head_dim, bias=False)
        self.wo = nn.Linear(n_heads * head_dim, dim, bias=False)

    def forward(self, x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
        """Attend within each sequence of ``x`` ``[batch, seq_len, dim]``; return a tensor of the same shape."""
        q = self._queries(x, freqs_cis)
        k, v = self._keys_and_values(x, freqs_cis)
        # Not every kernel takes values that are narrower than keys, so values are filled up with zeros.
        v = F.pad(v, (0, self.latent.qk_rope_head_dim))
        attended = self.attend(*(tensor.transpose(1, 2) for tensor in (q, k, v))).transpose(1, 2)
        out: torch.Tensor = self.wo(attended[..., : self.head_dim].flatten(-2))
        return out

    def _queries(self, x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
        """Return ``[batch, seq_len, heads, head_dim + qk_rope_head_dim]``."""
        compressed = self.q_norm(self.wq_down(x)) if self.latent.q_lora_rank else x
        plain, turned = (
            self.wq(compressed)
            .unflatten(-1, (-1, self.head_dim + self.latent.qk_rope_head_dim))
            .split((self.head_dim, self.latent.qk_rope_head_dim), dim=-1)
        )
        return torch.cat((plain, apply_rope(turned, freqs_cis)), dim=-1)

    def _keys_and_values(self, x: torch.Tensor, freqs_cis: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys ``[batch, seq_len, heads, head_dim + qk_rope_head_dim]``, and values of width ``head_dim``."""
        compressed, turned = self.wkv_down(x).split((self.latent.kv_lora_rank, self.latent.qk_rope_head_dim), dim=-1)
        plain, v = self.wkv(self.kv_norm(compressed)).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        # All heads share this part; under tensor parallelism a rank has a part of the heads.
        shared = apply_rope(local_value(turned).unsqueeze(-2), freqs_cis).expand(*plain.shape[:-1], -1)
        return torch.cat((plain, shared), dim=-1), v
