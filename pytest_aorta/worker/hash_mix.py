"""The sums of a weight hash: what an element contributes, and its engine for any device.

A tensor is a row-major sequence of 32-bit words: elements of 1 and 2 bytes are one word each, zero-extended,
elements of 8 bytes are two, the low one first. Word ``w`` at index ``i`` adds, in lane ``l``, modulo 2**64::

    row(l, i // 1024) * column(l, i % 1024) * mixed(w)

``mixed`` is a bijection of 32-bit words, read as signed: the first round of lowbias32 (Wellons, "Prospecting for
hash functions", 2018). ``row`` is an odd signed 32-bit and ``column`` an odd 64-bit key, both from SplitMix64
(Steele, Lea and Flood, OOPSLA 2014). The sum is thus a bilinear form of the keys, a universal hash after Carter
and Wegman (1979): were the keys
random, two given tensors that differ would share a lane's sum with probability 2**-26 at most.
One changed element always changes both lanes, since no factor of its term can be zero.
"""

from __future__ import annotations

import importlib.util

import torch

from pytest_aorta.worker.hash_grid import Grid

LANES = 2
COLUMNS = 1024
WORD_FACTOR, WORD_SHIFTS = 0x7FEB352D, (16, 15)
# Odd steps and starts of the two key sequences: fractional bits of the golden ratio, sqrt(3), sqrt(2) and sqrt(5).
ROW_KEYS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
COLUMN_KEYS = (0x6A09E667F3BCC909, 0x3C6EF372FE94F82B)
KEY_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
KEY_LAST_SHIFT = 31

_WORD_DTYPES = {1: torch.uint8, 2: torch.uint16, 4: torch.int32, 8: torch.int32}
# Rows of a chunk: its few buffers fit a CPU's caches, and fill a GPU.
_CHUNK_ROWS = {"cpu": 64, "cuda": 4096}


def tensor_sums(tensor: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Both lanes' sums, int64 ``[2]``, of a local block that lies at ``grid``, on the block's device.

    Raises:
        ValueError: elements have another size than 1, 2, 4 or 8 bytes, or the device is neither CPU nor CUDA.
    """
    size, device = tensor.element_size(), tensor.device.type
    if size not in _WORD_DTYPES or device not in _CHUNK_ROWS:
        allowed = f"{[*_WORD_DTYPES]}-byte elements on {[*_CHUNK_ROWS]} can be hashed"
        raise ValueError(f"{tensor.dtype} on {tensor.device}; {allowed}")
    words = tensor.reshape(-1).view(_WORD_DTYPES[size])
    grid = grid.repeated(2) if size == 8 else grid
    if device == "cuda" and grid.rows(COLUMNS) is not None and importlib.util.find_spec("triton"):
        from pytest_aorta.worker.hash_triton import triton_sums

        return triton_sums(words, grid)
    return eager_sums(words, grid)


def eager_sums(words: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The sums by torch's own operations, on any device."""
    if not words.numel():
        return torch.zeros(LANES, dtype=torch.int64, device=words.device)
    run = grid.axes[0].held
    if len(grid.axes) == 1 and isinstance(run, range):
        return _run_sums(words, run.start)
    return _scattered_sums(words, grid)


def _run_sums(words: torch.Tensor, offset: int) -> torch.Tensor:
    """Of one run: whole rows of keys at a time, where words outside of the run count as zero and add nothing."""
    first, end = offset // COLUMNS, offset + words.numel()
    num_rows = min(_CHUNK_ROWS[words.device.type], -(-end // COLUMNS) - first)
    mixed = torch.empty(2, num_rows * COLUMNS, dtype=torch.int32, device=words.device)
    block, product = torch.empty(2, num_rows, COLUMNS, dtype=torch.int64, device=words.device)
    totals = torch.zeros(LANES, COLUMNS, dtype=torch.int64, device=words.device)
    # All at once: keys of one chunk would cost as many calls as its words do.
    keys = row_keys(torch.arange(first, end // COLUMNS + num_rows, device=words.device))
    for row in range(first, -(-end // COLUMNS), num_rows):
        begin, until = max(row * COLUMNS, offset), min((row + num_rows) * COLUMNS, end)
        place = slice(begin - row * COLUMNS, until - row * COLUMNS)
        if place != slice(0, block.numel()):
            block.zero_()
        block.view(-1)[place] = _mix(words[begin - offset : until - offset], mixed)
        for total, lane in zip(totals, keys[:, row - first : row - first + num_rows, None], strict=True):
            total += torch.mul(block, lane, out=product).sum(0)
    return (totals * column_keys(torch.arange(COLUMNS, device=words.device))).sum(1)


def _scattered_sums(words: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Of any other block: the keys of each word are looked up."""
    chunk = _CHUNK_ROWS[words.device.type] * COLUMNS
    mixed = torch.empty(2, chunk, dtype=torch.int32, device=words.device)
    columns = column_keys(torch.arange(COLUMNS, device=words.device))
    sums = torch.zeros(LANES, dtype=torch.int64, device=words.device)
    for begin, part in zip(range(0, words.numel(), chunk), words.split(chunk), strict=True):
        index = grid.flat_index(begin, begin + part.numel(), words.device)
        values = _mix(part, mixed).to(torch.int64)
        rows, row = torch.unique(index // COLUMNS, return_inverse=True)
        sums += (row_keys(rows)[:, row] * columns[:, index % COLUMNS] * values).sum(1)
    return sums


def _mix(words: torch.Tensor, buffers: torch.Tensor) -> torch.Tensor:
    """``mixed`` of the words, int32, in the first of two buffers at least as long."""
    mixed, spare = buffers[:, : words.numel()]
    mixed.copy_(words)
    if words.element_size() == 4:
        _xor_shift(mixed, WORD_SHIFTS[0], spare)
    return _xor_shift(mixed.mul_(WORD_FACTOR), WORD_SHIFTS[1], spare)


def row_keys(rows: torch.Tensor) -> torch.Tensor:
    """Keys ``[2, n]`` of rows, int64 within an int32's range: the halves of one SplitMix64 value, made odd."""
    keys = _split_mix(rows, ROW_KEYS)
    return torch.stack([keys >> 32, (keys << 32) >> 32]) | 1


def column_keys(columns: torch.Tensor) -> torch.Tensor:
    """Keys ``[2, n]`` of columns, int64: SplitMix64 values of ``2 * column + lane``, made odd."""
    return torch.stack([_split_mix(columns * LANES + lane, COLUMN_KEYS) for lane in range(LANES)]) | 1


def _split_mix(counters: torch.Tensor, sequence: tuple[int, int]) -> torch.Tensor:
    step, start = map(_signed, sequence)
    mixed = counters * step + start
    spare = torch.empty_like(mixed)
    for shift, factor in KEY_ROUNDS:
        _xor_shift(mixed, shift, spare).mul_(_signed(factor))
    return _xor_shift(mixed, KEY_LAST_SHIFT, spare)


def _xor_shift(values: torch.Tensor, shift: int, spare: torch.Tensor) -> torch.Tensor:
    # A signed shift copies the sign down; the mask makes it the unsigned shift of the published mixes.
    width = 8 * values.element_size()
    torch.bitwise_right_shift(values, shift, out=spare).bitwise_and_((1 << (width - shift)) - 1)
    return values.bitwise_xor_(spare)


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit value; int64 arithmetic wraps modulo 2**64 alike."""
    return value - 2**64 if value >= 2**63 else value
