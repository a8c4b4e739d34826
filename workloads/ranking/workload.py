"""The ``ranking`` workload."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..common.streams import collective_stream
from .model import RankingModel
from .replicated import GradientSum
from .settings import RankingSettings
from .sharding import shard
from .training import Distributed, RankingTraining


def apply_fsdp(model: RankingModel, settings: RankingSettings, device: torch.device) -> Distributed:
    """Shard tables and blocks; replicate the tower and the head, whose gradients are all-reduced."""
    root = shard(model, settings, device)
    sums = [
        GradientSum(module, collective_stream(device) if settings.overlaps else None)
        for module in (model.dense_tower, model.head)
    ]

    @contextmanager
    def micro_batch(is_last: bool) -> Iterator[None]:
        root.set_requires_gradient_sync(is_last)
        for gradients in sums:
            gradients.enabled = is_last
        yield

    def finish_gradients() -> None:
        # FSDP2 waits for its own collectives.
        for gradients in sums:
            gradients.finish()

    return Distributed(model, micro_batch, finish_gradients)


class RankingWorkload(RankingTraining[RankingSettings]):
    """The ranking model under FSDP2, on four streams: compute, reduce-scatter, all-reduce and input copies.

    FSDP2 owns the stream of reduce-scatters and a further one for all-gathers; the workload owns the other two.
    """

    name, settings_type = "ranking", RankingSettings
    parallelize = staticmethod(apply_fsdp)
