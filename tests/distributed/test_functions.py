"""Functions of a test file that each rank calls: values, errors by rank, and the state in which ranks start."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs/functions.md").read_text(encoding="utf-8")
EXAMPLE = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
BODIES = """
import os, random, time
import pytest, torch
import torch.distributed as dist
from .helper import SHARED, ranks_of_a_helper

pytestmark = pytest.mark.world(size=3, device="cpu")
called = []

class Bodies:
    def summed(parts, scale):
        called.append(scale)
        total = parts["x"][1] * scale * (dist.get_rank() + 1)
        dist.all_reduce(total)
        return {"total": total, "others": [torch.zeros(2, 0), torch.tensor(1.5, dtype=torch.bfloat16), (None, "é")]}

def state():
    return [len(called), SHARED, os.getpid(), random.random(), torch.rand(()).item(), dist.is_initialized()]

def refused():
    return [{"of": {dist.get_rank()}}]

def wrong(limit):
    rank = dist.get_rank()
    assert rank < limit, "rank too large"
    dist.barrier()

def late(rank):
    if dist.get_rank() == rank:
        time.sleep(600)
    dist.barrier()

def test_values(distributed_world):
    values = distributed_world.run_function(Bodies.summed, {"x": [0, torch.tensor([1.0, 2.0])]}, 2)
    for value in values:
        assert torch.equal(value["total"], torch.tensor([12.0, 24.0]))
        empty, half, rest = value["others"]
        assert (empty.shape, half.dtype, half.item(), rest) == ((2, 0), torch.bfloat16, 1.5, [None, "é"])

KINDS = [pytest.param(warm, marks=pytest.mark.world(device="cpu", warm=warm)) for warm in (None, False)]

@pytest.mark.parametrize("warm", KINDS)
def test_state(distributed_world, warm):
    called.append("only in pytest")
    found = [*distributed_world.run_function(state, init=False), *distributed_world.run_function(state, size=1)]
    assert [(count, shared) for count, shared, *_ in found] == [(0, "shared")] * 3
    assert [len(set(kind)) for kind in list(zip(*found))[2:5]] == [3, 3, 3]
    assert [is_joined for *_, is_joined in found] == [False, False, True]

def test_helper(distributed_world):
    assert distributed_world.run_function(ranks_of_a_helper, size=2) == [[0, 2], [1, 2]]

def test_refused(distributed_world):
    distributed_world.run_function(refused)

def test_wrong(distributed_world):
    distributed_world.run_function(wrong, 2)

def test_late(distributed_world):
    distributed_world.run_function(late, 1, timeout_s=15)
"""
HELPER = """
import torch.distributed as dist

SHARED = "shared"

def ranks_of_a_helper():
    return [dist.get_rank(), dist.get_world_size()]
"""
SHOWN = [
    "*LaunchError: refused on 3 cpu ranks: *rank ? failed first: TypeError: refused()[[]0][[]'of'] is {?}, of type *",
    "*then ranks *: the same error with other numbers",
    "*LaunchError: wrong on 3 cpu ranks: rank exception: rank 2 failed first: AssertionError: rank too large",
    "E * assert 2 < 2",
    'E * File "*test_bodies.py", line *, in wrong',
    "*then rank*",
    "*LaunchError: late on 3 cpu ranks: hang in collective: ranks 0, 2 gave up waiting for rank 1",
    "*rank 1, step 0: late (*test_bodies.py:*",
    "*3 of 7 tests failed, 3 tests failed without a verdict, 9 launches in *",
]


@pytest.fixture
def bodies(pytester):
    folder = pytester.mkpydir("parts")
    (folder / "test_bodies.py").write_text(BODIES, encoding="utf-8")
    (folder / "helper.py").write_text(HELPER, encoding="utf-8")
    pytester.makeini("[pytest]\naddopts = -p no:randomly -p no:cacheprovider\n")
    return pytester


def test_functions_return_values_or_fail_with_the_rank_and_its_error(bodies):
    result = bodies.runpytest_subprocess()
    result.assert_outcomes(passed=4, failed=3)
    result.stdout.fnmatch_lines(SHOWN)


@pytest.mark.extended
def test_example_of_the_page_runs(inner):
    inner(EXAMPLE, "--aorta-gpus=0").assert_outcomes(passed=2)


@pytest.mark.extended
def test_functions_are_found_where_the_path_lacks_the_folder_of_their_package(bodies):
    result = bodies.runpytest_subprocess("--import-mode=importlib", "-k", "values")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines("aorta: 1 test OK, 1 launch in *")


REFUSED = {
    "lambda: 1": "test_0.<locals>.<lambda> is not found by this name in its module*",
    "print": "print is not found by this name in its module*",
    "body, {'a': [1, {2}]}": "body: args[[]0][[]'a'][[]1] is {2}, of type set; allowed are texts, *",
    "body, size=3": "size is 3, allowed is 1 to 2, *",
    "body, timeout_s=0": "timeout_s is 0, allowed are seconds above 0",
}


def test_call_that_ranks_could_not_make_starts_nothing(inner):
    tests = (
        f"def test_{number}(distributed_world):\n    distributed_world.run_function({call})\n"
        for number, call in enumerate(REFUSED)
    )
    result = inner("\n".join(["def body(): pass", *tests]), "--aorta-gpus=0")
    result.assert_outcomes(failed=len(REFUSED))
    shown = [f"E *SpecError: run_function: {message}" for message in REFUSED.values()]
    result.stdout.fnmatch_lines([*shown, "aorta: no test launched*"])
