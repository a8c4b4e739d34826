"""A 128-bit hash of a model's logical tensors, from local shards and with no gather of weights.

A tensor's hash is a sum modulo 2**64, in two lanes with keys of their own, of a mix of each element's flat
index in the logical tensor and raw bits. A sum does not care who holds what, so every sharding of the same
values has the same hash. The mix is SplitMix64's finalizer (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014; constants: variant 13 of Stafford's "Better bit mixing").
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard, _StridedShard

# Each lane's odd step from index to index and its start: fractional bits of the golden ratio, sqrt(3),
# sqrt(2) and sqrt(5), which nobody could have picked to fit.
_LANES = ((0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B), (0x6A09E667F3BCC909, 0x3C6EF372FE94F82B))
_MIX_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_MIX_LAST_SHIFT = 31
_BIT_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# A few int64 temporaries of this many elements: few enough for a CPU's caches, enough to fill a GPU.
_CHUNK_ELEMENTS = {"cpu": 2**18, "cuda": 2**24}

_Group: TypeAlias = dist.ProcessGroup | None


@dataclass(frozen=True)
class WeightHash:
    """The hash of all tensors (32 hex digits) and of each tensor by name."""

    hex: str
    per_tensor: dict[str, str]


@dataclass(frozen=True)
class LocalShard:
    """A contiguous run of the flattened logical tensor ``name``, starting at flat index ``offset``."""

    name: str
    shape: tuple[int, ...]
    tensor: torch.Tensor
    offset: int


def hash_parameters(named: Iterable[tuple[str, torch.Tensor]], group: _Group = None) -> WeightHash:
    """Hash named tensors, in any order: DTensors of any sharding, and plain tensors replicated on every rank.

    Collective over ``group`` once torch.distributed is initialised.

    Raises:
        RuntimeError: replicas differ, ranks name different tensors, or a rank's shard is not its placements'.
        ValueError: there are no tensors, or a DTensor is Partial.
    """
    return _hash_pieces([_dtensor_or_replica(name, tensor.detach()) for name, tensor in named], group)


def hash_shards(shards: Iterable[LocalShard], group: _Group = None) -> WeightHash:
    """Hash tensors given as contiguous runs; a rank that holds nothing of a tensor gives an empty one.

    Ranks that give the same runs of a tensor are replicas. Collective and raising as :func:`hash_parameters`,
    and where runs do not cover a tensor exactly.
    """
    return _hash_pieces([_run(shard) for shard in shards], group)


class _Signature(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Piece:
    """Elements this rank holds of a logical tensor, and where in it they belong."""

    signature: _Signature
    tensor: torch.Tensor
    grid: _Grid


def _dtensor_or_replica(name: str, tensor: torch.Tensor) -> _Piece:
    signature = _Signature(name, str(tensor.dtype), tuple(tensor.shape))
    if not isinstance(tensor, DTensor):
        return _Piece(signature, tensor, _Grid.of(_Axis(tensor.numel(), range(tensor.numel()))))
    local, grid = tensor.to_local(), _local_grid(name, tensor)
    if local.numel() != grid.numel:
        layout = f"{tensor.placements} of {signature.shape} on mesh {tuple(tensor.device_mesh.shape)}"
        raise RuntimeError(f"{name}: this rank holds {local.numel()} elements; {layout} gives it {grid.numel}")
    return _Piece(signature, local, grid)


def _run(shard: LocalShard) -> _Piece:
    size, end = math.prod(shard.shape), shard.offset + shard.tensor.numel()
    if shard.offset < 0 or end > size:
        raise ValueError(f"{shard.name}: run [{shard.offset}, {end}) leaves [0, {size}) of shape {shard.shape}")
    signature = _Signature(shard.name, str(shard.tensor.dtype), tuple(shard.shape))
    return _Piece(signature, shard.tensor.detach(), _Grid.of(_Axis(size, range(shard.offset, end))))


def _hash_pieces(pieces: list[_Piece], group: _Group) -> WeightHash:
    if not pieces:
        raise ValueError("there are no tensors to hash")
    tensors: dict[_Signature, list[_Piece]] = defaultdict(list)
    for piece in sorted(pieces, key=lambda piece: piece.signature):
        tensors[piece.signature].append(piece)
    if len({signature.name for signature in tensors}) < len(tensors):
        raise ValueError(f"a tensor has two dtypes or shapes in {list(tensors)}")
    facts = _gather(torch.stack([_local_facts(parts) for parts in tensors.values()]), list(tensors), group)
    sums = [_logical_sums(signature, facts[:, number]) for number, signature in enumerate(tensors)]
    per_tensor = {pair[0].name: _digest(pair).hex() for pair in zip(tensors, sums, strict=True)}
    return WeightHash(_digest(list(per_tensor.items())).hex(), per_tensor)


def _digest(value: object) -> bytes:
    return hashlib.blake2b(repr(value).encode(), digest_size=16).digest()


def _short_digest(value: object) -> int:
    return int.from_bytes(_digest(value)[:8], "big", signed=True)


def _local_facts(parts: list[_Piece]) -> torch.Tensor:
    """Of one tensor: both lanes' sums, which region of it this rank holds, and how many elements that is."""
    sums = torch.stack([_sums(part) for part in parts]).sum(0)
    region = _short_digest([part.grid.key for part in parts])
    return torch.cat([sums, sums.new_tensor([region, sum(part.grid.numel for part in parts)])])


def _gather(facts: torch.Tensor, signatures: list[_Signature], group: _Group) -> torch.Tensor:
    """Every rank's facts, ``[rank, tensor, fact]``: 32 bytes a tensor and rank, never its elements."""
    if not dist.is_initialized():
        return facts.unsqueeze(0).cpu()
    # First: were the number of tensors another on some rank, the gather of their facts could hang.
    first, *others = _all_gather(facts.new_tensor(_short_digest(signatures)), group).tolist()
    if odd := [rank for rank, digest in enumerate(others, 1) if digest != first]:
        raise RuntimeError(f"ranks {odd} hash tensors of other names, dtypes or shapes than rank 0 does")
    return _all_gather(facts, group).cpu()


def _all_gather(tensor: torch.Tensor, group: _Group) -> torch.Tensor:
    gathered = tensor.new_empty((dist.get_world_size(group), *tensor.shape))
    dist.all_gather(list(gathered.unbind()), tensor, group=group)
    return gathered


def _logical_sums(signature: _Signature, facts: torch.Tensor) -> tuple[int, int]:
    """Add up the regions of one tensor, each once however many ranks replicate it."""
    regions: dict[tuple[int, int], dict[tuple[int, int], list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, (first, second, region, count) in enumerate(facts.tolist()):
        if count:
            regions[region, count][first, second].append(rank)
    for replicas in regions.values():
        if len(replicas) > 1:
            ranks = " and ".join(f"ranks {ranks}" for ranks in replicas.values())
            raise RuntimeError(f"replicas of {signature.name} differ between {ranks}")
    held, size = sum(count for _, count in regions), math.prod(signature.shape)
    if held != size:
        raise RuntimeError(f"{signature.name}: the ranks hold {held} elements of {size} {signature.shape}")
    sums = [sums for replicas in regions.values() for sums in replicas]
    return sum(first for first, _ in sums) % 2**64, sum(second for _, second in sums) % 2**64


def _sums(piece: _Piece) -> torch.Tensor:
    """Both lanes' sums over the elements of one piece, on its device."""
    tensor, size = piece.tensor, piece.tensor.element_size()
    if size not in _BIT_DTYPES or tensor.device.type not in _CHUNK_ELEMENTS:
        allowed = f"{[*_BIT_DTYPES]}-byte elements on {[*_CHUNK_ELEMENTS]} can be hashed"
        raise ValueError(f"{piece.signature.name} is {tensor.dtype} on {tensor.device}; {allowed}")
    bits = tensor.reshape(-1).view(_BIT_DTYPES[size])
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    chunk = _CHUNK_ELEMENTS[tensor.device.type]
    for begin in range(0, bits.numel(), chunk):
        part = bits[begin : begin + chunk]
        sums += _mixed_sums(piece.grid.flat_index(begin, begin + part.numel(), tensor.device), part)
    return sums


def _mixed_sums(index: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    lanes, spare = [], torch.empty_like(index)
    for step, start in _LANES:
        mixed = torch.mul(index, _signed(step)).add_(_signed(start)).add_(bits)
        for shift, factor in _MIX_ROUNDS:
            _xor_shift(mixed, shift, spare).mul_(_signed(factor))
        lanes.append(_xor_shift(mixed, _MIX_LAST_SHIFT, spare).sum())
    return torch.stack(lanes)


def _xor_shift(values: torch.Tensor, shift: int, spare: torch.Tensor) -> torch.Tensor:
    # An int64 shift copies the sign down; the mask makes it the unsigned shift of the published mix.
    torch.bitwise_right_shift(values, shift, out=spare).bitwise_and_((1 << (64 - shift)) - 1)
    return values.bitwise_xor_(spare)


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit value; int64 arithmetic wraps modulo 2**64 alike."""
    return value - 2**64 if value >= 2**63 else value


@dataclass(frozen=True)
class _Axis:
    """The indices, within a dimension of ``size``, that this rank holds: a range, or any ascending vector."""

    size: int
    held: range | torch.Tensor

    def vector(self) -> torch.Tensor:
        return torch.arange(self.held.start, self.held.stop) if isinstance(self.held, range) else self.held

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        if isinstance(self.held, range):
            return positions + self.held.start
        return self.held.to(positions.device)[positions]

    def chunk(self, num_chunks: int, number: int) -> _Axis:
        """One of the pieces of ``torch.chunk``, empty where it gives fewer."""
        length = -(-len(self.held) // num_chunks)
        return _Axis(self.size, self.held[number * length : (number + 1) * length])

    def strided_chunk(self, num_chunks: int, number: int, split_factor: int) -> _Axis:
        """The piece ``number`` of each of ``split_factor`` pieces, as ``_StridedShard`` takes them."""
        parts = (self.chunk(split_factor, part).chunk(num_chunks, number) for part in range(split_factor))
        return _Axis(self.size, torch.cat([part.vector() for part in parts]))

    def simplified(self) -> _Axis:
        """With a range for a vector without gaps."""
        if not len(self.held):
            return self
        whole = range(int(self.held[0]), int(self.held[-1]) + 1)
        return _Axis(self.size, whole) if len(whole) == len(self.held) else self


@dataclass(frozen=True)
class _Grid:
    """Where a local block lies in its logical tensor: the product of its axes, row-major."""

    axes: tuple[_Axis, ...]

    @classmethod
    def of(cls, *axes: _Axis) -> _Grid:
        """Merge every axis held in full into a range before it, so that a shard of dim 0 is one run."""
        merged = [_Axis(1, range(1))]
        for axis in axes:
            last = merged[-1]
            if isinstance(last.held, range) and len(axis.held) == axis.size:
                begin, end = last.held.start * axis.size, last.held.stop * axis.size
                merged[-1] = _Axis(last.size * axis.size, range(begin, end))
            elif last.size == len(last.held) == 1:
                merged[-1] = axis
            else:
                merged.append(axis)
        return cls(tuple(merged))

    @property
    def key(self) -> list[object]:
        return [axis.held if isinstance(axis.held, range) else axis.held.tolist() for axis in self.axes]

    @property
    def numel(self) -> int:
        return math.prod(len(axis.held) for axis in self.axes)

    def flat_index(self, begin: int, end: int, device: torch.device) -> torch.Tensor:
        """The logical flat indices of the local elements ``[begin, end)``."""
        positions = torch.arange(begin, end, device=device)
        if len(self.axes) == 1:
            return self.axes[0].at(positions)
        index, stride = torch.zeros_like(positions), 1
        for axis in reversed(self.axes):
            index += axis.at(positions % len(axis.held)) * stride
            positions, stride = positions // len(axis.held), stride * axis.size
        return index


def _local_grid(name: str, tensor: DTensor) -> _Grid:
    """What this rank holds of a DTensor: its placements applied to the indices of each dim, left to right."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return _Grid.of(_Axis(tensor.numel(), range(0)))
    axes = [_Axis(size, range(size)) for size in tensor.shape]
    for mesh_dim, placement in enumerate(tensor.placements):
        pieces = tensor.device_mesh.size(mesh_dim), coordinate[mesh_dim]
        if isinstance(placement, _StridedShard):
            axes[placement.dim] = axes[placement.dim].strided_chunk(*pieces, int(placement.split_factor))
        elif isinstance(placement, Shard):
            axes[placement.dim] = axes[placement.dim].chunk(*pieces)
        elif not placement.is_replicate():
            raise ValueError(f"{name}: {placement} has no value yet; redistribute it to Shard or Replicate first")
    return _Grid.of(*(axis.simplified() for axis in axes))
