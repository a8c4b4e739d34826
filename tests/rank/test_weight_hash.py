import itertools
import math
import warnings
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_aorta.worker import weight_hash
from pytest_aorta.worker.layout import Axis, Grid
from pytest_aorta.worker.weight_hash import (
    LocalHashes,
    LocalShard,
    hash_local,
    hash_parameters,
    hash_shards,
    tensor_sums,
)
from tests.unit.builders import each_of

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
# On a shared host, a slow example is not a failure.
settings.register_profile("shared-host", deadline=None)
settings.load_profile("shared-host")
WORDS = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40)


def digest(tensor, name="w"):
    return hash_parameters([(name, tensor)]).hex


def split_mix(counter, sequence):
    z = (counter * sequence[0] + sequence[1]) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def low_bias_32(counter):
    x = counter % 2**32
    x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
    x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def mixed(element, bits):
    fold, factor, shift = {8: (4, 0x9D, 3), 16: (8, 0x88B5, 7), 32: (16, 0x7FEB352D, 15)}[bits]
    x = element % 2**bits
    x = (x ^ (x >> fold)) * factor % 2**bits
    return x ^ (x >> shift)


def unmixed(word):
    """Return the int32 whose mix is ``word``."""
    fold, factor, shift = weight_hash.MIXES[32]
    x = word % 2**32
    for after, times in [(shift, pow(factor, -1, 2**32)), (fold, 1)]:
        y = x
        for _ in range(32 // after):
            y = x ^ (y >> after)
        x = y * times % 2**32
    return signed(x, 32)


def signed(value, bits):
    return (value + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


def reference_sums(elements, offset=0, bits=32):
    """Compute the sums by their definition, in Python integers."""
    words, per_word = defaultdict(int), 32 // bits
    for index, element in enumerate(elements, offset):
        words[index // per_word] += mixed(element, bits) << bits * (index % per_word)
    totals = [0, 0]
    for index, word in words.items():
        for lane in range(2):
            row = signed(low_bias_32(index // 1024 * 2 + lane) | 1, 32)
            column = split_mix(index % 1024 * 2 + lane, weight_hash.COLUMN_KEYS) | 1
            totals[lane] += signed(word, 32) * row * column
    return [total % 2**64 for total in totals]


def sums_of(tensor, *axes):
    grid = Grid.of(*axes) if axes else Grid.of(Axis(tensor.numel(), range(tensor.numel())))
    return [value % 2**64 for value in tensor_sums(tensor, grid).tolist()]


@given(WORDS, st.sampled_from([0, 1, 1000, 1024, 2**31 + 5, 2**40]))
def test_sums_are_those_of_the_definition(words, offset):
    held = range(offset, offset + len(words))

    assert sums_of(torch.tensor(words, dtype=torch.int32), Axis(2**50, held)) == reference_sums(words, offset)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elements_are_mixed_each_or_by_halves_low_first_and_packed_into_words(dtype):
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.arange(15 * size).mul(37).remainder(2 if dtype is torch.bool else 256).to(torch.uint8)
    width = min(size, 4)
    elements = [int.from_bytes(bytes(raw[at : at + width].tolist()), "little") for at in range(0, len(raw), width)]

    assert sums_of(raw.view(dtype)) == reference_sums(elements, bits=8 * width)


@pytest.mark.parametrize("word", [-(2**31), 2**31 - 1, -1])
def test_rows_of_the_largest_mixed_words_are_summed_exactly(word):
    elements = torch.arange(-(2**16), 2**16, dtype=torch.int32).mul_(2**15 + 1)
    elements[-(2**16) :] = unmixed(word)

    assert sums_of(elements) == reference_sums(elements.tolist())


def test_small_tensors_are_summed_together_with_the_sums_of_the_definition():
    sizes = [0, 1, 3, 1023, 1024, 1025, 4096, 4097] * 50
    named = [
        (f"{number}", torch.arange(number, number + size).mul(2654435761).to([torch.int8, torch.int32][number % 2]))
        for number, size in enumerate(sizes)
    ]
    with CountedCalls() as counted:
        found = hash_parameters(named).per_tensor
        local = LocalHashes(1)
        local.add(1, named)

    # Each of two hashes flattens, stacks and names a tensor.
    assert counted.calls < 40 * len(named)
    assert found == {name: hash_local(name, tensor) for name, tensor in named}
    for number in range(16):
        assert sums_of(named[number][1]) == reference_sums(named[number][1].tolist(), bits=[8, 32][number % 2])


class CountedCalls(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **kwargs or {})


@each_of("axes", {"run": [(2**40, 5, 300_000)], "block": [(300, 1, 299), (4096, 7, 1000)]})
def test_the_size_of_chunks_changes_no_bits(axes, monkeypatch):
    axes = [Axis(size, range(begin, begin + count)) for size, begin, count in axes]
    elements = torch.randint(-(2**15), 2**15, [len(axis.held) for axis in axes], dtype=torch.int16)
    found = []
    for rows in (64, 128, 2048):
        monkeypatch.setattr(weight_hash, "_CPU_ROWS", rows)
        found.append(sums_of(elements, *axes))

    assert found == [found[0]] * 3


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.randoms(use_true_random=False)), min_size=1, max_size=4),
    st.sampled_from([torch.int8, torch.int16, torch.int32]),
)
def test_any_block_has_the_sums_of_the_definition_at_its_indices(dims, dtype):
    shape = [size for size, _ in dims]
    held = [sorted(random.sample(range(size), random.randint(1, size))) for size, random in dims]
    axes = [Axis(size, torch.tensor(rows)).simplified() for size, rows in zip(shape, held, strict=True)]
    index = torch.arange(math.prod(shape)).view(shape)
    for dim, rows in enumerate(held):
        index = index.index_select(dim, torch.tensor(rows))
    logical = torch.arange(math.prod(shape)).mul(2654435761).to(dtype)
    held_elements = logical.view(shape)[torch.meshgrid(*map(torch.tensor, held), indexing="ij")]
    others = torch.ones_like(logical)
    others[index.flatten()] = 0
    bits = 8 * dtype.itemsize
    rest = reference_sums((logical * others).tolist(), bits=bits)

    whole = reference_sums(logical.tolist(), bits=bits)
    # Elements outside the block count as zeros, which add nothing.
    assert sums_of(held_elements, *axes) == [(a - b) % 2**64 for a, b in zip(whole, rest, strict=True)]


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


def test_the_sign_of_zero_and_the_payload_of_a_nan_are_seen():
    first, second = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32).split(1)

    assert first.isnan().all()
    assert second.isnan().all()
    assert len({digest(first), digest(second), digest(torch.tensor([0.0])), digest(torch.tensor([-0.0]))}) == 4


def test_dtype_shape_and_name_are_seen():
    zeros = torch.zeros(2, 3)
    others = [zeros.to(torch.int32), zeros.t(), zeros.view(6), zeros.view(1, 2, 3)]

    assert len({digest(zeros), digest(zeros, "v"), *map(digest, others)}) == 2 + len(others)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_may_be_a_view_with_gaps_or_repeated_elements(dtype):
    numbers = torch.arange(1, 13).to(dtype)

    views = [numbers[::3], numbers[5:6:2], numbers[3], numbers[:1].expand(5), numbers.view(3, 4)[:, 1], numbers[2:2:3]]
    for view in views:
        assert digest(view) == digest(view.clone(memory_format=torch.contiguous_format))


def test_views_that_conjugate_or_negate_lazily_have_the_hash_of_their_values():
    numbers = torch.complex(torch.randn(6), torch.randn(6))
    conjugate, negated = numbers.conj(), numbers.conj().imag

    assert conjugate.is_conj()
    assert negated.is_neg()
    assert digest(conjugate) == digest(conjugate.resolve_conj()) != digest(numbers)
    assert digest(negated) == digest(negated.resolve_neg()) != digest(numbers.imag)


class Compiled(nn.Module):
    """A module that renames parameters as torch.compile does, which would import the compiler."""

    def __init__(self, inner):
        super().__init__()
        self._orig_mod = inner


def test_wrappers_of_torch_that_rename_parameters_change_no_hash():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    plain = hash_parameters(model.named_parameters())
    wrapped = nn.Sequential(checkpoint_wrapper(model[0]), Compiled(model[1]))
    names = [name for name, _ in wrapped.named_parameters()]
    assert {"0._checkpoint_wrapped_module.weight", "1._orig_mod.bias"} <= set(names)

    assert hash_parameters(Compiled(wrapped).named_parameters()) == plain
    assert sorted(plain.per_tensor) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    own = [("my_orig_mod.weight", torch.ones(1)), ("_fsdp_wrapped_module", torch.ones(2))]
    assert sorted(hash_parameters(own).per_tensor) == ["_fsdp_wrapped_module", "my_orig_mod.weight"]


def test_tensors_swapped_between_names_are_seen_and_each_is_named():
    a, b, c = torch.ones(2), torch.zeros(2), torch.zeros(3)
    before = hash_parameters([("a", a), ("b", b), ("c", c)])
    after = hash_parameters([("a", b), ("b", a), ("c", c)])

    assert before.hex != after.hex
    assert [name for name in "abc" if before.per_tensor[name] != after.per_tensor[name]] == ["a", "b"]


@pytest.mark.parametrize("value", [0, 1, 0x3F800000])
def test_equal_and_opposite_changes_of_a_constant_matrix_do_not_cancel(value):
    base = torch.full((64, 1024), value, dtype=torch.int32)
    seen = {tuple(sums_of(base))}
    for rows, columns in itertools.product([(0, 1), (3, 9), (0, 63)], [(0, 1), (5, 517), (0, 1023)]):
        changed = base.clone()
        changed[rows[0], columns] += torch.tensor([1, -1], dtype=torch.int32)
        changed[rows[1], columns] += torch.tensor([-1, 1], dtype=torch.int32)
        seen.add(tuple(sums_of(changed)))

    assert len(seen) == 10


def test_a_scalar_and_an_empty_tensor_have_hashes():
    assert digest(torch.tensor(1.0)) != digest(torch.ones(1))
    assert len(digest(torch.zeros(0, 3))) == 32


@each_of(
    "begin, error, message",
    {
        "missing elements": (0, RuntimeError, "w: the ranks hold 3 elements of 4"),
        "outside": (2, ValueError, r"w: run \[2, 5\) leaves \[0, 4\)"),
    },
)
def test_run_that_is_no_whole_tensor_is_an_error_that_says_what_it_holds(begin, error, message):
    with pytest.raises(error, match=message):
        hash_shards([LocalShard("w", (4,), torch.zeros(3), begin)])


def ragged():
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


TWO, DENSE = ("w", torch.zeros(2)), "; dense tensors can be hashed"
# A function that makes named tensors, and the error of hashing them.
REFUSED = {
    "name twice": (lambda: [TWO, TWO], RuntimeError, "w: the ranks hold 4 elements of 2"),
    "two dtypes": (lambda: [TWO, ("w", TWO[1].int())], ValueError, "two dtypes or shapes"),
    "complex": (lambda: [("w", TWO[1].to(torch.complex128))], ValueError, r"w is torch\..* can be hashed"),
    "without data": (lambda: [("w", TWO[1].to("meta"))], ValueError, r"w is torch\..* can be hashed"),
    "quantized": (
        lambda: [("w", torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.quint8))],
        ValueError,
        f"^w is quantized.*{DENSE}",
    ),
    "sparse": (lambda: [("w", torch.eye(3).to_sparse())], ValueError, f"^w is torch.sparse_coo.*{DENSE}"),
    "rows": (lambda: [("w", torch.eye(3).to_sparse_csr())], ValueError, f"^w is torch.sparse_csr.*{DENSE}"),
    "mkldnn": (lambda: [("w", torch.eye(3).to_mkldnn())], ValueError, f"^w is torch._mkldnn.*{DENSE}"),
    "nested": (lambda: [("w", ragged())], ValueError, f"^w is nested.*{DENSE}"),
    "not initialized": (
        lambda: nn.LazyLinear(2, bias=False).named_parameters(),
        ValueError,
        "^weight is not initialized; run the model once before",
    ),
    "nothing": (list, ValueError, "no tensors"),
}


@each_of("make, error, message", REFUSED)
def test_what_cannot_be_hashed_is_an_error_that_names_it(make, error, message):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        named = make()
    with pytest.raises(error, match=message):
        hash_parameters(named)
