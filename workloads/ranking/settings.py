"""The config keys that ``ranking`` and ``ddp_overlap`` share, and those of ``ranking``, as typed values."""

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..common.compiling import CompileSettings
from ..common.rules import Rule
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

    @property
    @abstractmethod
    def overlaps(self) -> bool:
        """Return whether communication may leave the compute stream."""

    def rules(self, device: str, ranks: int) -> Iterator[Rule]:
        """Yield the combinations of keys that a launch refuses."""
        yield from super().rules(device, ranks)
        yield "dim n_heads", self.model.dim % self.model.n_heads, "heads are equally wide; use a multiple"
        is_power = math.log2(self.loss_scale).is_integer()
        yield "loss_scale", not is_power, "only powers of 2 scale without rounding"

    def unscaled(self, key: str, dtype: torch.dtype) -> Rule:
        """Return the rule on gradients in ``dtype``, which ``key`` names."""
        reason = "small gradients underflow to 0; add a loss_scale, e.g. 65536"
        return f"{key} loss_scale", dtype == torch.float16 and self.loss_scale == 1, reason


@dataclass(frozen=True)
class RankingSettings(ClickSettings):
    """The keys of ``ranking``."""

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    reshard_after_forward: bool
    forward_prefetch: int
    backward_prefetch: int
    one_stream: bool

    @property
    def overlaps(self) -> bool:
        """Return whether communication may leave the compute stream."""
        return not self.one_stream

    def rules(self, device: str, ranks: int) -> Iterator[Rule]:
        """Yield the combinations of keys that a launch refuses."""
        yield from super().rules(device, ranks)
        yield self.unscaled("param_dtype", self.param_dtype)
