"""The sums of a weight hash by torch's own operations, on any device.

The package's docstring defines the sums. On CUDA the triton kernel replaces these operations where it can.
"""

from __future__ import annotations

import importlib.util

import torch

from pytest_aorta.worker.hashing.grid import Grid
from pytest_aorta.worker.hashing.keys import COLUMNS, LANES, MIXES, column_keys, row_keys, signed, xor_shift

_ELEMENT_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
# Elements of a chunk: large enough to fill a GPU, and small enough that a few buffers fit a CPU's caches.
_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 22}
# Rows that are multiplied at once in float64, where integers are exact up to 2**53: 2**6 products of a 31-bit and a
# 16-bit factor add up to at most 2**53.
_RUN_ROWS = 64


def tensor_sums(tensor: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return both lanes' sums, int64 ``[2]``, of a local block at ``grid``, on the block's device.

    Raises:
        ValueError: The elements do not have 1, 2, 4 or 8 bytes, the device is neither CPU nor CUDA, or the tensor is
            quantized, nested, sparse or opaque.
    """
    if tensor.is_quantized or tensor.is_nested or tensor.layout is not torch.strided:
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else tensor.layout
        raise ValueError(f"{kind}; dense tensors can be hashed, such as the parts of this one")
    size, device = tensor.element_size(), tensor.device.type
    if size not in _ELEMENT_DTYPES or device not in _CHUNK:
        allowed = f"{[*_ELEMENT_DTYPES]}-byte elements on {[*_CHUNK]} can be hashed"
        raise ValueError(f"{tensor.dtype} on {tensor.device}; {allowed}")
    # The values count, so a conjugation or negation that a view has put off is done first.
    values = tensor.resolve_conj().resolve_neg().reshape(-1)
    if size == 8 and values.stride(0) != 1:
        # The halves of an element have to lie in one row with those of the next.
        values = values.clone(memory_format=torch.contiguous_format)
    elements = values.view(_ELEMENT_DTYPES[size])
    grid = grid.repeated(2) if size == 8 else grid
    if device == "cuda" and importlib.util.find_spec("triton"):
        from pytest_aorta.worker.hashing.kernel import takes, triton_sums

        if takes(elements, grid):
            return triton_sums(elements, grid)
    return eager_sums(elements, grid)


def eager_sums(elements: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return both lanes' sums, int64 ``[2]``, of int8, int16 or int32 elements, without the triton kernel."""
    if not elements.numel():
        return torch.zeros(LANES, dtype=torch.int64, device=elements.device)
    run = grid.axes[0].held
    if len(grid.axes) == 1 and isinstance(run, range) and elements.device.type == "cpu":
        return _run_sums(elements, run.start)
    return _scattered_sums(elements, grid)


def _run_sums(elements: torch.Tensor, offset: int) -> torch.Tensor:
    """Sum one run on a CPU, whole rows of keys at a time; elements outside of the run count as zero.

    A matrix product of float64 multiplies and adds several times as fast as int64 operations.
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
    # Make all keys at once: making the keys of each chunk would cost as many calls as hashing the chunk's words.
    keys = row_keys(torch.arange(first, end // width + num_rows))
    halves = torch.cat([keys & 0xFFFF, keys >> 16]).to(torch.float64)
    for row in range(first, -(-end // width), num_rows):
        begin, until = max(row * width, offset), min((row + num_rows) * width, end)
        held = slice(begin - row * width, until - row * width)
        if held != slice(0, mixed.numel()):
            mixed.zero_()
        mixed[held] = elements[begin - offset : until - offset]
        block.view(-1).copy_(_mix(mixed, spare).view(torch.int32))
        totals += torch.mm(halves[:, row - first : row - first + num_rows], block, out=products).to(torch.int64)
    lanes: torch.Tensor = totals[:LANES] + (totals[LANES:] << 16)
    return (lanes * column_keys(torch.arange(COLUMNS))).sum(1)


def _scattered_sums(elements: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Sum any other block; the keys of each element are looked up."""
    bits = 8 * elements.element_size()
    chunk = _CHUNK[elements.device.type]
    columns = column_keys(torch.arange(COLUMNS, device=elements.device))
    sums = torch.zeros(LANES, dtype=torch.int64, device=elements.device)
    for begin, part in zip(range(0, elements.numel(), chunk), elements.split(chunk), strict=True):
        index = grid.flat_index(begin, begin + part.numel(), elements.device)
        mixed = _mix(part.clone(), torch.empty_like(part)).to(torch.int64)
        word, position = index // (32 // bits), index % (32 // bits)
        # Only the highest element of a word carries its sign.
        values = torch.where(position == 32 // bits - 1, mixed, mixed & ((1 << bits) - 1)) << position * bits
        rows, row = torch.unique(word // COLUMNS, return_inverse=True)
        sums += (row_keys(rows)[:, row] * columns[:, word % COLUMNS] * values).sum(1)
    return sums


def _mix(elements: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
    """Mix elements in place; ``spare`` is a buffer of the same size."""
    mix = MIXES[8 * elements.element_size()]
    xor_shift(elements, mix.fold, spare).mul_(signed(mix.factor, 8 * elements.element_size()))
    return xor_shift(elements, mix.shift, spare)
