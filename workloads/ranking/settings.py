"""The config keys that ``ranking`` and ``ddp_overlap`` share, and those of ``ranking``, as typed values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..common.compiling import CompileSettings
from ..common.learning_rate import LearningRateSchedule
from .model import RankingConfig


@dataclass(frozen=True)
class TrainingSettings:
    """The keys that both workloads have; ``model`` groups the model's dimensions."""

    steps: int
    warmup: int
    profile_steps: int
    span_every: int
    batch_size: int
    gradient_accumulation: int
    model: RankingConfig
    bag_size: int
    h2d_prefetch: bool
    host_batches: int
    compile: CompileSettings
    lr: float
    betas: tuple[float, float]
    weight_decay: float
    lr_schedule: LearningRateSchedule
    deterministic: bool
    seed: int
    hash_every: int

    def check(self) -> None:
        """Raise ValueError for keys that contradict each other."""
        self.compile.check()
        self.lr_schedule.check()

    @property
    def samples_per_step(self) -> int:
        """Samples of one step on each rank."""
        return self.batch_size * self.gradient_accumulation


@dataclass(frozen=True)
class RankingSettings(TrainingSettings):
    """The keys of ``ranking``."""

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    reshard_after_forward: bool
    forward_prefetch: int
    backward_prefetch: int
    one_stream: bool
