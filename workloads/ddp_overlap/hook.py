"""A communication hook for DDP that all-reduces each bucket beside backward, or all buckets after backward."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..common.collectives import reduce_scatter
from ..common.gradients import fill_gradients
from ..common.streams import Work, collective_stream


class ReduceScatterStress:
    """Reduce-scatters of the buckets, on their own stream and process group; their results are discarded."""

    def __init__(self, device: torch.device, *, clone: bool, beside: bool) -> None:
        """Make the process group and the stream; collective.

        Args:
            clone: reduce-scatter a copy of the bucket, since its all-reduce writes the bucket in place.
            beside: run beside compute.
        """
        self._clone = clone
        self._group = dist.new_group()
        self._stream = collective_stream(device, beside=beside)
        # The allocator ignores this stream, so references to tensors keep it from reusing memory before compute waits.
        self._in_flight: list[tuple[Work, torch.Tensor, torch.Tensor]] = []
        self.num_in_last_step = 0

    def start(self, buffer: torch.Tensor) -> None:
        """Start a reduce-scatter of ``buffer``, without the trailing elements that the world size does not divide."""
        world_size = dist.get_world_size(self._group)
        size = buffer.numel() // world_size
        source = (buffer.clone() if self._clone else buffer)[: size * world_size]
        target = buffer.new_empty(size)
        work = self._stream.submit(
            lambda is_async: reduce_scatter(target, source, group=self._group, async_op=is_async)
        )
        self._in_flight.append((work, source, target))

    def finish(self) -> None:
        """Make compute that follows wait for all started reduce-scatters."""
        for work, _, _ in self._in_flight:
            work.wait()
        self.num_in_last_step = len(self._in_flight)
        self._in_flight.clear()


class BucketReduction:
    """A hook that sums buckets over ranks, beside backward or after it.

    Until :meth:`finish`, gradients may be those of this rank alone.
    """

    def __init__(self, device: torch.device, *, overlap: bool, stress: ReduceScatterStress | None) -> None:
        """Make the stream that the all-reduces need.

        Args:
            overlap: run all-reduces beside backward; otherwise :meth:`finish` runs them on the compute stream.
            stress: further collectives on each bucket.
        """
        self._devices: list[int | str | torch.device] | None = [device] if device.type == "cuda" else None
        self._overlap, self._stress = overlap, stress
        self._stream = collective_stream(device, beside=overlap)
        # Gradients as one message, and the parameters that they belong to.
        self._buckets: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        self._works: list[Work] = []
        # Read after the last step: DDP uses one bucket in the first step and makes its final buckets after it.
        self.num_in_last_step = 0

    def __call__(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Return a future that is done, for ``bucket``, a ``dist.GradBucket`` that DDP has filled."""
        self._buckets.append((bucket.buffer(), bucket.parameters()))
        if self._overlap:
            self._works.append(self._start(bucket.buffer()))
        # DDP would wait for it at the end of backward, which is when finish() waits for the sums.
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=self._devices)
        future.set_result(bucket.buffer())
        return future

    def finish(self) -> None:
        """Make every gradient the sum over ranks; called after backward."""
        works = self._works or [self._start(buffer) for buffer, _ in self._buckets]
        for (buffer, parameters), work in zip(self._buckets, works, strict=True):
            work.wait()
            gradient = parameters[0].grad
            assert gradient is not None
            # With gradient_as_bucket_view, gradients are views of the bucket.
            if gradient.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr():
                fill_gradients(parameters, buffer)
        self.num_in_last_step = len(self._buckets)
        self._buckets, self._works = [], []
        if self._stress is not None:
            self._stress.finish()

    def _start(self, buffer: torch.Tensor) -> Work:
        if self._stress is not None:
            self._stress.start(buffer)
        return self._stream.submit(lambda asynchronous: dist.all_reduce(buffer, async_op=asynchronous))


def wrap(model: nn.Module, reduction: BucketReduction, **options: Any) -> nn.parallel.DistributedDataParallel:
    """Return ``model`` under DDP, which takes ``options``, with ``reduction`` as its communication hook."""
    wrapped = nn.parallel.DistributedDataParallel(model, **options)
    # DDP compares the hook's annotations with types, and postponed annotations are strings; a lambda has none.
    wrapped.register_comm_hook(None, lambda _state, bucket: reduction(bucket))
    return wrapped
