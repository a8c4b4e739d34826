"""The weight hash of tensors on a GPU, beside the hash of the same tensors on the CPU."""

import pytest
import torch

from pytest_aorta.worker.layout import Axis, Grid
from pytest_aorta.worker.weight_hash import tensor_sums
from tests.unit.builders import each_of

ELEMENTS = [torch.int8, torch.int16, torch.int32]
DTYPES = [torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool]
RUNS = [(0, 0), (1, 0), (1023, 0), (1025, 3), (5000, 2**33 + 17), (70_000, 1000), (2**21 + 1, 1024), (2**22, 0)]
pytestmark = pytest.mark.usefixtures("leased_gpu")
BLOCKS = [(5, 300, 2, 700, 1024), (7, 2048, 0, 0, 4096), (3, 1500, 1, 500, 3072), (5000, 4, 3, 1024, 2048)]


def check(elements, grid):
    assert tensor_sums(elements.cuda(), grid).tolist() == tensor_sums(elements, grid).tolist()


def elements_of(count, dtype):
    """Return random elements."""
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype)


@pytest.mark.parametrize("dtype", ELEMENTS, ids=str)
@pytest.mark.parametrize(("count", "offset"), RUNS)
def test_a_run_has_the_same_bits(dtype, count, offset):
    check(elements_of(count, dtype), Grid.of(Axis(2**40, range(offset, offset + count))))


@pytest.mark.parametrize("dtype", ELEMENTS, ids=str)
@pytest.mark.parametrize(("rows", "length", "row", "column", "width"), BLOCKS)
def test_a_block_of_columns_has_the_same_bits(dtype, rows, length, row, column, width):
    grid = Grid.of(Axis(10_000, range(row, row + rows)), Axis(width, range(column, column + length)))
    check(elements_of(rows * length, dtype), grid)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_of("columns", {"range": torch.arange(40), "scattered": torch.tensor([0, 1, 5, 30, 39])})
def test_every_dtype_has_one_hash_on_all_devices(dtype, columns):
    tensor = torch.randn(33, len(columns)).to(dtype)
    check(tensor, Grid.of(Axis(50, range(33)), Axis(40, columns).simplified()))
    check(tensor.t(), Grid.of(Axis(tensor.numel(), range(tensor.numel()))))
