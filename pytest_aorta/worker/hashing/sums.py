"""The sums of a weight hash: what an element contributes, and its engine for any device.

A tensor's elements, row-major and each of ``b`` = 8, 16 or 32 bits (elements of 8 bytes count as two, the low one
first), are mixed one by one and then packed into 32-bit words, ``32 / b`` to a word, the first lowest. Word ``w``,
read as signed, at index ``i`` adds, in lane ``l``, modulo 2**64::

    row(l, i // 1024) * column(l, i % 1024) * w

The mix is a bijection of ``b`` bits that maps 0 to 0: the first round of Wellons' lowbias32 and of his hash16
("Prospecting for hash functions", 2018), and alike for bytes. ``row`` is an odd signed 32-bit key, lowbias32 of
``2 * (i // 1024) + l`` modulo 2**32, so that rows 2**31 apart share one, which is 2**41 words. ``column`` is an odd
64-bit key from SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).

A word split between ranks adds what its parts add, whoever holds them. The sum is a bilinear form of the keys, a
universal hash after Carter and Wegman (1979): were the keys random, two given tensors that differ would share a
lane's sum with probability 2**-26 at most. One changed element always changes both lanes, since no factor of its
word's change can be zero.
"""

from __future__ import annotations

import importlib.util

import torch

from pytest_aorta.worker.hashing.grid import Grid
from pytest_aorta.worker.hashing.keys import COLUMNS, LANES, MIXES, column_keys, row_keys, signed, xor_shift

_ELEMENT_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
# Elements of a chunk: its few buffers fit a CPU's caches, and fill a GPU.
_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 22}
# Rows of a run that are multiplied at once in float64: sums of 2**6 products of 31 and 16 bits are exact up to 2**53.
_RUN_ROWS = 64


def tensor_sums(tensor: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Both lanes' sums, int64 ``[2]``, of a local block that lies at ``grid``, on the block's device.

    Raises:
        ValueError: elements have another size than 1, 2, 4 or 8 bytes, or the device is neither CPU nor CUDA.
    """
    size, device = tensor.element_size(), tensor.device.type
    if size not in _ELEMENT_DTYPES or device not in _CHUNK:
        allowed = f"{[*_ELEMENT_DTYPES]}-byte elements on {[*_CHUNK]} can be hashed"
        raise ValueError(f"{tensor.dtype} on {tensor.device}; {allowed}")
    elements = tensor.reshape(-1).view(_ELEMENT_DTYPES[size])
    grid = grid.repeated(2) if size == 8 else grid
    if device == "cuda" and importlib.util.find_spec("triton"):
        from pytest_aorta.worker.hashing.kernel import takes, triton_sums

        if takes(elements, grid):
            return triton_sums(elements, grid)
    return eager_sums(elements, grid)


def eager_sums(elements: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The sums of int8, int16 or int32 elements by torch's own operations, on any device."""
    if not elements.numel():
        return torch.zeros(LANES, dtype=torch.int64, device=elements.device)
    run = grid.axes[0].held
    if len(grid.axes) == 1 and isinstance(run, range) and elements.device.type == "cpu":
        return _run_sums(elements, run.start)
    return _scattered_sums(elements, grid)


def _run_sums(elements: torch.Tensor, offset: int) -> torch.Tensor:
    """Of one run on a CPU: whole rows of keys at a time, where elements outside of the run count as zero.

    A matrix product of float64 multiplies and adds several times as fast as int64 operations do.
    """
    width = COLUMNS * 4 // elements.element_size()
    first, end = offset // width, offset + elements.numel()
    num_rows = min(_RUN_ROWS, -(-end // width) - first)
    mixed, spare = torch.empty(2, num_rows * width, dtype=elements.dtype)
    block, products = (
        torch.empty(num_rows, COLUMNS, dtype=torch.float64),
        torch.empty(2 * LANES, COLUMNS, dtype=torch.float64),
    )
    totals = torch.zeros(2 * LANES, COLUMNS, dtype=torch.int64)
    # All at once: keys of one chunk would cost as many calls as its words do.
    keys = row_keys(torch.arange(first, end // width + num_rows))
    halves = torch.cat([keys & 0xFFFF, keys >> 16]).to(torch.float64)
    for row in range(first, -(-end // width), num_rows):
        begin, until = max(row * width, offset), min((row + num_rows) * width, end)
        place = slice(begin - row * width, until - row * width)
        if place != slice(0, mixed.numel()):
            mixed.zero_()
        mixed[place] = elements[begin - offset : until - offset]
        block.view(-1).copy_(_mix(mixed, spare).view(torch.int32))
        totals += torch.mm(halves[:, row - first : row - first + num_rows], block, out=products).to(torch.int64)
    lanes: torch.Tensor = totals[:LANES] + (totals[LANES:] << 16)
    return (lanes * column_keys(torch.arange(COLUMNS))).sum(1)


def _scattered_sums(elements: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Of any other block: the keys of each element are looked up."""
    bits = 8 * elements.element_size()
    chunk = _CHUNK[elements.device.type]
    columns = column_keys(torch.arange(COLUMNS, device=elements.device))
    sums = torch.zeros(LANES, dtype=torch.int64, device=elements.device)
    for begin, part in zip(range(0, elements.numel(), chunk), elements.split(chunk), strict=True):
        index = grid.flat_index(begin, begin + part.numel(), elements.device)
        mixed = _mix(part.clone(), torch.empty_like(part)).to(torch.int64)
        word, place = index // (32 // bits), index % (32 // bits)
        # Only the highest element has the word's sign.
        values = torch.where(place == 32 // bits - 1, mixed, mixed & ((1 << bits) - 1)) << place * bits
        rows, row = torch.unique(word // COLUMNS, return_inverse=True)
        sums += (row_keys(rows)[:, row] * columns[:, word % COLUMNS] * values).sum(1)
    return sums


def _mix(elements: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
    """Mix elements in place, with a second buffer of their size."""
    mix = MIXES[8 * elements.element_size()]
    xor_shift(elements, mix.fold, spare).mul_(signed(mix.factor, 8 * elements.element_size()))
    return xor_shift(elements, mix.shift, spare)
