from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_aorta.worker.weight_hash import LocalShard, hash_parameters, hash_shards

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
]
WORDS = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40)


def digest(tensor, name="w"):
    return hash_parameters([(name, tensor)]).hex


def reference_sums(words, lane):
    """The definition, in Python integers."""
    step, start = lane
    total = 0
    for index, word in enumerate(words):
        z = (index * step + start + word) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        total += z ^ (z >> 31)
    return total % 2**64


@given(WORDS)
def test_sums_are_those_of_the_published_mix(words):
    from pytest_aorta.worker import weight_hash

    sums = weight_hash._mixed_sums(torch.arange(len(words)), torch.tensor(words, dtype=torch.int32)).tolist()

    assert [value % 2**64 for value in sums] == [reference_sums(words, lane) for lane in weight_hash._LANES]


@given(WORDS, st.randoms(use_true_random=False))
def test_any_order_of_unequal_elements_has_a_hash_of_its_own(words, random):
    shuffled = random.sample(words, len(words))

    assert (digest(torch.tensor(words)) == digest(torch.tensor(shuffled))) == (words == shuffled)


@settings(max_examples=50)
@given(st.integers(0, 60), st.lists(st.integers(0, 60), max_size=5), st.randoms(use_true_random=False))
def test_any_split_into_runs_hashes_like_the_whole(numel, cuts, random):
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    bounds = [0, *sorted(min(cut, numel) for cut in cuts), numel]
    runs = [LocalShard("w", (numel,), tensor[begin:end], begin) for begin, end in itertools.pairwise(bounds)]
    random.shuffle(runs)

    assert hash_shards(runs) == hash_parameters([("w", tensor)])


def test_a_tensor_larger_than_a_chunk_hashes_like_its_runs():
    tensor = torch.arange(2**18 + 3, dtype=torch.int16)
    runs = [LocalShard("w", tuple(tensor.shape), tensor[a:b], a) for a, b in [(0, 7), (7, len(tensor))]]

    assert hash_shards(runs).hex == digest(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_sees_one_changed_bit(dtype):
    tensor = torch.zeros(9).to(dtype)
    changed = tensor.clone()
    changed.view(torch.uint8)[-1] ^= 1

    assert digest(tensor) != digest(changed)
    assert digest(tensor) == digest(tensor.clone())


def test_the_sign_of_zero_is_seen():
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))


def test_the_payload_of_a_nan_is_seen():
    first, second = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32).split(1)

    assert first.isnan().all()
    assert second.isnan().all()
    assert digest(first) != digest(second)


def test_dtype_shape_and_name_are_seen():
    zeros = torch.zeros(2, 3)
    others = [zeros.to(torch.int32), zeros.t(), zeros.view(6), zeros.view(1, 2, 3)]

    assert len({digest(zeros), digest(zeros, "v"), *map(digest, others)}) == 2 + len(others)


def test_values_count_and_not_how_they_lie_in_memory():
    tensor = torch.randn(4, 5)

    assert digest(tensor.t().contiguous().t()) == digest(tensor)


def test_names_may_come_in_any_order():
    named = [("a", torch.ones(2)), ("b", torch.zeros(2))]

    assert hash_parameters(named) == hash_parameters(reversed(named))


def test_tensors_swapped_between_names_are_seen_and_each_is_named():
    a, b, c = torch.ones(2), torch.zeros(2), torch.zeros(3)
    before = hash_parameters([("a", a), ("b", b), ("c", c)])
    after = hash_parameters([("a", b), ("b", a), ("c", c)])

    assert before.hex != after.hex
    assert [name for name in "abc" if before.per_tensor[name] != after.per_tensor[name]] == ["a", "b"]


@pytest.mark.parametrize("lane", [0, 1])
def test_one_flipped_bit_flips_about_half_of_a_lane(lane):
    from pytest_aorta.worker.weight_hash import _mixed_sums

    def lane_of(word):
        return int(_mixed_sums(torch.tensor([12345]), torch.tensor([word]))[lane])

    flips = [(lane_of(0x3F800000) ^ lane_of(0x3F800000 ^ (1 << bit))) % 2**64 for bit in range(32)]

    assert all(12 <= flip.bit_count() <= 52 for flip in flips)
    assert 28 <= sum(flip.bit_count() for flip in flips) / len(flips) <= 36


def test_a_scalar_and_an_empty_tensor_have_hashes():
    assert digest(torch.tensor(1.0)) != digest(torch.ones(1))
    assert len(digest(torch.zeros(0, 3))) == 32


def test_missing_elements_are_an_error_that_counts_them():
    with pytest.raises(RuntimeError, match=r"w: the ranks hold 3 elements of 4"):
        hash_shards([LocalShard("w", (4,), torch.zeros(3), 0)])


def test_a_name_given_twice_is_an_error():
    with pytest.raises(RuntimeError, match=r"w: the ranks hold 4 elements of 2"):
        hash_parameters([("w", torch.zeros(2)), ("w", torch.zeros(2))])


def test_a_name_given_with_two_dtypes_is_an_error():
    with pytest.raises(ValueError, match="two dtypes or shapes"):
        hash_parameters([("w", torch.zeros(2)), ("w", torch.zeros(2, dtype=torch.int32))])


def test_a_run_outside_its_tensor_is_an_error():
    with pytest.raises(ValueError, match=r"w: run \[2, 5\) leaves \[0, 4\)"):
        hash_shards([LocalShard("w", (4,), torch.zeros(3), 2)])


@pytest.mark.parametrize("tensor", [torch.zeros(2, dtype=torch.complex128), torch.zeros(2, device="meta")])
def test_what_cannot_be_hashed_is_an_error_that_names_it(tensor):
    with pytest.raises(ValueError, match=r"w is torch\..* can be hashed"):
        digest(tensor)


def test_no_tensors_is_an_error():
    with pytest.raises(ValueError, match="no tensors"):
        hash_parameters([])
