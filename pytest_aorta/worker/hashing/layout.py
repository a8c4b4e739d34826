"""The grids of a DTensor's local part, from its mesh and placements.

Importing ``torch.distributed.tensor`` takes a rank half a second, so it is left to the ranks whose program uses it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

import torch

from pytest_aorta.worker.hashing.grid import Axis, Grid

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard

_Sharding: TypeAlias = "tuple[int, Shard | _StridedShard]"


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


def local_grids(name: str, tensor: DTensor) -> tuple[Grid, ...]:
    """Return the one or two grids at which this rank's part of ``tensor`` may lie; see :func:`placed_grids`.

    Raises:
        ValueError: A placement is Partial.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return (Grid.of(Axis(tensor.numel(), range(0))),)
    if partial := [place for place in tensor.placements if place.is_partial()]:
        raise ValueError(f"{name}: {partial[0]} has no value yet; redistribute it to Shard or Replicate first")
    return placed_grids(tuple(tensor.shape), tuple(tensor.device_mesh.shape), coordinate, tensor.placements)


def placed_grids(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[Grid, ...]:
    """Return the grid at a mesh coordinate as DTensor reads placements, and also as FSDP2 makes them if the two differ.

    DTensor applies placements left to right (``compute_local_shape_and_global_offset``). A ``_StridedShard`` means
    that the ``split_factor`` shards to its right were made first: FSDP2 shards the parts that tensor parallelism
    leaves. If pieces are uneven, the two readings may give a rank different numbers of elements.
    """
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    left_to_right = [Axis(size, range(size)) for size in shape]
    as_made = list(left_to_right)
    shardings = [(at, place) for at, place in enumerate(placements) if isinstance(place, Shard | _StridedShard)]
    for dim in range(len(shape)):
        of_dim = [(mesh_dim, place) for mesh_dim, place in shardings if place.dim == dim]
        for mesh_dim, place in of_dim:
            pieces = mesh_shape[mesh_dim], coordinate[mesh_dim]
            if isinstance(place, _StridedShard):
                left_to_right[dim] = left_to_right[dim].strided_chunk(*pieces, int(place.split_factor))
            else:
                left_to_right[dim] = left_to_right[dim].chunk(*pieces)
        for mesh_dim in _order_of_making(of_dim, mesh_shape):
            as_made[dim] = as_made[dim].chunk(mesh_shape[mesh_dim], coordinate[mesh_dim])
    grids = [Grid.of(*(axis.simplified() for axis in axes)) for axes in (left_to_right, as_made)]
    return (grids[0],) if grids[0].key == grids[1].key else tuple(grids)


def _order_of_making(shardings: Sequence[_Sharding], mesh_shape: Sequence[int]) -> list[int]:
    """Return the mesh dims in the order in which they split one dim.

    Mesh dims that the factor of a ``_StridedShard`` counts come before that ``_StridedShard``.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    if not shardings:
        return []
    (mesh_dim, place), *rest = shardings
    earlier, factor = 0, 1
    while isinstance(place, _StridedShard) and factor < int(place.split_factor) and earlier < len(rest):
        factor *= mesh_shape[rest[earlier][0]]
        earlier += 1
    return [
        *_order_of_making(rest[:earlier], mesh_shape), mesh_dim, *_order_of_making(rest[earlier:], mesh_shape)
    ]  # fmt: skip
