"""The ``ddp_overlap`` workload."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from ..ranking.model import RankingModel
from ..ranking.training import Forward, RankingTraining
from .hook import BucketReduction, ReduceScatterStress, wrap


class DdpOverlapWorkload(RankingTraining):
    """The model of ``ranking`` under DDP, whose buckets are summed by a communication hook on streams of its own."""

    name = "ddp_overlap"

    @property
    def overlaps(self) -> bool:
        """As the config says."""
        return bool(self.config["enable_overlap"])

    def distribute(self, model: RankingModel) -> Forward:
        """Wrap ``model`` in DDP."""
        config, stress = self.config, None
        if config["overlap_reduce_scatter"]:
            clone = config["clone_for_reduce_scatter"]
            stress = ReduceScatterStress(self._device, self._spans, clone=clone, beside=self.overlaps)
        self._stress = stress
        self._reduction = BucketReduction(self._device, self._spans, overlap=self.overlaps, stress=stress)
        self._wrapped = wrap(
            model,
            self._reduction,
            bucket_cap_mb=config["bucket_cap_mb"],
            bucket_view=config["gradient_as_bucket_view"],
            static_graph=config["static_graph"],
        )
        return self._forward_in_bfloat16 if config["compute_dtype"] == "bfloat16" else self._wrapped

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Have DDP fill buckets in the last one's backward only."""
        return nullcontext() if is_last else self._wrapped.no_sync()

    def finish_gradients(self) -> None:
        """Run what does not run beside backward."""
        self._reduction.finish()

    def own_metrics(self) -> dict[str, float]:
        """Collectives of the last step."""
        return {
            "all_reduces_per_step": float(self._reduction.num_in_last_step),
            "reduce_scatters_per_step": float(self._stress.num_in_last_step if self._stress else 0),
        }

    def cleanup(self) -> None:
        """Free the wrapped model too."""
        # First of all: a process group that something still holds is not ended when it is left.
        for name in ("_forward", "_wrapped", "_reduction", "_stress"):
            self.__dict__.pop(name, None)
        super().cleanup()

    def _forward_in_bfloat16(self, dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self._device.type, dtype=torch.bfloat16):
            logits: torch.Tensor = self._wrapped(dense, rows)
        return logits
