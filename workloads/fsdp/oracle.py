"""Codes that identify the origin of data, and the comparison of received with expected data. Pure tensor code.

An element's code is ``1 + (base[position] + a*iteration + b*layer + c*rank + seed) mod 251``: exact in
bfloat16, never zero, and different at every element for adjacent iterations, layers and ranks. So a wrong value
identifies the data that it belongs to.
"""

import torch

PRIME = 251
# With these strides, one or two iterations back, another of 15 layers, and another of 16 ranks all shift a code by
# different amounts.
ITERATION_STRIDE = 23
LAYER_STRIDE = 16
RANK_STRIDE = 1
# These strides differ from those amounts too, so that misplaced data does not look like data of another rank or layer.
POSITION_STRIDE = 100
BLOCK_STRIDE = 37

# Factors of the two contributions whose sum is a code. Even numbers up to 502 are exact in bfloat16.
DOUBLE = 2
NEGATIVE = -1

# The host keeps this many inputs, coded by slot instead of iteration, and writes none during the run.
INPUT_SLOTS = 4

# The columns of a comparison, one row per source; every number is exact in float64.
COLUMNS = ("count", "first", "expected", "actual", "last", "last_expected", "last_actual", "difference")


def chunk_index(size: int, rank: int, device: torch.device | None = None) -> torch.Tensor:
    """Return a rank's codes at iteration 0 of layer 0, minus one: indices for :class:`CodeTable`.

    They are computed on ``device``, since divisions of millions of elements take a host seconds.
    """
    position = torch.arange(size, dtype=torch.int64, device=device)
    base = position * POSITION_STRIDE + position // PRIME * BLOCK_STRIDE + rank * RANK_STRIDE
    # Without this term, ranks 251 apart would have equal codes; with it, 250 of 251 elements differ.
    return ((base + rank // PRIME * position) % PRIME).to(torch.int32)


def world_index(size: int, world_size: int, device: torch.device | None = None) -> torch.Tensor:
    """Return the indices of all ranks' chunks on ``device``, in the order of an all-gather."""
    return torch.cat([chunk_index(size, rank, device) for rank in range(world_size)])


class CodeTable:
    """A table that writes codes of one dtype with one kernel, without allocations and without a wait of the host."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        """Allocate the table."""
        # Twice the period, so that each offset is a contiguous window.
        self._values = (torch.arange(2 * PRIME, device=device) % PRIME + 1).to(dtype)
        self.dtype = dtype
        self._seed = seed

    def write(self, out: torch.Tensor, index: torch.Tensor, iteration: int, layer: int) -> None:
        """Write the codes of ``index`` for this iteration and layer into ``out``."""
        offset = (self._seed + iteration * ITERATION_STRIDE + layer * LAYER_STRIDE) % PRIME
        torch.index_select(self._values.narrow(0, offset, PRIME), 0, index, out=out)


class Contribution:
    """One rank's part of a gradient in which every position is the sum of two ranks' nonzero contributions.

    At every position, rank ``(position + iteration) % world_size`` contributes twice the code, the next rank
    contributes its negative, and all others contribute zero. The sum is the code, and is exact in any order at any
    world size. A maximum, a minimum, a missing contribution or a repeated one gives another value at every position.
    """

    def __init__(self, world_size: int, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the factors; each remainder has a window of them."""
        self._world_size = world_size
        self._rank = rank
        factors = torch.zeros(2 * world_size)
        factors[world_size] += DOUBLE
        # This rank contributes the negative where the rank before contributes the double: one column earlier.
        factors[[world_size - 1, 2 * world_size - 1]] += NEGATIVE
        self._factors = factors.to(device, dtype)

    def keep_own(self, gradient: torch.Tensor, iteration: int) -> None:
        """Multiply every position of ``gradient`` by this rank's factor: 2, -1 or 0."""
        own_column = (self._rank - iteration) % self._world_size
        row = self._factors.narrow(0, self._world_size - own_column, self._world_size)
        gradient.view(-1, self._world_size).mul_(row)


def sources_of_column(column: int, rank: int, shard_size: int, iteration: int, world_size: int) -> tuple[int, int]:
    """Return the ranks that contribute the double and the negative of the code to a column of a reduced gradient.

    The column has the elements ``column``, ``column + world_size``, ... of the gradient that ``rank`` receives.
    """
    double = (rank * shard_size + column + iteration) % world_size
    return double, (double + 1) % world_size


def by_column(values: torch.Tensor, columns: int) -> torch.Tensor:
    """Reshape a flat tensor to one row per column, padded with zeros to full rows."""
    padding = -values.numel() % columns
    return torch.nn.functional.pad(values, (0, padding)).view(-1, columns).t()


def compare(actual: torch.Tensor, expected: torch.Tensor, out: torch.Tensor) -> None:
    """Write :data:`COLUMNS` of each row's mismatches into ``out`` (rows, columns), on the device."""
    wrong = actual.ne(expected).view(torch.uint8)
    first = wrong.argmax(dim=1, keepdim=True)
    last = wrong.shape[1] - 1 - wrong.flip(1).argmax(dim=1, keepdim=True)
    difference = actual.sum(1, dtype=torch.float64) - expected.sum(1, dtype=torch.float64)
    parts = [
        wrong.sum(dim=1, keepdim=True),
        first,
        expected.gather(1, first),
        actual.gather(1, first),
        last,
        expected.gather(1, last),
        actual.gather(1, last),
        difference.unsqueeze(1),
    ]
    torch.cat([part.to(torch.float64) for part in parts], dim=1, out=out)
