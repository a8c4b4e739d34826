"""The ``ddp_overlap`` workload."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from ..common.rules import Rule
from ..ranking.model import RankingModel
from ..ranking.settings import ClickSettings
from ..ranking.training import Distributed, RankingTraining
from .hook import BucketReduction, ReduceScatterStress, wrap


@dataclass(frozen=True)
class DdpOverlapSettings(ClickSettings):
    """The keys of ``ddp_overlap``."""

    compute_dtype: torch.dtype
    enable_overlap: bool
    overlap_reduce_scatter: bool
    clone_for_reduce_scatter: bool
    bucket_cap_mb: float
    gradient_as_bucket_view: bool
    static_graph: bool

    @property
    def overlaps(self) -> bool:
        """Return the value of ``enable_overlap``."""
        return self.enable_overlap

    def rules(self, device: str, ranks: int) -> Iterator[Rule]:
        """Yield the combinations of keys that a launch refuses."""
        yield from super().rules(device, ranks)
        yield self.unscaled("compute_dtype", self.compute_dtype)


def apply_ddp(model: RankingModel, settings: DdpOverlapSettings, device: torch.device) -> Distributed:
    """Wrap ``model`` in DDP, which fills buckets only in the backward pass of the last micro-batch."""
    stress = None
    if settings.overlap_reduce_scatter:
        stress = ReduceScatterStress(device, clone=settings.clone_for_reduce_scatter, beside=settings.overlaps)
    reduction = BucketReduction(device, overlap=settings.overlaps, stress=stress)
    wrapped = wrap(
        model,
        reduction,
        bucket_cap_mb=settings.bucket_cap_mb,
        gradient_as_bucket_view=settings.gradient_as_bucket_view,
        static_graph=settings.static_graph,
    )

    def forward_by_autocast(dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, dtype=settings.compute_dtype):
            logits: torch.Tensor = wrapped(dense, rows)
        return logits

    def metrics() -> dict[str, float]:
        return {
            "all_reduces_per_step": float(reduction.num_in_last_step),
            "reduce_scatters_per_step": float(stress.num_in_last_step if stress else 0),
        }

    return Distributed(
        wrapped if settings.compute_dtype == torch.float32 else forward_by_autocast,
        lambda is_last: nullcontext() if is_last else wrapped.no_sync(),
        reduction.finish,
        metrics,
    )


class DdpOverlapWorkload(RankingTraining[DdpOverlapSettings]):
    """The model of ``ranking`` under DDP, whose communication hook sums buckets on streams of its own."""

    name, settings_type = "ddp_overlap", DdpOverlapSettings
    parallelize = staticmethod(apply_ddp)
