"""The sums of a weight hash on a CPU, compiled: the bits of ``hash_mix.eager_sums`` in one pass. Needs numba."""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np
import torch

from pytest_aorta.worker import hash_mix

_FOLD_32, _FACTOR_32, _SHIFT_32 = (np.uint32(value) for value in hash_mix.MIXES[32])
_FOLD_16, _FACTOR_16, _SHIFT_16 = (np.uint32(value) for value in hash_mix.MIXES[16])
_FOLD_8, _FACTOR_8, _SHIFT_8 = (np.uint32(value) for value in hash_mix.MIXES[8])
_COLUMNS = hash_mix.COLUMNS
# Rows added up in registers before the sums of their columns are stored.
ROWS_AT_ONCE = 8


def row_sums(words: torch.Tensor, first_row: int) -> torch.Tensor:
    """Both lanes' sums of rows times words ``[rows, 1024]`` from ``first_row`` on, int64 ``[2, 1024]``, by column.

    ``words`` are of int8, int16 or int32 elements, ``[rows, 1024 * elements a word]``; the number of rows is a
    multiple of ``ROWS_AT_ONCE``.
    """
    keys = hash_mix.row_keys(torch.arange(first_row, first_row + len(words))).to(torch.int32).numpy()
    totals = np.zeros((hash_mix.LANES, _COLUMNS), dtype=np.int64)
    _SUMS[8 * words.element_size()](words.view(torch.int32).numpy().view(np.uint32), keys, totals)
    return torch.from_numpy(totals)


# numba widens what it computes of 32 bits: cast back, or the high bits would be shifted in.
@numba.njit(inline="always")
def _mix_32(word: np.uint32) -> np.uint32:
    mixed = np.uint32((word ^ (word >> _FOLD_32)) * _FACTOR_32)
    return np.uint32(mixed ^ (mixed >> _SHIFT_32))


@numba.njit(inline="always")
def _mix_16(word: np.uint32) -> np.uint32:
    folded = np.uint32(word ^ ((word >> _FOLD_16) & np.uint32(0x00FF00FF)))
    low = np.uint32(np.uint32(folded * _FACTOR_16) & np.uint32(0xFFFF))
    high = np.uint32(np.uint32(folded & np.uint32(0xFFFF0000)) * _FACTOR_16)
    mixed = np.uint32(low | high)
    return np.uint32(mixed ^ ((mixed >> _SHIFT_16) & np.uint32(0x01FF01FF)))


@numba.njit(inline="always")
def _mix_8(word: np.uint32) -> np.uint32:
    folded = np.uint32(word ^ ((word >> _FOLD_8) & np.uint32(0x0F0F0F0F)))
    even = np.uint32(np.uint32(folded & np.uint32(0x00FF00FF)) * _FACTOR_8) & np.uint32(0x00FF00FF)
    odd = np.uint32(np.uint32((folded >> np.uint32(8)) & np.uint32(0x00FF00FF)) * _FACTOR_8) & np.uint32(0x00FF00FF)
    mixed = np.uint32(np.uint32(even) | np.uint32(odd << np.uint32(8)))
    return np.uint32(mixed ^ ((mixed >> _SHIFT_8) & np.uint32(0x1F1F1F1F)))


def _summing(mix: Callable[[np.uint32], np.uint32]) -> Callable[..., None]:
    @numba.njit
    def add_rows(words, keys, totals):  # type: ignore[no-untyped-def]
        for row in range(0, words.shape[0], ROWS_AT_ONCE):
            for column in range(_COLUMNS):
                first, second = totals[0, column], totals[1, column]
                for at in range(row, row + ROWS_AT_ONCE):
                    value = np.int64(np.int32(mix(words[at, column])))
                    # Widened from 32 bits, for one vector instruction to multiply.
                    first += value * np.int64(keys[0, at])
                    second += value * np.int64(keys[1, at])
                totals[0, column], totals[1, column] = first, second

    compiled: Callable[..., None] = add_rows
    return compiled


_SUMS = {8: _summing(_mix_8), 16: _summing(_mix_16), 32: _summing(_mix_32)}
