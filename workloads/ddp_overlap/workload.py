"""The ``ddp_overlap`` workload."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from ..common.rules import Rule
from ..ranking.model import RankingModel
from ..ranking.settings import ClickSettings
from ..ranking.training import Forward, RankingTraining
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

    def rules(self, device: str, ranks: int) -> Iterator[Rule]:
        """Yield the combinations of keys that a launch refuses."""
        yield from super().rules(device, ranks)
        yield self.unscaled("compute_dtype", self.compute_dtype)


class DdpOverlapWorkload(RankingTraining[DdpOverlapSettings]):
    """The model of ``ranking`` under DDP, whose communication hook sums buckets on streams of its own."""

    name, settings_type = "ddp_overlap", DdpOverlapSettings

    @property
    def overlaps(self) -> bool:
        """Return the value of ``enable_overlap``."""
        return self._settings.enable_overlap

    def distribute(self, model: RankingModel) -> Forward:
        """Wrap ``model`` in DDP."""
        settings, self._stress = self._settings, None
        if settings.overlap_reduce_scatter:
            clone = settings.clone_for_reduce_scatter
            self._stress = ReduceScatterStress(self._device, clone=clone, beside=self.overlaps)
        self._reduction = BucketReduction(self._device, overlap=self.overlaps, stress=self._stress)
        self._wrapped = wrap(
            model,
            self._reduction,
            bucket_cap_mb=settings.bucket_cap_mb,
            gradient_as_bucket_view=settings.gradient_as_bucket_view,
            static_graph=settings.static_graph,
        )
        return self._wrapped if settings.compute_dtype == torch.float32 else self._forward_by_autocast

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Have DDP fill buckets only in the backward pass of the last micro-batch."""
        return nullcontext() if is_last else self._wrapped.no_sync()

    def finish_gradients(self) -> None:
        """Run the collectives that do not run beside backward."""
        self._reduction.finish()

    def _metrics(self, step_time_s: float, grad_norms: list[float]) -> dict[str, float]:
        return super()._metrics(step_time_s, grad_norms) | {
            "all_reduces_per_step": float(self._reduction.num_in_last_step),
            "reduce_scatters_per_step": float(self._stress.num_in_last_step if self._stress else 0),
        }

    def _forward_by_autocast(self, dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self._device.type, dtype=self._settings.compute_dtype):
            logits: torch.Tensor = self._wrapped(dense, rows)
        return logits
