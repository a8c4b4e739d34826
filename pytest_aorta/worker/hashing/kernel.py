"""A triton kernel that computes the sums of a weight hash on CUDA in one pass; its bits equal those of ``eager_sums``.

Each program takes a range of rows of keys. A thread's columns stay the same from row to row, so each thread adds up
``row * mixed`` and multiplies by the column's key once, at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pytest_aorta.worker.hashing import keys
from pytest_aorta.worker.hashing.grid import Grid, Rows

_COLUMNS = tl.constexpr(keys.COLUMNS)
_FOLD_32, _FACTOR_32, _SHIFT_32 = (tl.constexpr(value) for value in keys.MIXES[32])
_FOLD_16, _FACTOR_16, _SHIFT_16 = (tl.constexpr(value) for value in keys.MIXES[16])
_FOLD_8, _FACTOR_8, _SHIFT_8 = (tl.constexpr(value) for value in keys.MIXES[8])
_ROW_SHIFT_0, _ROW_FACTOR_0, _ROW_SHIFT_1, _ROW_FACTOR_1 = (
    tl.constexpr(value) for round_ in keys.ROW_ROUNDS for value in round_
)
_ROW_SHIFT_2 = tl.constexpr(keys.ROW_LAST_SHIFT)
_COLUMN_STEP, _COLUMN_START = (tl.constexpr(key) for key in keys.COLUMN_KEYS)
_SHIFT_0, _FACTOR_0, _SHIFT_1, _FACTOR_1 = (tl.constexpr(value) for round_ in keys.COLUMN_ROUNDS for value in round_)
_SHIFT_2 = tl.constexpr(keys.COLUMN_LAST_SHIFT)


class Tile(NamedTuple):
    """The division of the kernel's work, which does not change any bit of the sums."""

    unroll: int
    num_warps: int
    programs_per_processor: int


DEFAULT_TILE = Tile(unroll=4, num_warps=4, programs_per_processor=32)


def takes(elements: torch.Tensor, grid: Grid) -> bool:
    """Return whether :func:`triton_sums` supports these elements: whole words in memory, in evenly spaced runs."""
    per_word = 4 // elements.element_size()
    packed = grid.packed(per_word)
    return packed is not None and packed.rows(keys.COLUMNS) is not None and elements.storage_offset() % per_word == 0


def triton_sums(elements: torch.Tensor, grid: Grid, tile: Tile = DEFAULT_TILE) -> torch.Tensor:
    """Return both lanes' sums, int64 ``[2]``, of int8, int16 or int32 elements.

    Raises:
        ValueError: :func:`takes` is false for the elements.
    """
    layout = _layout(elements, grid)
    if layout is None:
        raise ValueError(f"{grid} has no rows of {keys.COLUMNS} whole words")
    sums = torch.zeros(keys.LANES, dtype=torch.int64, device=elements.device)
    if elements.numel():
        head = layout.begin % keys.COLUMNS
        blocks = -(-(head + layout.length) // keys.COLUMNS)
        rows = -(-layout.count * blocks // _max_programs(elements.device, tile))
        _sum_rows[(-(-layout.count * blocks // rows),)](
            # The kernel ignores strides and reads memory from the first element on.
            elements.contiguous().view(torch.int32),
            sums,
            layout.count * blocks,
            rows,
            blocks,
            layout.length,
            head,
            layout.begin // keys.COLUMNS,
            layout.stride // keys.COLUMNS,
            WHOLE=head == 0 and layout.length % keys.COLUMNS == 0,
            BITS=8 * elements.element_size(),
            UNROLL=tile.unroll,
            num_warps=tile.num_warps,
        )
    return sums


def _layout(elements: torch.Tensor, grid: Grid) -> Rows | None:
    packed = grid.packed(4 // elements.element_size())
    return None if packed is None else packed.rows(keys.COLUMNS)


def _max_programs(device: torch.device, tile: Tile) -> int:
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return tile.programs_per_processor * processors


@triton.jit  # type: ignore[untyped-decorator]
def _sum_rows(
    words: tl.tensor,
    sums: tl.tensor,
    total: tl.tensor,
    rows_per_program: tl.tensor,
    blocks: tl.tensor,
    length: tl.tensor,
    head: tl.tensor,
    first_row: tl.tensor,
    row_stride: tl.tensor,
    WHOLE: tl.constexpr,
    BITS: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    """Add this program's part of ``total`` rows of keys; each run of ``length`` words spans ``blocks`` rows."""
    columns = tl.arange(0, _COLUMNS)
    begin = tl.program_id(0).to(tl.int64) * rows_per_program
    end = tl.minimum(begin + rows_per_program, total)
    run, block = begin // blocks, begin % blocks
    sum_0 = tl.zeros([_COLUMNS], dtype=tl.int64)
    sum_1 = tl.zeros([_COLUMNS], dtype=tl.int64)
    for row in range(begin, end, UNROLL):
        inner = WHOLE | ((block > 0) & ((block + UNROLL) * _COLUMNS - head <= length))
        if inner & (row + UNROLL <= end):
            # Without masks and branches, the loads of all rows can be in flight together.
            for _ in tl.static_range(UNROLL):
                word = tl.load(words + (run * length + block * _COLUMNS - head) + columns)
                sum_0, sum_1 = _add(sum_0, sum_1, word, first_row + run * row_stride + block, BITS)
                run, block = _next(run, block, blocks)
        else:
            for step in tl.static_range(UNROLL):
                position = block * _COLUMNS - head + columns
                held = (position >= 0) & (position < tl.where(row + step < end, length, 0))
                word = tl.load(words + run * length + position, mask=held, other=0)
                sum_0, sum_1 = _add(sum_0, sum_1, word, first_row + run * row_stride + block, BITS)
                run, block = _next(run, block, blocks)
    pair = columns.to(tl.uint64) * 2
    sum_0 *= _column_key(pair)
    sum_1 *= _column_key(pair + 1)
    tl.atomic_add(sums, tl.sum(sum_0, axis=0), sem="relaxed")
    tl.atomic_add(sums + 1, tl.sum(sum_1, axis=0), sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def _next(run: tl.tensor, block: tl.tensor, blocks: tl.tensor) -> tl.tensor:
    last = block + 1 == blocks
    return run + last.to(tl.int64), tl.where(last, 0, block + 1)


@triton.jit  # type: ignore[untyped-decorator]
def _add(sum_0: tl.tensor, sum_1: tl.tensor, word: tl.tensor, row: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Add one row of keys times mixed words to both lanes."""
    value = _mix(word.to(tl.uint32, bitcast=True), BITS).to(tl.int32, bitcast=True).to(tl.int64)
    # Both factors are widened from 32 bits, so that one instruction multiplies and adds; 64-bit factors take eight.
    counter = (row * 2).to(tl.uint32)
    return sum_0 + value * _row_key(counter).to(tl.int64), sum_1 + value * _row_key(counter + 1).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def _mix(word: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Mix each of the elements in uint32 words."""
    if BITS == 32:
        mixed = (word ^ (word >> _FOLD_32)) * _FACTOR_32
        return mixed ^ (mixed >> _SHIFT_32)
    if BITS == 16:
        folded = word ^ ((word >> _FOLD_16) & 0x00FF00FF)
        # The product of the high half stays in that half; the product of the low half must not reach it.
        mixed = ((folded * _FACTOR_16) & 0xFFFF) + (folded & 0xFFFF0000) * _FACTOR_16
        return mixed ^ ((mixed >> _SHIFT_16) & 0x01FF01FF)
    folded = word ^ ((word >> _FOLD_8) & 0x0F0F0F0F)
    even = ((folded & 0x00FF00FF) * _FACTOR_8) & 0x00FF00FF
    odd = (((folded >> 8) & 0x00FF00FF) * _FACTOR_8) & 0x00FF00FF
    mixed = even | (odd << 8)
    return mixed ^ ((mixed >> _SHIFT_8) & 0x1F1F1F1F)


@triton.jit  # type: ignore[untyped-decorator]
def _row_key(counter: tl.tensor) -> tl.tensor:
    mixed = (counter ^ (counter >> _ROW_SHIFT_0)) * _ROW_FACTOR_0
    mixed = (mixed ^ (mixed >> _ROW_SHIFT_1)) * _ROW_FACTOR_1
    return (mixed ^ (mixed >> _ROW_SHIFT_2)).to(tl.int32, bitcast=True) | 1


@triton.jit  # type: ignore[untyped-decorator]
def _column_key(counter: tl.tensor) -> tl.tensor:
    mixed = counter * _COLUMN_STEP + _COLUMN_START
    mixed = (mixed ^ (mixed >> _SHIFT_0)) * _FACTOR_0
    mixed = (mixed ^ (mixed >> _SHIFT_1)) * _FACTOR_1
    return (mixed ^ (mixed >> _SHIFT_2)).to(tl.int64, bitcast=True) | 1
