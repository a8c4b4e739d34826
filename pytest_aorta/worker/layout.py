"""The positions of a local block's elements in their logical tensor, also of a DTensor's local part.

Importing ``torch.distributed.tensor`` takes a rank half a second, so it is left to the ranks whose program uses it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

# A tensor with its name in a module or an optimizer.
NamedTensor: TypeAlias = tuple[str, torch.Tensor]


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

    def chunk(self, num_chunks: int, number: int, split_factor: int = 1) -> Axis:
        """Return piece ``number`` of ``torch.chunk``, which is empty if ``torch.chunk`` returns fewer pieces.

        With a ``split_factor`` above 1, return the pieces of as many chunks of the axis, as ``_StridedShard`` does.
        """
        if split_factor > 1:
            parts = (self.chunk(split_factor, part).chunk(num_chunks, number) for part in range(split_factor))
            return Axis(self.size, torch.cat([part.vector() for part in parts]))
        length = -(-len(self.held) // num_chunks)
        return Axis(self.size, self.held[number * length : (number + 1) * length])

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


def dtensor_type() -> type[DTensor] | None:
    """Return the class of DTensors; None if this process has not imported it, and has no DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    found: type[DTensor] | None = getattr(module, "DTensor", None)
    return found


def is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Return whether a tensor is a DTensor."""
    kind = dtensor_type()
    return kind is not None and isinstance(tensor, kind)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, or any other tensor itself."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def layout_of(tensor: torch.Tensor) -> str:
    """Return where in its logical tensor a DTensor's part lies; empty for other tensors, and where each rank has all.

    A plain tensor may be a part too, as of FSDP1 or ZeRO.
    """
    if not is_dtensor(tensor) or all(place.is_replicate() for place in tensor.placements):
        return ""
    return f"{tuple(map(str, tensor.placements))} at {tensor.device_mesh.get_coordinate()}"


def local_grids(name: str, tensor: DTensor) -> tuple[Grid, ...]:
    """Return the one or two grids at which this rank's part of ``tensor`` may lie; see :func:`_placed_grids`.

    Raises:
        ValueError: A placement is Partial.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return (Grid.of(Axis(tensor.numel(), range(0))),)
    if partial := [place for place in tensor.placements if place.is_partial()]:
        raise ValueError(f"{name}: {partial[0]} has no value yet; redistribute it to Shard or Replicate first")
    return _placed_grids(tuple(tensor.shape), tuple(tensor.device_mesh.shape), coordinate, tensor.placements)


def _placed_grids(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[Grid, ...]:
    """Return the grid at a mesh coordinate as DTensor reads placements, and also as FSDP2 makes them if the two differ.

    DTensor applies placements left to right (``compute_local_shape_and_global_offset``). A ``_StridedShard`` means
    that the ``split_factor`` shards to its right were made first: FSDP2 shards the parts that tensor parallelism
    leaves. If pieces are uneven, the two readings may give a rank different numbers of elements.
    """
    left_to_right = [Axis(size, range(size)) for size in shape]
    as_made = list(left_to_right)
    for dim in range(len(shape)):
        # Only the private class of strided shards has a split factor.
        of_dim = [
            (mesh_dim, getattr(place, "split_factor", 1))
            for mesh_dim, place in enumerate(placements)
            if getattr(place, "dim", None) == dim
        ]
        for mesh_dim, factor in of_dim:
            left_to_right[dim] = left_to_right[dim].chunk(mesh_shape[mesh_dim], coordinate[mesh_dim], factor)
        for mesh_dim in _order_of_making(of_dim, mesh_shape):
            as_made[dim] = as_made[dim].chunk(mesh_shape[mesh_dim], coordinate[mesh_dim])
    grids = [Grid.of(*(axis.simplified() for axis in axes)) for axes in (left_to_right, as_made)]
    return (grids[0],) if grids[0].key == grids[1].key else tuple(grids)


def _order_of_making(shardings: Sequence[tuple[int, int]], mesh_shape: Sequence[int]) -> list[int]:
    """Return the mesh dims, which are given with their split factors, in the order in which they split one dim.

    Mesh dims that the factor of a ``_StridedShard`` counts come before that ``_StridedShard``.
    """
    if not shardings:
        return []
    (mesh_dim, split_factor), *rest = shardings
    earlier, factor = 0, 1
    while factor < split_factor and earlier < len(rest):
        factor *= mesh_shape[rest[earlier][0]]
        earlier += 1
    return [*_order_of_making(rest[:earlier], mesh_shape), mesh_dim, *_order_of_making(rest[earlier:], mesh_shape)]
