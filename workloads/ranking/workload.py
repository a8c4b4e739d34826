"""The ``ranking`` workload."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..fsdp.lanes import AsyncLane, Lane, StreamLane
from .model import RankingModel
from .replicated import GradientSum
from .sharding import shard
from .training import Forward, RankingTraining


class RankingWorkload(RankingTraining):
    """The ranking model under FSDP2, on four streams: compute, reduce-scatter, all-reduce and input copies.

    FSDP2 owns the stream of reduce-scatters, and one more for all-gathers; the other two are the workload's own.
    """

    name = "ranking"

    @property
    def overlaps(self) -> bool:
        """Unless all is to run on the compute stream."""
        return not self.config["one_stream"]

    def distribute(self, model: RankingModel) -> Forward:
        """Shard tables and blocks; replicate the tower and the head, whose gradients are all-reduced."""
        self._root = shard(model, self.config, self._device, self._spans)
        replicated = (model.dense_tower, model.head)
        self._sums = [GradientSum(module, self._sum_lane(), self._spans) for module in replicated]
        return model

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        """Reduce sharded and replicated gradients in the last one's backward."""
        self._root.set_requires_gradient_sync(is_last)
        for gradients in self._sums:
            gradients.enabled = is_last
        yield

    def finish_gradients(self) -> None:
        """Wait for the all-reduces; FSDP2 has waited for its own."""
        for gradients in self._sums:
            gradients.finish()

    def cleanup(self) -> None:
        """Free the wrapped model too."""
        super().cleanup()
        for name in ("_root", "_sums"):
            self.__dict__.pop(name, None)

    def _sum_lane(self) -> Lane | None:
        if not self.overlaps:
            return None
        # High priority: a collective's few blocks would otherwise queue behind a GEMM's many.
        return StreamLane(self._device, priority=-1) if self._device.type == "cuda" else AsyncLane()
