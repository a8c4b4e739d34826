"""Synthetic samples, each a function of the seed and the sample's global number, and their copies to the device."""

from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import torch

from ..common.seeding import seed_of
from ..common.streams import Prefetcher, Stream, Transfer
from .settings import ClickSettings

# Constants of splitmix64 (Steele, Lea, Flood 2014) as signed numbers; int64 products wrap around.
_GOLDEN, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685
_BITS = 53


class Batch(NamedTuple):
    """The samples of one step on one rank; the first axis counts micro-batches.

    Attributes:
        dense: float32 ``[micro, batch, num_dense]`` in [-1, 1).
        rows: int64 ``[micro, batch, num_tables, bag_size]``, counted over all tables; low rows are popular.
        clicks: float32 ``[micro, batch, 1]``, 0 or 1; correlated with the first dense feature, so that a model can
            learn them.
    """

    dense: torch.Tensor
    rows: torch.Tensor
    clicks: torch.Tensor


def uniform(key: int, numbers: torch.Tensor) -> torch.Tensor:
    """Map each of ``numbers``, int64, to a number in [0, 1), float64; every CPU computes the same."""
    mixed = (numbers + key) * _GOLDEN
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        mixed = (mixed ^ _shifted(mixed, shift)) * factor
    drawn: torch.Tensor = _shifted(mixed ^ _shifted(mixed, 31), 64 - _BITS).double() * 2.0**-_BITS
    return drawn


def make_batch(settings: ClickSettings, number: int, rank: int, world_size: int) -> Batch:
    """Make the ``number``-th batch of ``rank``; the global batch is the same for every world size."""
    model, size, num_micro = settings.model, settings.batch_size, settings.gradient_accumulation
    samples = torch.arange(size) + size * (rank + world_size * torch.arange(num_micro)[:, None])

    def draw(what: str, *shape: int) -> torch.Tensor:
        count = torch.Size(shape).numel()
        numbers = samples[..., None] * count + torch.arange(count)
        drawn: torch.Tensor = uniform(seed_of(what, settings.seed, number), numbers).unflatten(-1, shape)
        return drawn

    dense = (2 * draw("dense", model.num_dense) - 1).float()
    skewed = draw("rows", model.num_tables, settings.bag_size)
    # Products instead of pow(), whose rounding differs between CPUs.
    within = (skewed * skewed * skewed * model.rows_per_table).long()
    rows = within + model.rows_per_table * torch.arange(model.num_tables)[:, None]
    clicks = (dense[..., :1] + draw("noise", 1).float() - 0.5 > 0).float()
    return Batch(dense, rows, clicks)


class InputFeed(Iterator[Batch]):
    """Copies of each step's batch to the device, ``ahead`` steps before its use, into ``ahead + 1`` buffers in turn.

    Steps use the host's batches in turn, so that a long run needs no more memory than a short one.
    """

    def __init__(self, batches: list[Batch], device: torch.device, stream: Stream, ahead: int) -> None:
        # Copies to a GPU from pageable memory would block the host.
        pinned = [Batch(*(tensor.pin_memory() for tensor in batch)) for batch in batches if device.type == "cuda"]
        self._host = pinned or batches
        self._buffers = [
            Batch(*(torch.empty_like(tensor, device=device) for tensor in batches[0])) for _ in range(ahead + 1)
        ]
        self._copies = Prefetcher(stream, ahead, self._copy)
        self._steps = count()
        self._ahead = ahead

    def __next__(self) -> Batch:
        """Return the batch of the next step; valid until the next call."""
        step = next(self._steps)
        self._copies.take(step, last=step + self._ahead)
        return self._buffers[step % len(self._buffers)]

    def _copy(self, step: int) -> Transfer:
        source, target = self._host[step % len(self._host)], self._buffers[step % len(self._buffers)]

        def copy(_asynchronous: bool) -> None:
            for ours, theirs in zip(target, source, strict=True):
                ours.copy_(theirs, non_blocking=True)

        return copy


def _shifted(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right and fill with zeros."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)
