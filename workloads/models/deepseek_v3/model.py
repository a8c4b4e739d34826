"""DeepSeek-V3 (arXiv 2412.19437): multi-head latent attention, and experts from ``models/common/moe.py``.

Keys and values of all heads come from one narrow vector per token (DeepSeek-V2, arXiv 2405.04434, section 2.1).
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle

from ..common.attention import SDPA
from ..common.decoder import Attention
from ..common.dtensors import Distributed, local_value
from ..common.rope import apply_rope
from ..config import ModelConfig


class LatentAttention(Attention):
    """Causal attention whose keys and values are projected from a latent vector.

    Each head's queries and keys have ``head_dim`` features without positions and ``qk_rope_head_dim`` rotated ones.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dim, n_heads, norm_eps = config.dim, config.n_heads, config.norm_eps
        head_dim, latent = self.head_dim, self.latent = config.head_dim, config.latent
        self.attend = SDPA(config.attention)
        key_dim = head_dim + latent.qk_rope_head_dim
        if latent.q_lora_rank:
            self.wq_a = nn.Linear(dim, latent.q_lora_rank, bias=False)
            self.q_norm = nn.RMSNorm(latent.q_lora_rank, eps=norm_eps)
            self.wq_b = nn.Linear(latent.q_lora_rank, n_heads * key_dim, bias=False)
        else:
            self.wq = nn.Linear(dim, n_heads * key_dim, bias=False)
        self.wkv_a = nn.Linear(dim, latent.kv_lora_rank + latent.qk_rope_head_dim, bias=False)
        self.kv_norm = nn.RMSNorm(latent.kv_lora_rank, eps=norm_eps)
        self.wkv_b = nn.Linear(latent.kv_lora_rank, n_heads * 2 * head_dim, bias=False)
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
        q = self.wq_b(self.q_norm(self.wq_a(x))) if self.latent.q_lora_rank else self.wq(x)
        widths = self.head_dim, self.latent.qk_rope_head_dim
        plain, turned = q.unflatten(-1, (-1, sum(widths))).split(widths, dim=-1)
        return torch.cat((plain, apply_rope(turned, freqs_cis)), dim=-1)

    def _keys_and_values(self, x: torch.Tensor, freqs_cis: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys ``[batch, seq_len, heads, head_dim + qk_rope_head_dim]``, and values of width ``head_dim``."""
        compressed, turned = self.wkv_a(x).split((self.latent.kv_lora_rank, self.latent.qk_rope_head_dim), dim=-1)
        plain, v = self.wkv_b(self.kv_norm(compressed)).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        # All heads share this part; under tensor parallelism a rank has a part of the heads.
        shared = apply_rope(local_value(turned).unsqueeze(-2), freqs_cis).expand(*plain.shape[:-1], -1)
        return torch.cat((plain, shared), dim=-1), v

    def tensor_plan(self) -> dict[str, ParallelStyle]:
        """Split heads; latent vectors, which all heads share, are computed on each rank."""
        whole, split = ["wkv_a", "kv_norm"], ["wkv_b", "wq"]
        if self.latent.q_lora_rank:
            whole, split = [*whole, "wq_a", "q_norm"], ["wkv_b", "wq_b"]
        return dict.fromkeys(split, ColwiseParallel()) | {name: Distributed(weight=Replicate()) for name in whole}
