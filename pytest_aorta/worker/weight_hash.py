"""The weight hash: 128 bits of a model's logical tensors, from local shards and without a gather of weights.

**A tensor's sums.** A tensor's elements are taken in row-major order. Each has ``b`` = 8, 16 or 32 bits; an element of
8 bytes counts as two, the low half first. Each element is mixed on its own. The mixed elements are packed into 32-bit
words, ``32 / b`` to a word, the first element in the lowest bits. A tensor has two sums, of the lanes ``l`` = 0 and 1.
Word ``w``, read as signed, at index ``i`` adds to the sum of lane ``l``, modulo 2**64::

    row(l, i // 1024) * column(l, i % 1024) * w

The mix is a bijection of ``b`` bits that maps 0 to 0: the first round of Wellons' lowbias32 and of his hash16
("Prospecting for hash functions", 2018), and a mix of the same form for bytes. ``row`` is an odd signed 32-bit key,
lowbias32 of ``2 * (i // 1024) + l`` modulo 2**32, so that rows 2**31 apart (2**41 words) have the same key.
``column`` is an odd 64-bit key from SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).

**Layouts.** A sum does not depend on which rank holds which element, so every sharding of the same values has the same
hash. If a word is split between ranks, the terms of its parts add up to the word's term.

**Collisions.** The sum is a bilinear form of the keys, a universal hash after Carter and Wegman (1979): if the keys
were random, two given tensors that differ would share a lane's sum with probability 2**-26 at most. One changed element
always changes both lanes: its word changes, and its product with two odd keys is not zero.

**The digest.** The hash of a tensor is BLAKE2b's digest of its name, dtype, shape and sums; the hash of a model is the
digest of its tensors' hashes, sorted by name.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy

from pytest_aorta.common.text import distinct
from pytest_aorta.result.series import LocalWeights
from pytest_aorta.worker.accelerator import group_device
from pytest_aorta.worker.layout import Axis, Grid, NamedTensor, is_dtensor, layout_of, local_grids, local_part
from pytest_aorta.worker.simulation import is_simulated
from pytest_aorta.worker.torch_private import WRAPPERS, is_flat_parameter

_Group: TypeAlias = dist.ProcessGroup | None
_WRAPPERS = re.compile(rf"(?<![^.])({'|'.join(WRAPPERS)})\.")
_FSDP1 = "parameters of FSDP1 can be hashed inside of FullyShardedDataParallel.summon_full_params(model)"
# Replaces the number of elements in the facts of a grid whose size differs from its block's.
_OTHER_COUNT = -1


@dataclass(frozen=True)
class WeightHash:
    """The hash of tensors, as defined in the docstring of its module.

    Attributes:
        hex: Hash of all tensors, 32 hex digits.
        per_tensor: Name -> hash of the tensor, 32 hex digits; sorted by name.
    """

    hex: str
    per_tensor: dict[str, str]

    @classmethod
    def of(cls, per_tensor: Mapping[str, str]) -> WeightHash:
        """Combine hashes of single tensors, if no single group of ranks holds all of the tensors."""
        ordered = dict(sorted(per_tensor.items()))
        return cls(_digest(list(ordered.items())).hex(), ordered)


@dataclass(frozen=True)
class LocalShard:
    """A contiguous run of a flattened logical tensor.

    Attributes:
        name: Name of the logical tensor.
        shape: Shape of the logical tensor.
        tensor: Elements of the run in order, of any shape; empty if this rank holds none.
        offset: Flat index of the run's first element in the logical tensor.
    """

    name: str
    shape: tuple[int, ...]
    tensor: torch.Tensor
    offset: int


def hash_parameters(named: Iterable[NamedTensor], group: _Group = None) -> WeightHash:
    """Hash named tensors, in any order: DTensors of any sharding, and plain tensors replicated on every rank.

    Names count without the modules with which torch wraps others, e.g. ``_orig_mod`` of ``torch.compile``. Collective
    over ``group``, or over all ranks if it is None, once torch.distributed is initialized.

    Raises:
        RuntimeError: Replicas differ, ranks name different tensors, a shard's size contradicts its placements, or there
            is a DTensor and no process group.
        ValueError: There are no tensors, a name has two dtypes or shapes, a DTensor is Partial, elements do not have 1,
            2, 4 or 8 bytes on a CPU or CUDA device, or a tensor is quantized, nested, sparse, opaque or
            not initialized.
    """
    unwrapped = [(logical_name(name), tensor) for name, tensor in named]
    try:
        return _hash_pieces([_dtensor_or_replica(name, _detached(name, tensor)) for name, tensor in unwrapped], group)
    except RuntimeError as error:
        if _FSDP1 in str(error) or not any(is_flat_parameter(tensor) for _, tensor in unwrapped):
            raise
        raise RuntimeError(f"{error}; {_FSDP1}") from None


def logical_name(name: str) -> str:
    """Return a parameter's name without the modules with which torch wraps others."""
    return _WRAPPERS.sub("", name)


def hash_shards(shards: Iterable[LocalShard], group: _Group = None) -> WeightHash:
    """Hash tensors given as contiguous runs; a rank without any part of a tensor passes an empty run.

    Ranks that pass the same runs of a tensor are replicas. Collective, with the errors of :func:`hash_parameters`.

    Raises:
        RuntimeError: The runs do not cover a tensor exactly.
        ValueError: A run reaches beyond its tensor.
    """
    return _hash_pieces([_run(shard) for shard in shards], group)


def hash_local(name: str, tensor: torch.Tensor) -> str:
    """Return the hash of one plain tensor of this rank alone, 32 hex digits; not collective.

    The hash equals the tensor's entry in ``per_tensor`` of :func:`hash_parameters` on one rank.

    Raises:
        ValueError: The elements do not have 1, 2, 4 or 8 bytes, or the device is neither CPU nor CUDA.
    """
    piece = _dtensor_or_replica(name, _detached(name, tensor))
    [sums] = _logical_sums([piece.signature], _local_facts([[piece]])[None].cpu())
    return _digest((piece.signature, sums)).hex()


class LocalHashes:
    """Hashes of this rank's own parts of tensors after steps, which are read from the device only at the end.

    Whether a tensor has replicas on other ranks is not assumed: the hashes of all ranks show it. Not collective.
    """

    def __init__(self, most_by_tensor: int) -> None:
        """Keep the hashes of single tensors for the first ``most_by_tensor`` steps, and for the last one."""
        self._most_by_tensor = most_by_tensor
        self._steps: dict[int, tuple[list[_LocalSignature], torch.Tensor]] = {}
        self._problem = ""

    def add(self, step: int, named: Iterable[NamedTensor], *, again: bool = False) -> None:
        """Hash tensors after a step, unless it has a hash and they are not to be hashed ``again``.

        A tensor that can't be hashed is a problem of the record.
        """
        if step in self._steps and not again:
            return
        signatures, blocks = [], []
        for name, tensor in sorted(((logical_name(name), tensor) for name, tensor in named), key=itemgetter(0)):
            try:
                part = local_part(_detached(name, tensor))
                blocks.append(_block(part, Grid.of(Axis(part.numel(), range(part.numel())))))
            except ValueError as error:
                self._problem = f"{name} is not hashed: {error}"
                continue
            signatures.append(_LocalSignature(name, str(part.dtype), tuple(part.shape), layout_of(tensor)))
        if blocks:
            self._steps[step] = signatures, _sums_of_blocks(blocks)

    def digests(self, names: Mapping[str, str] = MappingProxyType({})) -> LocalWeights:
        """Return the hashes of all steps, with some ``names`` in place of others, and wait for the device."""
        rows = {}
        for step, (signatures, sums) in self._steps.items():
            named = (
                (own.name, _digest((own._replace(name=names.get(own.name, own.name)), *pair)).hex())
                for own, pair in zip(signatures, sums.tolist(), strict=True)
            )
            # Tensors of one name, such as those of two averaged models, are in no order.
            rows[step] = [value for _, value in sorted(named)]
        # The script may have changed the type after the last step; of equally common signatures, the later one.
        counts = Counter(tuple(self._steps[step][0]) for step in reversed(rows))
        common = max(counts, key=lambda signatures: counts[signatures], default=())
        by_tensor = [step for step in rows if tuple(self._steps[step][0]) == common]
        kept = {*by_tensor[: self._most_by_tensor], *by_tensor[-1:]}
        return LocalWeights(
            names=distinct((signature.name for signature in common), " ({})"),
            shapes=[list(signature.shape) for signature in common],
            tensors={str(step): row for step, row in rows.items() if step in kept},
            hashes={str(step): _digest(row).hex() for step, row in rows.items()},
            problem=self._problem,
        )


class _LocalSignature(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: str


class _Signature(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Piece:
    """The elements of a logical tensor on this rank, and the one or two grids that they may lie at."""

    signature: _Signature
    tensor: torch.Tensor
    grids: tuple[Grid, ...]


def _detached(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if is_lazy(tensor):
        raise ValueError(f"{name} is not initialized; run the model once before its weights are hashed")
    return tensor.detach()


def _dtensor_or_replica(name: str, tensor: torch.Tensor) -> _Piece:
    signature = _Signature(name, str(tensor.dtype), tuple(tensor.shape))
    if not is_dtensor(tensor):
        return _Piece(signature, tensor, (Grid.of(Axis(tensor.numel(), range(tensor.numel()))),))
    if not dist.is_initialized():
        raise RuntimeError(f"{name} is a shard and there is no process group: hash weights before leaving the group")
    return _Piece(signature, tensor.to_local(), local_grids(name, tensor))


def _run(shard: LocalShard) -> _Piece:
    size, end = math.prod(shard.shape), shard.offset + shard.tensor.numel()
    if shard.offset < 0 or end > size:
        raise ValueError(f"{shard.name}: run [{shard.offset}, {end}) leaves [0, {size}) of shape {shard.shape}")
    signature = _Signature(shard.name, str(shard.tensor.dtype), tuple(shard.shape))
    return _Piece(signature, shard.tensor.detach(), (Grid.of(Axis(size, range(shard.offset, end))),))


def _hash_pieces(pieces: list[_Piece], group: _Group) -> WeightHash:
    if not pieces:
        raise ValueError("there are no tensors to hash")
    tensors: dict[_Signature, list[_Piece]] = defaultdict(list)
    for piece in sorted(pieces, key=lambda piece: piece.signature):
        tensors[piece.signature].append(piece)
    if len({signature.name for signature in tensors}) < len(tensors):
        raise ValueError(f"a tensor has two dtypes or shapes in {list(tensors)}")
    if is_simulated():  # the parts of other ranks do not exist
        return WeightHash.of({signature.name: _digest(signature).hex() for signature in tensors})
    facts = _gather(_local_facts(tensors.values()), list(tensors), group)
    sums = _logical_sums(list(tensors), facts)
    per_tensor = {pair[0].name: _digest(pair).hex() for pair in zip(tensors, sums, strict=True)}
    return WeightHash.of(per_tensor)


def _digest(value: object) -> bytes:
    return hashlib.blake2b(repr(value).encode(), digest_size=16).digest()


def _short_digest(value: object) -> int:
    return int.from_bytes(_digest(value)[:8], "big", signed=True)


def _local_facts(tensors: Iterable[list[_Piece]]) -> torch.Tensor:
    """Return facts, int64 ``[tensor, 2, 4]``: by the first and by the last grids, two sums, region and count."""
    blocks: list[_Block] = []
    # The row of each block, the region and count of each row, and the two rows of each tensor.
    owners: list[int] = []
    rows: list[tuple[int, int]] = []
    chosen: list[tuple[int, int]] = []
    for parts in tensors:
        first = len(rows)
        for number in (0, -1)[: max(len(part.grids) for part in parts)]:
            placed = [(part, part.grids[number]) for part in parts]
            if any(part.tensor.numel() != grid.numel for part, grid in placed):
                nothing = torch.empty(0, dtype=torch.int8, device=parts[0].tensor.device)
                found, row = [_Block(nothing, Grid.of(Axis(0, range(0))))], (0, _OTHER_COUNT)
            else:
                found = [_piece_block(part, grid) for part, grid in placed]
                row = _short_digest([grid.key for _, grid in placed]), sum(grid.numel for _, grid in placed)
            owners += [len(rows)] * len(found)
            blocks += found
            rows.append(row)
        chosen.append((first, len(rows) - 1))
    sums = _sums_of_blocks(blocks)
    by_row = sums.new_zeros(len(rows), LANES).index_add_(0, sums.new_tensor(owners), sums)
    return torch.cat([by_row, sums.new_tensor(rows)], 1)[sums.new_tensor(chosen)]


def _piece_block(piece: _Piece, grid: Grid) -> _Block:
    try:
        return _block(piece.tensor, grid)
    except ValueError as error:
        raise ValueError(f"{piece.signature.name} is {error}") from error


def _gather(facts: torch.Tensor, signatures: list[_Signature], group: _Group) -> torch.Tensor:
    """Gather every rank's facts, ``[rank, tensor, 2, fact]``: 64 bytes per tensor and rank, never elements."""
    if not dist.is_initialized():
        return facts.unsqueeze(0).cpu()
    # The digests are compared first: the gather of facts could hang if ranks had different numbers of tensors.
    first, *others = _all_gather(facts.new_tensor(_short_digest(signatures)), group).tolist()
    if mismatched := [rank for rank, digest in enumerate(others, 1) if digest != first]:
        raise RuntimeError(f"ranks {mismatched} hash tensors of other names, dtypes or shapes than rank 0; {_FSDP1}")
    return _all_gather(facts, group).cpu()


def _all_gather(tensor: torch.Tensor, group: _Group) -> torch.Tensor:
    tensor = tensor.to(group_device(tensor.device, group))
    gathered = tensor.new_empty((dist.get_world_size(group), *tensor.shape))
    dist.all_gather(list(gathered.unbind()), tensor, group=group)
    return gathered


def _fitting(signatures: Sequence[_Signature], facts: torch.Tensor) -> torch.Tensor:
    """Return the facts, ``[tensor, rank, fact]``, by the grids that have the local block's size on every rank."""
    is_misfit = facts[..., 3] == _OTHER_COUNT
    fits = ~is_misfit.any(0)
    for number in (~fits.any(1)).nonzero().flatten().tolist():
        raise RuntimeError(
            f"{signatures[number].name}: ranks {is_misfit[:, number, 0].nonzero().flatten().tolist()} hold a number of "
            f"elements that contradicts their placements of {signatures[number].shape}"
        )
    return facts[:, torch.arange(len(signatures)), fits.int().argmax(1)].transpose(0, 1)


def _logical_sums(signatures: Sequence[_Signature], facts: torch.Tensor) -> list[tuple[int, int]]:
    """Add up the regions of each tensor, each once for any number of replicas; facts are ``[rank, tensor, 2, fact]``.

    All tensors are handled at once: a loop over them would take a minute at thousands of ranks.
    """
    fitting = held = _fitting(signatures, facts)
    for key in (3, 2):  # replicas of a region then follow each other
        order = held[..., key].argsort(dim=1, stable=True)
        held = held.gather(1, order.unsqueeze(2).expand_as(held))
    is_again = torch.zeros(held.shape[:2], dtype=torch.bool)
    is_again[:, 1:] = (held[:, 1:, 2:] == held[:, :-1, 2:]).all(2)
    differs = is_again[:, 1:] & (held[:, 1:, :2] != held[:, :-1, :2]).any(2)
    for number in differs.any(1).nonzero().flatten().tolist():
        where = f"replicas of {signatures[number].name} differ between {_replicas(fitting[number])}"
        raise RuntimeError(f"{where}: a race, gradients that were not reduced, or unequal first weights")
    # Sums of int64 wrap around at 2**64, as the hash's do.
    first, second, _, counts = (held * ~is_again.unsqueeze(2)).sum(1).unbind(1)
    for signature, num_held in zip(signatures, counts.tolist(), strict=True):
        if num_held != (size := math.prod(signature.shape)):
            raise RuntimeError(f"{signature.name}: the ranks hold {num_held} elements of {size} {signature.shape}")
    return [(one % 2**64, two % 2**64) for one, two in zip(first.tolist(), second.tolist(), strict=True)]


def _replicas(facts: torch.Tensor) -> str:
    """Return the ranks of the first region whose replicas differ, by the sums that they hold."""
    regions: dict[tuple[int, int], dict[tuple[int, int], list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, (first, second, region, count) in enumerate(facts.tolist()):
        regions[region, count][first, second].append(rank)
    replicas = next(replicas for replicas in regions.values() if len(replicas) > 1)
    return " and ".join(f"ranks {ranks}" for ranks in replicas.values())


_ELEMENT_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
# Rows whose products are added up in float64, where integers are exact up to 2**53: 2**6 products of a 31-bit and a
# 16-bit factor add up to at most 2**53.
_EXACT_ROWS = 64
# Rows of a chunk: few enough that the buffers fit a CPU's caches, or enough to fill a device, with 32 MiB of buffers.
_CPU_ROWS, _DEVICE_ROWS = _EXACT_ROWS, 32 * _EXACT_ROWS
# Blocks of at most this many elements are summed together, up to as many as have 16 MiB of terms in both lanes.
_SMALL, _MOST_TOGETHER = 4096, 256


def tensor_sums(tensor: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return both lanes' sums, int64 ``[2]``, of a local block at ``grid``, on the block's device.

    Raises:
        ValueError: The elements do not have 1, 2, 4 or 8 bytes, or the tensor is quantized, nested, sparse, opaque or
            without memory.
    """
    return _block_sums(_block(tensor, grid))


class _Block(NamedTuple):
    """Elements as integers of 8, 16 or 32 bits, and where they lie in their tensor."""

    elements: torch.Tensor
    grid: Grid


def _block(tensor: torch.Tensor, grid: Grid) -> _Block:
    """Return the elements of a local block at ``grid``, with the errors of :func:`tensor_sums`."""
    if tensor.is_quantized or tensor.is_nested or tensor.layout is not torch.strided:
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else tensor.layout
        raise ValueError(f"{kind}; dense tensors can be hashed, such as the parts of this one")
    size = tensor.element_size()
    if size not in _ELEMENT_DTYPES or tensor.is_meta:
        raise ValueError(f"{tensor.dtype} on {tensor.device}; {[*_ELEMENT_DTYPES]}-byte elements can be hashed")
    # The values count, so a conjugation or negation that a view has put off is done first.
    values = tensor.resolve_conj().resolve_neg().reshape(-1)
    if size == 8 and values.stride(0) != 1:
        # The halves of an element have to lie side by side.
        values = values.clone(memory_format=torch.contiguous_format)
    return _Block(values.view(_ELEMENT_DTYPES[size]), grid.repeated(2) if size == 8 else grid)


def _sums_of_blocks(blocks: Sequence[_Block]) -> torch.Tensor:
    """Return the sums of each block, int64 ``[n, 2]``, on one device; small ones of one type are summed together."""
    sums: dict[int, torch.Tensor] = {}
    batches: dict[tuple[torch.device, torch.dtype], list[list[int]]] = defaultdict(list)
    for number, block in enumerate(blocks):
        if len(block.elements) > _SMALL:
            sums[number] = _block_sums(block)
            continue
        alike = batches[block.elements.device, block.elements.dtype]
        if not alike or len(alike[-1]) == _MOST_TOGETHER:
            alike.append([])
        alike[-1].append(number)
    for batch in (batch for alike in batches.values() for batch in alike):
        sums |= zip(batch, _sums_of_small([blocks[number] for number in batch]).unbind(), strict=True)
    return stacked([sums[number] for number in range(len(blocks))])


def stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack tensors on one device, from which they can be read at once, and where the group gathers."""
    # An optimizer keeps its step on the CPU beside state on the GPU.
    device = next((each.device for each in tensors if each.device.type != "cpu"), torch.device("cpu"))
    return torch.stack([each.to(device) for each in tensors])


def _block_sums(block: _Block) -> torch.Tensor:
    elements, grid = block
    return _sums_of_parts(elements, grid) if grid.run is None else _sums_of_run(elements, grid.run)


def _sums_of_run(elements: torch.Tensor, run: range) -> torch.Tensor:
    """Sum chunks of whole rows, by a matrix product: float64 multiplies and adds several times as fast as int64."""
    device, width = elements.device, COLUMNS * 4 // elements.element_size()
    first, last = run.start // width, -(-run.stop // width)
    num_rows = _CPU_ROWS if device.type == "cpu" else _DEVICE_ROWS
    num_rows = min(num_rows, -(-max(1, last - first) // _EXACT_ROWS) * _EXACT_ROWS)
    block, spare = elements.new_empty(2, num_rows, width)
    factors = torch.empty(num_rows, COLUMNS, dtype=torch.float64, device=device)
    totals = torch.zeros(2 * LANES, COLUMNS, dtype=torch.int64, device=device)
    # Make all keys at once: making the keys of each chunk would cost as many calls as hashing the chunk's words.
    keys = _halves(torch.arange(first, last + num_rows, device=device))
    for row in range(first, last, num_rows):
        begin, end = max(row * width, run.start), min((row + num_rows) * width, run.stop)
        if end - begin < block.numel():
            block.zero_()  # elements that the run does not hold add nothing
        block.view(-1)[begin - row * width : end - row * width] = elements[begin - run.start : end - run.start]
        factors.copy_(_mix(block, spare).view(torch.int32))
        batches = keys[:, row - first : row - first + num_rows].unflatten(1, (-1, _EXACT_ROWS)).transpose(0, 1)
        totals += torch.bmm(batches, factors.view(-1, _EXACT_ROWS, COLUMNS)).to(torch.int64).sum(0)
    lanes: torch.Tensor = totals[:LANES] + (totals[LANES:] << 16)
    return (lanes * _column_keys(torch.arange(COLUMNS, device=device))).sum(1)


def _sums_of_parts(elements: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Sum the terms of single elements, for a grid with gaps: rows of such a grid may hold few elements each."""
    device = elements.device
    size = COLUMNS * (_EXACT_ROWS if device.type == "cpu" else _DEVICE_ROWS)
    sums = torch.zeros(LANES, dtype=torch.int64, device=device)
    for begin in range(0, len(elements), size):
        part = elements[begin : begin + size].clone()
        sums += _terms(part, grid.flat_index(begin, begin + len(part), device)).sum(1)
    return sums


def _sums_of_small(blocks: Sequence[_Block]) -> torch.Tensor:
    """Return the sums of small blocks of one type, int64 ``[n, 2]``: calls for each would take longer."""
    elements = torch.cat([block.elements for block in blocks])
    sizes = [len(block.elements) for block in blocks]
    host = torch.device("cpu")
    index = torch.cat([block.grid.flat_index(0, size, host) for block, size in zip(blocks, sizes, strict=True)])
    owners = torch.repeat_interleave(torch.arange(len(blocks)), torch.tensor(sizes)).to(elements.device)
    terms = _terms(elements, index.to(elements.device))
    return terms.new_zeros(LANES, len(blocks)).index_add_(1, owners, terms).T


def _terms(elements: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the terms of elements at flat indices, int64 ``[2, n]``; the elements are mixed in place."""
    device, bits = elements.device, 8 * elements.element_size()
    per_word = 32 // bits
    words, place = _mix(elements, torch.empty_like(elements)).to(torch.int32), index % (COLUMNS * per_word)
    if per_word > 1:
        words = (words & (2**bits - 1)) << (bits * (place % per_word)).to(torch.int32)
    columns = _column_keys(torch.arange(COLUMNS, device=device))
    return _row_keys(index // (COLUMNS * per_word)) * columns[:, place // per_word] * words


def _halves(rows: torch.Tensor) -> torch.Tensor:
    """Return the keys of rows for both lanes, float64 ``[4, n]``: the low 16 bits, then the high ones."""
    keys = _row_keys(rows)
    return torch.cat([keys & 0xFFFF, keys >> 16]).to(torch.float64)


def _mix(elements: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
    """Mix elements in place; ``spare`` is a buffer of the same size."""
    mix = MIXES[8 * elements.element_size()]
    _xor_shift(elements, mix.fold, spare).mul_(_signed(mix.factor, 8 * elements.element_size()))
    return _xor_shift(elements, mix.shift, spare)


# The version of the definition in this package's docstring. Each result records the version, since hashes of two
# definitions are never compared.
VERSION = 2
LANES = 2
COLUMNS = 1024


class _Mix(NamedTuple):
    """``x ^= x >> fold; x *= factor; x ^= x >> shift`` of unsigned integers."""

    fold: int
    factor: int
    shift: int


# The mix of elements by their number of bits.
MIXES = {8: _Mix(4, 0x9D, 3), 16: _Mix(8, 0x88B5, 7), 32: _Mix(16, 0x7FEB352D, 15)}
ROW_ROUNDS, ROW_LAST_SHIFT = ((16, 0x7FEB352D), (15, 0x846CA68B)), 16
# Step and start of the sequence of column keys: fractional bits of sqrt(2) and sqrt(5), made odd.
COLUMN_KEYS = (0x6A09E667F3BCC909, 0x3C6EF372FE94F82B)
COLUMN_ROUNDS, COLUMN_LAST_SHIFT = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)), 31


def _row_keys(rows: torch.Tensor) -> torch.Tensor:
    """Return the keys ``[2, n]`` of ``rows``, int64 in int32's range: lowbias32 of ``2 * row + lane``, made odd."""
    counters = torch.stack([rows * LANES + lane for lane in range(LANES)])
    return _rounds(counters.to(torch.int32), ROW_ROUNDS, ROW_LAST_SHIFT).bitwise_or_(1).to(torch.int64)


def _column_keys(columns: torch.Tensor) -> torch.Tensor:
    """Return the keys ``[2, n]`` of ``columns``, int64: SplitMix64 values of ``2 * column + lane``, made odd."""
    step, start = (_signed(key, 64) for key in COLUMN_KEYS)
    counters = torch.stack([columns * LANES + lane for lane in range(LANES)]) * step + start
    return _rounds(counters, COLUMN_ROUNDS, COLUMN_LAST_SHIFT).bitwise_or_(1)


def _rounds(values: torch.Tensor, rounds: tuple[tuple[int, int], ...], last_shift: int) -> torch.Tensor:
    """Xor-shift and multiply in place, then xor-shift once more."""
    spare = torch.empty_like(values)
    for shift, factor in rounds:
        _xor_shift(values, shift, spare).mul_(_signed(factor, 8 * values.element_size()))
    return _xor_shift(values, last_shift, spare)


def _xor_shift(values: torch.Tensor, shift: int, spare: torch.Tensor) -> torch.Tensor:
    """Xor integers in place with themselves shifted right as unsigned; ``spare`` is a buffer of the same shape."""
    # A signed shift copies the sign down; the mask makes it the unsigned shift of the published mixes.
    width = 8 * values.element_size()
    torch.bitwise_right_shift(values, shift, out=spare).bitwise_and_((1 << (width - shift)) - 1)
    return values.bitwise_xor_(spare)


def _signed(value: int, bits: int) -> int:
    """Return the signed integer of the same bits; signed arithmetic wraps modulo 2**bits too."""
    return value - 2**bits if value >= 2 ** (bits - 1) else value
