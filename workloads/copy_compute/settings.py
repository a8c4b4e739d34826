"""The config of ``copy_compute`` as typed values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .copies import KINDS


@dataclass(frozen=True)
class Fault:
    """A fault planted in the first kind of copy on one rank."""

    kind: str = "none"
    rank: int = 0


@dataclass(frozen=True)
class CopyComputeSettings:
    """The keys of ``copy_compute``."""

    steps: int
    warmup: int
    profile_steps: int
    span_every: int
    matrix_size: int
    gemms: int
    dtype: torch.dtype
    copy_mb: float
    copy_kind: str
    priority: int
    overlap: bool
    seed: int
    fault: Fault

    @property
    def copy_kinds(self) -> tuple[str, ...]:
        """Return the kinds of copy that each step makes."""
        return KINDS if self.copy_kind == "all" else (self.copy_kind,)
