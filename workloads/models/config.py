"""The dimensions of a model, as config keys."""

from dataclasses import dataclass, field

import torch

from .common.rope import precompute_freqs_cis


@dataclass(frozen=True)
class MixtureConfig:
    """The keys of experts besides their number.

    Attributes:
        shared_experts: experts that get every token, computed as one feed-forward as wide as all of them.
        n_dense_layers: first blocks that have a single feed-forward in place of experts.
        moe_inter_dim: width of each expert; None is ``ffn_hidden``.
        score_func: ``softmax`` over all experts, or ``sigmoid`` of each expert's score.
        route_scale: sum of the weights of a token's experts.
        moe_force_load_balance: whether tokens go to all experts in turn, whatever their scores.
        load_balance_coeff: step of the bias that balances the experts' loads; None is no bias.
    """

    shared_experts: int = 0
    n_dense_layers: int = 0
    moe_inter_dim: int | None = None
    score_func: str = "softmax"
    route_scale: float = 1.0
    moe_force_load_balance: bool = False
    load_balance_coeff: float | None = None


@dataclass(frozen=True)
class LatentConfig:
    """The widths of latent attention, which are config keys; ``kv_lora_rank`` 0 is grouped-query attention.

    ``q_lora_rank`` 0 projects queries directly. ``qk_rope_head_dim`` is the width of the part of queries and keys that
    is rotated. All heads share the rotated part of a key.
    """

    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    qk_rope_head_dim: int = 0


@dataclass(frozen=True)
class ModelConfig:
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
    rotary: str = "real"
    num_experts: int = 0
    top_k: int = 2
    mixture: MixtureConfig = field(default_factory=MixtureConfig)
    latent: LatentConfig = field(default_factory=LatentConfig)

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
        """Return the rotations of this model's heads at ``positions`` ``[n]``, in the form of ``rotary``."""
        freqs_cis = precompute_freqs_cis(positions, self.latent.qk_rope_head_dim or self.head_dim, self.rope_theta)
        return torch.complex(*freqs_cis) if self.rotary == "complex" else freqs_cis
