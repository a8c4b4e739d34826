"""The ``ranking`` workload."""

from collections.abc import Iterator
from contextlib import contextmanager

from ..common.streams import collective_stream
from .model import RankingModel
from .replicated import GradientSum
from .settings import RankingSettings
from .sharding import shard
from .training import Forward, RankingTraining


class RankingWorkload(RankingTraining[RankingSettings]):
    """The ranking model under FSDP2, on four streams: compute, reduce-scatter, all-reduce and input copies.

    FSDP2 owns the stream of reduce-scatters and a further one for all-gathers; the workload owns the other two.
    """

    name, settings_type = "ranking", RankingSettings

    @property
    def overlaps(self) -> bool:
        """Return whether communication may leave the compute stream."""
        return not self._settings.one_stream

    def distribute(self, model: RankingModel) -> Forward:
        """Shard tables and blocks; replicate the tower and the head, whose gradients are all-reduced."""
        self._root = shard(model, self._settings, self._device)
        self._sums = [
            GradientSum(module, collective_stream(self._device) if self.overlaps else None)
            for module in (model.dense_tower, model.head)
        ]
        return model

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        """Reduce sharded and replicated gradients only in the backward pass of the last micro-batch."""
        self._root.set_requires_gradient_sync(is_last)
        for gradients in self._sums:
            gradients.enabled = is_last
        yield

    def finish_gradients(self) -> None:
        """Wait for the all-reduces; FSDP2 waits for its own collectives."""
        for gradients in self._sums:
            gradients.finish()
