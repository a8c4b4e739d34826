"""Grids: the positions of a local block's elements in their logical tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Axis:
    """The indices of one dimension that this rank holds.

    Attributes:
        size: Number of indices of the whole dimension.
        held: The held indices, a range or an ascending int64 vector ``[n]``.
    """

    size: int
    held: range | torch.Tensor

    def vector(self) -> torch.Tensor:
        """Return the held indices, int64 ``[n]``."""
        return torch.arange(self.held.start, self.held.stop) if isinstance(self.held, range) else self.held

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the held indices at ``positions``, int64 of the same shape."""
        if isinstance(self.held, range):
            return positions + self.held.start
        return self.held.to(positions.device)[positions]

    def chunk(self, num_chunks: int, number: int) -> Axis:
        """Return piece ``number`` of ``torch.chunk``, which is empty if ``torch.chunk`` returns fewer pieces."""
        length = -(-len(self.held) // num_chunks)
        return Axis(self.size, self.held[number * length : (number + 1) * length])

    def strided_chunk(self, num_chunks: int, number: int, split_factor: int) -> Axis:
        """Return piece ``number`` of each of the axis's ``split_factor`` chunks, as ``_StridedShard`` does."""
        parts = (self.chunk(split_factor, part).chunk(num_chunks, number) for part in range(split_factor))
        return Axis(self.size, torch.cat([part.vector() for part in parts]))

    def simplified(self) -> Axis:
        """Return the same axis, with a range in place of a vector without gaps."""
        if not len(self.held):
            return self
        whole = range(int(self.held[0]), int(self.held[-1]) + 1)
        return Axis(self.size, whole) if len(whole) == len(self.held) else self


@dataclass(frozen=True)
class Grid:
    """The position of a local block in its logical tensor: the product of its axes, row-major."""

    axes: tuple[Axis, ...]

    @classmethod
    def of(cls, *axes: Axis) -> Grid:
        """Return the grid of ``axes``; a full axis is merged into a range before it, so a shard of dim 0 is one run."""
        merged = [Axis(1, range(1))]
        for axis in axes:
            last = merged[-1]
            if isinstance(last.held, range) and len(axis.held) == axis.size:
                begin, end = last.held.start * axis.size, last.held.stop * axis.size
                merged[-1] = Axis(last.size * axis.size, range(begin, end))
            elif last.size == len(last.held) == 1:
                merged[-1] = axis
            else:
                merged.append(axis)
        return cls(tuple(merged))

    def repeated(self, times: int) -> Grid:
        """Return the grid of words for elements of ``times`` words each."""
        return Grid.of(*self.axes, Axis(times, range(times)))

    @property
    def run(self) -> range | None:
        """Return the held flat indices if they are one contiguous run, else None."""
        held = self.axes[0].held
        return held if len(self.axes) == 1 and isinstance(held, range) else None

    @property
    def key(self) -> list[object]:
        """Return the values that identify this grid, for a digest."""
        return [axis.held if isinstance(axis.held, range) else axis.held.tolist() for axis in self.axes]

    @property
    def numel(self) -> int:
        """Return the number of elements in the grid."""
        return math.prod(len(axis.held) for axis in self.axes)

    def flat_index(self, begin: int, end: int, device: torch.device) -> torch.Tensor:
        """Return the logical flat indices, int64 ``[end - begin]``, of the local elements ``[begin, end)``."""
        positions = torch.arange(begin, end, device=device)
        if len(self.axes) == 1:
            return self.axes[0].at(positions)
        index, stride = torch.zeros_like(positions), 1
        for axis in reversed(self.axes):
            index += axis.at(positions % len(axis.held)) * stride
            positions, stride = positions // len(axis.held), stride * axis.size
        return index
