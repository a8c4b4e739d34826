"""The config of ``ddp_overlap`` as typed values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..ranking.settings import TrainingSettings


@dataclass(frozen=True)
class DdpOverlapSettings(TrainingSettings):
    """The keys of ``ddp_overlap``."""

    compute_dtype: torch.dtype
    enable_overlap: bool
    overlap_reduce_scatter: bool
    clone_for_reduce_scatter: bool
    bucket_cap_mb: float
    gradient_as_bucket_view: bool
    static_graph: bool

    def check(self) -> None:
        """Raise ValueError for keys that contradict each other."""
        super().check()
        self.check_scale("compute_dtype", self.compute_dtype)
