"""The sums of a weight hash, by torch's own operations on any device: rows of keys times columns of keys.

The package's docstring defines the sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from pytest_aorta.worker.hashing.grid import Grid
from pytest_aorta.worker.hashing.keys import COLUMNS, LANES, MIXES, column_keys, row_keys, signed, xor_shift

_ELEMENT_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
# Rows whose products are added up in float64, where integers are exact up to 2**53: 2**6 products of a 31-bit and a
# 16-bit factor add up to at most 2**53.
_EXACT_ROWS = 64
# Rows of a chunk: few enough that the buffers fit a CPU's caches, or enough to fill a device, with 32 MiB of buffers.
_CPU_ROWS, _DEVICE_ROWS = _EXACT_ROWS, 32 * _EXACT_ROWS


def tensor_sums(tensor: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return both lanes' sums, int64 ``[2]``, of a local block at ``grid``, on the block's device.

    Raises:
        ValueError: The elements do not have 1, 2, 4 or 8 bytes, or the tensor is quantized, nested, sparse, opaque or
            without memory.
    """
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
    return _sums(values.view(_ELEMENT_DTYPES[size]), grid.repeated(2) if size == 8 else grid)


def _sums(elements: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Sum chunks of whole rows, by a matrix product: float64 multiplies and adds several times as fast as int64."""
    device, width = elements.device, COLUMNS * 4 // elements.element_size()
    num_rows = _CPU_ROWS if device.type == "cpu" else _DEVICE_ROWS
    if grid.run is not None:
        needed = -(-grid.run.stop // width) - grid.run.start // width
        num_rows = min(num_rows, max(1, needed) if needed <= _EXACT_ROWS else -(-needed // _EXACT_ROWS) * _EXACT_ROWS)
    block, spare = elements.new_empty(2, num_rows, width)
    factors = torch.empty(num_rows, COLUMNS, dtype=torch.float64, device=device)
    totals = torch.zeros(2 * LANES, COLUMNS, dtype=torch.int64, device=device)
    for keys in _filled(block, elements, grid):
        factors.copy_(_mix(block, spare).view(torch.int32))
        if num_rows <= _EXACT_ROWS:
            totals += torch.mm(keys, factors).to(torch.int64)
        else:
            batches = keys.unflatten(1, (-1, _EXACT_ROWS)).transpose(0, 1)
            totals += torch.bmm(batches, factors.view(-1, _EXACT_ROWS, COLUMNS)).to(torch.int64).sum(0)
    lanes: torch.Tensor = totals[:LANES] + (totals[LANES:] << 16)
    return (lanes * column_keys(torch.arange(COLUMNS, device=device))).sum(1)


def _filled(block: torch.Tensor, elements: torch.Tensor, grid: Grid) -> Iterator[torch.Tensor]:
    """Fill ``block`` with the elements of the next rows, and yield the rows' keys, until every row was yielded.

    Elements that the grid does not hold are zero, so that they add nothing.
    """
    most, width = block.shape
    run = grid.run
    if run is not None:
        first, last = run.start // width, -(-run.stop // width)
        # Make all keys at once: making the keys of each chunk would cost as many calls as hashing the chunk's words.
        keys = _halves(torch.arange(first, last + most, device=block.device))
        for row in range(first, last, most):
            begin, end = max(row * width, run.start), min((row + most) * width, run.stop)
            if end - begin < block.numel():
                block.zero_()
            block.view(-1)[begin - row * width : end - row * width] = elements[begin - run.start : end - run.start]
            yield keys[:, row - first : row - first + most]
        return
    chunk = most * COLUMNS
    for begin in range(0, len(elements), chunk):
        part = elements[begin : begin + chunk]
        index = grid.flat_index(begin, begin + len(part), block.device)
        # The indices ascend, and so do their rows.
        rows, place = torch.unique_consecutive(index // width, return_inverse=True)
        index = place * width + index % width
        keys = _halves(torch.cat([rows, rows.new_zeros(-len(rows) % most)]))
        bounds = torch.searchsorted(place, torch.arange(0, keys.shape[1] + 1, most, device=block.device)).tolist()
        for number, (first, end) in enumerate(pairwise(bounds)):
            block.zero_()
            block.view(-1)[index[first:end] - number * block.numel()] = part[first:end]
            yield keys[:, number * most : (number + 1) * most]


def _halves(rows: torch.Tensor) -> torch.Tensor:
    """Return the keys of rows for both lanes, float64 ``[4, n]``: the low 16 bits, then the high ones."""
    keys = row_keys(rows)
    return torch.cat([keys & 0xFFFF, keys >> 16]).to(torch.float64)


def _mix(elements: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
    """Mix elements in place; ``spare`` is a buffer of the same size."""
    mix = MIXES[8 * elements.element_size()]
    xor_shift(elements, mix.fold, spare).mul_(signed(mix.factor, 8 * elements.element_size()))
    return xor_shift(elements, mix.shift, spare)
