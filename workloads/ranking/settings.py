"""The config keys that ``ranking`` and ``ddp_overlap`` share, and those of ``ranking``, as typed values."""

import math
from dataclasses import dataclass

import torch

from ..common.compiling import CompileSettings
from ..common.rules import CHECKPOINT_RULES, Rule
from ..common.settings import TrainingSettings
from .model import RankingConfig


@dataclass(frozen=True)
class ClickSettings(TrainingSettings):
    """The keys that both workloads have; ``model`` groups the model's dimensions."""

    model: RankingConfig
    bag_size: int
    h2d_prefetch: bool
    host_batches: int
    compile: CompileSettings
    loss_scale: float

    @property
    def samples_per_step(self) -> int:
        """Samples of one step on each rank."""
        return self.batch_size * self.gradient_accumulation


@dataclass(frozen=True)
class RankingSettings(ClickSettings):
    """The keys of ``ranking``."""

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    reshard_after_forward: bool
    forward_prefetch: int
    backward_prefetch: int
    one_stream: bool


def _unscaled(key: str) -> Rule:
    """Return the rule on gradients in the dtype that ``key`` names, which only one of the workloads has."""
    reason = "small gradients underflow to 0; add a loss_scale, e.g. 65536"
    return f"{key} loss_scale", lambda c: getattr(c, key, None) == "float16" and c.loss_scale == 1, reason


RULES: tuple[Rule, ...] = (
    *CHECKPOINT_RULES,
    ("dim n_heads", lambda c: c.dim % c.n_heads, "heads are equally wide; use a multiple"),
    ("hash_operators_step steps", lambda c: (c.hash_operators_step or 0) > c.steps, "this step is not measured"),
    ("loss_scale", lambda c: not math.log2(c.loss_scale).is_integer(), "only powers of 2 scale without rounding"),
    _unscaled("param_dtype"),
    _unscaled("compute_dtype"),
)
