"""Both engines of the weight hash compute the same bits, on a GPU or under TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch

from pytest_aorta.worker.hashing.grid import Axis, Grid
from pytest_aorta.worker.hashing.kernel import DEFAULT_TILE, takes, triton_sums
from pytest_aorta.worker.hashing.sums import eager_sums, tensor_sums

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ELEMENTS = [torch.int8, torch.int16, torch.int32]
DTYPES = [torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool]
RUNS = [(0, 0), (1, 0), (1023, 0), (1024, 0), (1025, 3), (5000, 2**33 + 17), (70_000, 1000), (300_000, 1024)]
BLOCKS = [(5, 300, 2, 700, 1024), (7, 2048, 0, 0, 4096), (3, 1500, 1, 500, 3072), (9, 1024, 3, 1024, 2048)]


def elements_of(words, dtype):
    """Return random elements that fill a number of 32-bit words."""
    raw = torch.randint(0, 256, (words * 4,), dtype=torch.uint8, generator=torch.Generator().manual_seed(words))
    return raw.view(dtype)


def check(elements, grid, tile=DEFAULT_TILE):
    on_device = elements.to(DEVICE)
    assert takes(on_device, grid)
    assert triton_sums(on_device, grid, tile).tolist() == eager_sums(elements, grid).tolist()


def axis(size, begin, count, dtype):
    """Return the axis of elements for an axis given in words."""
    per_word = 4 // dtype.itemsize
    return Axis(size * per_word, range(begin * per_word, (begin + count) * per_word))


@pytest.mark.parametrize("dtype", ELEMENTS, ids=str)
@pytest.mark.parametrize(("count", "offset"), RUNS)
def test_a_run_has_the_same_bits(dtype, count, offset):
    check(elements_of(count, dtype), Grid.of(axis(2**40, offset, count, dtype)))


@pytest.mark.parametrize("dtype", ELEMENTS, ids=str)
@pytest.mark.parametrize(("rows", "length", "row", "column", "width"), BLOCKS)
def test_a_block_of_columns_has_the_same_bits(dtype, rows, length, row, column, width):
    grid = Grid.of(Axis(100, range(row, row + rows)), axis(width, column, length, dtype))
    check(elements_of(rows * length, dtype), grid)


@pytest.mark.parametrize("unroll", [1, 2, 4])
def test_the_shape_of_the_work_changes_no_bits(unroll):
    elements = elements_of(20_000, torch.int32)
    check(elements, Grid.of(Axis(2**20, range(100, 20_100))), DEFAULT_TILE._replace(unroll=unroll))


@pytest.mark.parametrize("step", [0, 2])
def test_elements_that_are_not_side_by_side_in_memory_have_the_same_bits(step):
    # An expanded dimension has stride 0, and both views keep their strides through reshape(-1).
    memory = elements_of(6000, torch.int32)
    elements = (memory[:1].expand(3000) if step == 0 else memory[::step]).reshape(-1)
    assert not elements.is_contiguous()
    on_device = memory.to(DEVICE)
    on_device = on_device[:1].expand(3000) if step == 0 else on_device[::step]
    grid = Grid.of(Axis(3000, range(3000)))
    assert triton_sums(on_device, grid).tolist() == eager_sums(elements, grid).tolist()


@pytest.mark.parametrize(("begin", "end"), [(1, 9), (2, 7), (3, 4)])
def test_a_run_that_splits_words_is_left_to_the_other_engine(begin, end):
    grid = Grid.of(Axis(16, range(begin, end)))
    elements = torch.arange(end - begin, dtype=torch.int16, device=DEVICE)

    assert not takes(elements, grid)
    assert tensor_sums(elements, grid).tolist() == eager_sums(elements.cpu(), grid).tolist()


def test_a_run_that_lies_across_words_of_memory_is_left_to_the_other_engine():
    elements = torch.arange(9, dtype=torch.int16, device=DEVICE)[1:]

    assert not takes(elements, Grid.of(Axis(8, range(8))))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [torch.arange(40), torch.tensor([0, 1, 5, 30, 39])], ids=["range", "scattered"])
def test_every_dtype_has_one_hash_on_all_devices(dtype, columns):
    tensor = torch.randn(33, len(columns)).to(dtype)
    grid = Grid.of(Axis(50, range(33)), Axis(40, columns).simplified())
    assert tensor_sums(tensor.to(DEVICE), grid).tolist() == tensor_sums(tensor, grid).tolist()
