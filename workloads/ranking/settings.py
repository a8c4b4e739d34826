"""The config keys that ``ranking`` and ``ddp_overlap`` share, and those of ``ranking``, as typed values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..common.compiling import CompileSettings
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

    def check(self) -> None:
        """Raise ValueError for keys that contradict each other."""
        if (self.hash_operators_step or 0) > self.steps:
            raise ValueError(f"hash_operators_step is {self.hash_operators_step} and steps is {self.steps}")
        if not math.log2(self.loss_scale).is_integer():
            raise ValueError(f"loss_scale is {self.loss_scale}, allowed are powers of 2, which scale without rounding")

    def check_scale(self, key: str, dtype: torch.dtype) -> None:
        """Raise ValueError if gradients in ``dtype``, the value of ``key``, would underflow."""
        if dtype == torch.float16 and self.loss_scale == 1:
            raise ValueError(
                f"{key} is float16 and loss_scale is 1: small gradients underflow to 0; add a loss_scale, e.g. 65536"
            )

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

    def check(self) -> None:
        """Raise ValueError for keys that contradict each other."""
        super().check()
        self.check_scale("param_dtype", self.param_dtype)
