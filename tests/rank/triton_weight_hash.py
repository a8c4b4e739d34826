"""Both engines of the weight hash have the same bits: on a GPU, or without one under TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch

from pytest_aorta.worker.hash_grid import Axis, Grid
from pytest_aorta.worker.hash_mix import eager_sums, tensor_sums
from pytest_aorta.worker.hash_triton import triton_sums

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORDS = [torch.uint8, torch.uint16, torch.int32]
DTYPES = [torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool]
RUNS = [(0, 0), (1, 0), (1023, 0), (1024, 0), (1025, 3), (5000, 2**33 + 17), (70_000, 1000), (300_000, 1024)]
BLOCKS = [(5, 300, 2, 700, 1024), (7, 2048, 0, 0, 4096), (3, 1500, 1, 500, 3072), (9, 1024, 3, 1024, 2048)]


def words_of(count, dtype):
    raw = torch.randint(0, 256, (count * 4,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    return raw.view(dtype)[:count]


def check(words, grid, **tile):
    assert triton_sums(words.to(DEVICE), grid, **tile).tolist() == eager_sums(words, grid).tolist()


@pytest.mark.parametrize("dtype", WORDS, ids=str)
@pytest.mark.parametrize(("count", "offset"), RUNS)
def test_a_run_has_the_same_bits(dtype, count, offset):
    check(words_of(count, dtype), Grid.of(Axis(2**40, range(offset, offset + count))))


@pytest.mark.parametrize("dtype", WORDS, ids=str)
@pytest.mark.parametrize(("rows", "length", "row", "column", "width"), BLOCKS)
def test_a_block_of_columns_has_the_same_bits(dtype, rows, length, row, column, width):
    grid = Grid.of(Axis(100, range(row, row + rows)), Axis(width, range(column, column + length)))
    check(words_of(rows * length, dtype), grid)


@pytest.mark.parametrize("unroll", [1, 2, 4])
def test_the_shape_of_the_work_changes_no_bits(unroll):
    words = words_of(20_000, torch.int32)
    check(words, Grid.of(Axis(2**20, range(100, 20_100))), unroll=unroll)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [torch.arange(40), torch.tensor([0, 1, 5, 30, 39])], ids=["range", "scattered"])
def test_every_dtype_has_one_hash_on_all_devices(dtype, columns):
    tensor = torch.randn(33, len(columns)).to(dtype)
    grid = Grid.of(Axis(50, range(33)), Axis(40, columns).simplified())
    assert tensor_sums(tensor.to(DEVICE), grid).tolist() == tensor_sums(tensor, grid).tolist()
