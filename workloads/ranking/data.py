"""Synthetic samples, each a function of the seed and its global number, and their way to the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pytest_aorta.worker import StreamSpans, Transfer

from ..common.seeding import seed_of
from ..fsdp.lanes import Lane, ReadAhead

# Of splitmix64 (Steele, Lea, Flood 2014), as signed numbers; int64 products wrap around.
_GOLDEN, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685
_BITS = 53


@dataclass(frozen=True)
class Batch:
    """Samples of one step on one rank; the first axis is that of micro-batches.

    Attributes:
        dense: float32 ``[micro, batch, num_dense]`` in [-1, 1).
        rows: int64 ``[micro, batch, num_tables, bag_size]``, counted over all tables; low rows are the popular ones.
        clicks: float32 ``[micro, batch, 1]``, 0 or 1; they depend on the first dense feature, so there is something to
            learn.
    """

    dense: torch.Tensor
    rows: torch.Tensor
    clicks: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them."""
        return self.dense, self.rows, self.clicks

    @property
    def num_bytes(self) -> int:
        """Of all of them."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def pinned(self) -> Batch:
        """The same in pinned memory, which copies to a GPU need to run beside the host."""
        return Batch(*(tensor.pin_memory() for tensor in self.tensors))

    def empty_on(self, device: torch.device) -> Batch:
        """Room for it on ``device``."""
        return Batch(*(torch.empty_like(tensor, device=device) for tensor in self.tensors))


def uniform(key: int, numbers: torch.Tensor) -> torch.Tensor:
    """A number in [0, 1) for each of ``numbers``, int64: float64 of the same shape, the same on every CPU."""
    mixed = (numbers + key) * _GOLDEN
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        mixed = (mixed ^ _shifted(mixed, shift)) * factor
    drawn: torch.Tensor = _shifted(mixed ^ _shifted(mixed, 31), 64 - _BITS).double() * 2.0**-_BITS
    return drawn


def make_batch(config: Mapping[str, Any], number: int, rank: int, world_size: int) -> Batch:
    """The ``number``-th batch of ``rank``: a global batch is the same however many ranks share it."""
    size, num_micro = config["batch_size"], config["gradient_accumulation"]
    samples = torch.arange(size) + size * (rank + world_size * torch.arange(num_micro)[:, None])

    def draw(what: str, *shape: int) -> torch.Tensor:
        count = torch.Size(shape).numel()
        numbers = samples[..., None] * count + torch.arange(count)
        drawn: torch.Tensor = uniform(seed_of(what, config["seed"], number), numbers).unflatten(-1, shape)
        return drawn

    dense = (2 * draw("dense", config["num_dense"]) - 1).float()
    skewed = draw("rows", config["num_tables"], config["bag_size"])
    # The third power by products: rounded alike everywhere.
    within = (skewed * skewed * skewed * config["rows_per_table"]).long()
    rows = within + config["rows_per_table"] * torch.arange(config["num_tables"])[:, None]
    clicks = (dense[..., :1] + draw("noise", 1).float() - 0.5 > 0).float()
    return Batch(dense, rows, clicks)


class InputFeed:
    """Copies each step's batch to the device, ``ahead`` steps before its use, into ``ahead + 1`` places in turn.

    The host's batches are used in turn, so that a long run needs no more memory than a short one.
    """

    def __init__(self, batches: list[Batch], device: torch.device, lane: Lane, ahead: int, spans: StreamSpans) -> None:
        self._host = [batch.pinned() for batch in batches] if device.type == "cuda" else batches
        self._places = [batches[0].empty_on(device) for _ in range(ahead + 1)]
        self._copies = ReadAhead(lane, ahead, self._copy)
        self._ahead = ahead
        self._spans = spans

    def take(self, step: int) -> Batch:
        """The batch of ``step``, valid until the next is taken; steps count from 0."""
        self._copies.take(step, last=step + self._ahead)
        return self._places[step % len(self._places)]

    def _copy(self, step: int) -> Transfer:
        source, target = self._host[step % len(self._host)], self._places[step % len(self._places)]

        def copy(_asynchronous: bool) -> None:
            for ours, theirs in zip(target.tensors, source.tensors, strict=True):
                ours.copy_(theirs, non_blocking=True)

        return self._spans.around("copy", copy)


def _shifted(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """A shift to the right that fills up with zeros."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)
