"""The sums of a weight hash on CUDA, in one pass: the bits of ``hash_mix.eager_sums``. Needs triton.

Each program takes a range of rows of keys. A thread's columns stay the same from row to row, so that it adds up
``row * mixed`` and multiplies by the column's key once, at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pytest_aorta.worker import hash_mix
from pytest_aorta.worker.hash_grid import Grid

_COLUMNS = tl.constexpr(hash_mix.COLUMNS)
_WORD_FACTOR = tl.constexpr(hash_mix.WORD_FACTOR)
_WORD_SHIFT_0, _WORD_SHIFT_1 = (tl.constexpr(shift) for shift in hash_mix.WORD_SHIFTS)
_ROW_STEP, _ROW_START = (tl.constexpr(key) for key in hash_mix.ROW_KEYS)
_COLUMN_STEP, _COLUMN_START = (tl.constexpr(key) for key in hash_mix.COLUMN_KEYS)
_SHIFT_0, _FACTOR_0, _SHIFT_1, _FACTOR_1 = (tl.constexpr(value) for round_ in hash_mix.KEY_ROUNDS for value in round_)
_SHIFT_2 = tl.constexpr(hash_mix.KEY_LAST_SHIFT)
_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
_PROGRAMS_PER_PROCESSOR = 32
_UNROLL = 2
_NUM_WARPS = 2


def triton_sums(words: torch.Tensor, grid: Grid, unroll: int = _UNROLL, num_warps: int = _NUM_WARPS) -> torch.Tensor:
    """Both lanes' sums, int64 ``[2]``, of words that lie at a grid that has ``rows(COLUMNS)``."""
    layout = grid.rows(hash_mix.COLUMNS)
    if layout is None:
        raise ValueError(f"{grid} has no rows of {hash_mix.COLUMNS} columns")
    sums = torch.zeros(hash_mix.LANES, dtype=torch.int64, device=words.device)
    if words.numel():
        head = layout.begin % hash_mix.COLUMNS
        blocks = -(-(head + layout.length) // hash_mix.COLUMNS)
        rows = -(-layout.count * blocks // _max_programs(words.device))
        _sum_rows[(-(-layout.count * blocks // rows),)](
            words.view(_UNSIGNED[words.element_size()]),
            sums,
            layout.count * blocks,
            rows,
            blocks,
            layout.length,
            head,
            layout.begin // hash_mix.COLUMNS,
            layout.stride // hash_mix.COLUMNS,
            WHOLE=head == 0 and layout.length % hash_mix.COLUMNS == 0,
            FOLD=words.element_size() == 4,
            UNROLL=unroll,
            num_warps=num_warps,
        )
    return sums


def _max_programs(device: torch.device) -> int:
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return _PROGRAMS_PER_PROCESSOR * processors


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
    FOLD: tl.constexpr,
    UNROLL: tl.constexpr,
) -> None:
    """Add this program's part of ``total`` rows of keys; each run of ``length`` words spans ``blocks`` of them."""
    columns = tl.arange(0, _COLUMNS)
    begin = tl.program_id(0).to(tl.int64) * rows_per_program
    end = tl.minimum(begin + rows_per_program, total)
    run, block = begin // blocks, begin % blocks
    sum_0 = tl.zeros([_COLUMNS], dtype=tl.int64)
    sum_1 = tl.zeros([_COLUMNS], dtype=tl.int64)
    for row in range(begin, end, UNROLL):
        inner = WHOLE | ((block > 0) & ((block + UNROLL) * _COLUMNS - head <= length))
        if inner & (row + UNROLL <= end):
            # No masks and no branches in here: the loads of all rows can be under way together.
            for _ in tl.static_range(UNROLL):
                word = tl.load(words + (run * length + block * _COLUMNS - head) + columns)
                sum_0, sum_1 = _add(sum_0, sum_1, word, first_row + run * row_stride + block, FOLD)
                run, block = _next(run, block, blocks)
        else:
            for step in tl.static_range(UNROLL):
                position = block * _COLUMNS - head + columns
                held = (position >= 0) & (position < tl.where(row + step < end, length, 0))
                word = tl.load(words + run * length + position, mask=held, other=0)
                sum_0, sum_1 = _add(sum_0, sum_1, word, first_row + run * row_stride + block, FOLD)
                run, block = _next(run, block, blocks)
    pair = columns.to(tl.uint64) * 2
    sum_0 *= (_split_mix(pair, _COLUMN_STEP, _COLUMN_START) | 1).to(tl.int64, bitcast=True)
    sum_1 *= (_split_mix(pair + 1, _COLUMN_STEP, _COLUMN_START) | 1).to(tl.int64, bitcast=True)
    tl.atomic_add(sums, tl.sum(sum_0, axis=0), sem="relaxed")
    tl.atomic_add(sums + 1, tl.sum(sum_1, axis=0), sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def _next(run: tl.tensor, block: tl.tensor, blocks: tl.tensor) -> tl.tensor:
    last = block + 1 == blocks
    return run + last.to(tl.int64), tl.where(last, 0, block + 1)


@triton.jit  # type: ignore[untyped-decorator]
def _add(sum_0: tl.tensor, sum_1: tl.tensor, word: tl.tensor, row: tl.tensor, FOLD: tl.constexpr) -> tl.tensor:
    """Add one row of keys times mixed words to both lanes."""
    mixed = word.to(tl.uint32)
    if FOLD:
        mixed ^= mixed >> _WORD_SHIFT_0
    mixed *= _WORD_FACTOR
    mixed ^= mixed >> _WORD_SHIFT_1
    value = mixed.to(tl.int32, bitcast=True).to(tl.int64)
    keys = _split_mix(row.to(tl.uint64), _ROW_STEP, _ROW_START)
    # Factors that came from 32 bits make each lane one wide multiply and add.
    key_0 = ((keys >> 32).to(tl.uint32).to(tl.int32, bitcast=True) | 1).to(tl.int64)
    key_1 = (keys.to(tl.uint32).to(tl.int32, bitcast=True) | 1).to(tl.int64)
    return sum_0 + value * key_0, sum_1 + value * key_1


@triton.jit  # type: ignore[untyped-decorator]
def _split_mix(counter: tl.tensor, STEP: tl.constexpr, START: tl.constexpr) -> tl.tensor:
    mixed = counter * STEP + START
    mixed = (mixed ^ (mixed >> _SHIFT_0)) * _FACTOR_0
    mixed = (mixed ^ (mixed >> _SHIFT_1)) * _FACTOR_1
    return mixed ^ (mixed >> _SHIFT_2)
