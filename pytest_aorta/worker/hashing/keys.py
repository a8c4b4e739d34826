"""The keys of the weight hash, and the constants that define them and the mix of elements."""

from __future__ import annotations

from typing import NamedTuple

import torch

# The version of the definition in this package's docstring. Each result records the version, since hashes of two
# definitions are never compared.
VERSION = 2
LANES = 2
COLUMNS = 1024


class Mix(NamedTuple):
    """``x ^= x >> fold; x *= factor; x ^= x >> shift`` of unsigned integers."""

    fold: int
    factor: int
    shift: int


# The mix of elements by their number of bits.
MIXES = {8: Mix(4, 0x9D, 3), 16: Mix(8, 0x88B5, 7), 32: Mix(16, 0x7FEB352D, 15)}
ROW_ROUNDS, ROW_LAST_SHIFT = ((16, 0x7FEB352D), (15, 0x846CA68B)), 16
# Step and start of the sequence of column keys: fractional bits of sqrt(2) and sqrt(5), made odd.
COLUMN_KEYS = (0x6A09E667F3BCC909, 0x3C6EF372FE94F82B)
COLUMN_ROUNDS, COLUMN_LAST_SHIFT = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)), 31


def row_keys(rows: torch.Tensor) -> torch.Tensor:
    """Return the keys ``[2, n]`` of ``rows``, int64 in int32's range: lowbias32 of ``2 * row + lane``, made odd."""
    counters = torch.stack([rows * LANES + lane for lane in range(LANES)])
    return _rounds(counters.to(torch.int32), ROW_ROUNDS, ROW_LAST_SHIFT).bitwise_or_(1).to(torch.int64)


def column_keys(columns: torch.Tensor) -> torch.Tensor:
    """Return the keys ``[2, n]`` of ``columns``, int64: SplitMix64 values of ``2 * column + lane``, made odd."""
    step, start = (signed(key, 64) for key in COLUMN_KEYS)
    counters = torch.stack([columns * LANES + lane for lane in range(LANES)]) * step + start
    return _rounds(counters, COLUMN_ROUNDS, COLUMN_LAST_SHIFT).bitwise_or_(1)


def _rounds(values: torch.Tensor, rounds: tuple[tuple[int, int], ...], last_shift: int) -> torch.Tensor:
    """Xor-shift and multiply in place, then xor-shift once more."""
    spare = torch.empty_like(values)
    for shift, factor in rounds:
        xor_shift(values, shift, spare).mul_(signed(factor, 8 * values.element_size()))
    return xor_shift(values, last_shift, spare)


def xor_shift(values: torch.Tensor, shift: int, spare: torch.Tensor) -> torch.Tensor:
    """Xor integers in place with themselves shifted right as unsigned; ``spare`` is a buffer of the same shape."""
    # A signed shift copies the sign down; the mask makes it the unsigned shift of the published mixes.
    width = 8 * values.element_size()
    torch.bitwise_right_shift(values, shift, out=spare).bitwise_and_((1 << (width - shift)) - 1)
    return values.bitwise_xor_(spare)


def signed(value: int, bits: int) -> int:
    """Return the signed integer of the same bits; signed arithmetic wraps modulo 2**bits too."""
    return value - 2**bits if value >= 2 ** (bits - 1) else value
