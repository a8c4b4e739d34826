"""The codes of the fsdp workload and their comparison, without ranks."""

import pytest
import torch
from aorta_workloads.fsdp import oracle
from aorta_workloads.fsdp.diagnosis import input_hypotheses, shard_hypotheses
from aorta_workloads.fsdp.settings import Settings
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rank.settings import default_config

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
bounded = settings(max_examples=30, deadline=None, database=None)
sizes = st.integers(2, 1500)
iterations = st.integers(0, 100_000)
layers = st.integers(0, 250)
ranks = st.integers(0, 1023)
seeds = st.integers(0, 2**31)


def codes(size, *, iteration=0, layer=0, rank=0, seed=0, dtype=torch.float32):
    out = torch.empty(size, dtype=dtype)
    oracle.CodeTable(dtype, CPU, seed).write(out, oracle.chunk_index(size, rank), iteration, layer)
    return out


def contribution(full, *, world_size, rank, iteration):
    part = full.clone()
    oracle.Contribution(world_size, rank, full.dtype, CPU).keep_own(part, iteration)
    return part


def compared(actual, expected):
    out = torch.empty(actual.shape[0], len(oracle.COLUMNS), dtype=torch.float64)
    oracle.compare(actual, expected, out)
    return [dict(zip(oracle.COLUMNS, row, strict=True)) for row in out.tolist()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@bounded
@given(size=sizes, iteration=iterations, layer=layers, rank=ranks, seed=seeds)
def test_codes_are_nonzero_and_the_same_integers_in_every_dtype(dtype, size, iteration, layer, rank, seed):
    place = {"iteration": iteration, "layer": layer, "rank": rank, "seed": seed}
    exact = codes(size, **place, dtype=torch.float64)
    assert exact.min() >= 1
    assert exact.max() <= 251
    assert torch.equal(codes(size, **place, dtype=dtype).double(), exact)


@bounded
@given(size=sizes, iteration=iterations, layer=layers, rank=ranks, seed=seeds)
def test_every_element_differs_from_its_neighbours_in_time_layer_rank_and_position(size, iteration, layer, rank, seed):
    place = {"iteration": iteration, "layer": layer, "rank": rank, "seed": seed}
    here = codes(size, **place)
    later = [{"iteration": iteration + age} for age in range(1, oracle.INPUT_SLOTS)]
    for other in (*later, {"layer": layer + 1}, {"seed": seed + 1}):
        assert (codes(size, **place | other) != here).all(), other
    assert (here[1:] != here[:-1]).all()


@bounded
@given(size=sizes, family=st.integers(0, 3), pair=st.sets(st.integers(0, 250), min_size=2, max_size=2))
def test_every_element_differs_between_any_two_of_251_ranks(size, family, pair):
    one, other = (codes(size, rank=family * 251 + member) for member in pair)
    assert (one != other).all()


@bounded
@given(size=st.integers(2, 1500), rank=st.integers(0, 700))
def test_ranks_251_apart_differ_at_all_but_one_of_251_elements(size, rank):
    same = codes(size, rank=rank) == codes(size, rank=rank + 251)
    assert same.sum() <= -(-size // 251)


def test_each_simple_cause_moves_a_code_differently():
    world_size, num_layers = 16, 15
    run = Settings.read(default_config("fsdp", layers=num_layers), 0, world_size)
    meanings = shard_hypotheses(run, 7, 5).values()
    simple = [text for text in meanings if not (text.startswith("the data of layer") and "stale" in text)]
    assert len(simple) == 3 + world_size + num_layers - 1
    assert all(len(input_hypotheses(slot)) == oracle.INPUT_SLOTS - 1 for slot in range(oracle.INPUT_SLOTS))


@pytest.mark.parametrize("world_size", [2, 3, 8, 250, 251, 252, 1024])
@settings(max_examples=4, deadline=None, database=None)
@given(size=st.integers(2, 5), iteration=iterations, dtype=st.sampled_from(DTYPES))
def test_contributions_of_all_ranks_sum_to_the_codes_exactly(world_size, size, iteration, dtype):
    full = torch.empty(world_size * size, dtype=dtype)
    oracle.CodeTable(dtype, CPU, 0).write(full, oracle.world_index(size, world_size), iteration, 3)
    total = torch.zeros_like(full)
    for rank in range(world_size):
        total += contribution(full, world_size=world_size, rank=rank, iteration=iteration)
    assert torch.equal(total, full)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wrong", ["MAX", "MIN", "PRODUCT", "AVG", "missing", "repeated"])
@bounded
@given(data=st.data(), world_size=st.integers(2, 9), size=st.integers(2, 40), iteration=iterations)
def test_reduction_other_than_the_sum_of_all_ranks_differs_from_the_codes(
    wrong, dtype, data, world_size, size, iteration
):
    full = torch.empty(world_size * size, dtype=dtype)
    oracle.CodeTable(dtype, CPU, 0).write(full, oracle.world_index(size, world_size), iteration, 3)
    place = {"world_size": world_size, "iteration": iteration}
    parts = torch.stack([contribution(full, rank=rank, **place) for rank in range(world_size)])
    member = data.draw(st.integers(0, world_size - 1))
    others = [rank for rank in range(world_size) if rank != member]
    reduced = {
        "MAX": lambda: parts.amax(0),
        "MIN": lambda: parts.amin(0),
        "PRODUCT": lambda: parts.prod(0),
        "AVG": lambda: parts.sum(0) / world_size,
        "missing": lambda: parts[others].sum(0),
        "repeated": lambda: parts.sum(0) + parts[member],
    }[wrong]()
    assert torch.equal(parts.sum(0), full)
    concerned = parts[member] != 0 if wrong in ("missing", "repeated") else torch.ones_like(full, dtype=torch.bool)
    assert torch.equal(reduced != full, concerned)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@bounded
@given(size=sizes, wrong=st.sets(st.integers(0, 1499), max_size=8), shift=st.integers(1, 250))
def test_compare_counts_and_locates_any_set_of_wrong_elements(dtype, size, wrong, shift):
    wrong = sorted(position for position in wrong if position < size)
    expected = codes(size, dtype=dtype)
    actual = expected.clone()
    actual[wrong] = (actual[wrong].float() - 1 + shift).remainder(251).add(1).to(dtype)
    row = compared(torch.stack([expected, actual]), torch.stack([expected, expected]))
    assert row[0]["count"] == 0
    assert row[1]["count"] == len(wrong)
    if wrong:
        first, last = wrong[0], wrong[-1]
        assert (row[1]["first"], row[1]["last"]) == (first, last)
        assert (row[1]["expected"], row[1]["actual"]) == (expected[first].item(), actual[first].item())
        assert (row[1]["last_expected"], row[1]["last_actual"]) == (expected[last].item(), actual[last].item())
