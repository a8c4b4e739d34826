"""The files that ranks leave beside their results: operators of a step, and arrivals."""

import json

import pytest

from pytest_aorta.common.errors import ResultError
from pytest_aorta.common.model import to_builtins, to_json
from pytest_aorta.result.folder import OPERATORS_FILE, rank_folder
from pytest_aorta.result.reading import collect_result
from pytest_aorta.result.trace.rank_files import (
    Arrivals,
    OperatorCall,
    StepOperators,
    read_arrivals,
    read_operators,
    waits_of_ranks_ms,
)
from tests.unit.builders import ENDED_WELL, each_of, make_plan, rank_values, write_rank_file, write_ranks

CALL = OperatorCall(
    name="aten.mm.default",
    phase="backward",
    module="layers.0",
    source="model.py:7",
    is_collective=False,
    arguments="[1]",
    inputs=("a" * 32, "b" * 32),
    outputs=("c" * 32,),
    parameters=((0, "layers.0.weight"),),
)


@pytest.fixture
def path(tmp_path):
    folder = rank_folder(tmp_path, 1)
    folder.mkdir(parents=True)
    return folder / OPERATORS_FILE


def test_calls_are_read_as_they_were_written(tmp_path, path):
    path.write_text(to_json(StepOperators(3, [CALL, CALL])))
    assert read_operators(tmp_path, 1, 3) == [CALL, CALL]


def test_file_of_another_step_and_no_file_are_none(tmp_path, path):
    path.write_text(to_json(StepOperators(3, [CALL])))
    assert read_operators(tmp_path, 1, 2) is None
    assert read_operators(tmp_path, 0, 3) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"inputs": ["zz"]}, "inputs"), ({"parameters": [[0]]}, "parameters"), ({"extra": 1}, "extra")],
)
def test_file_of_another_shape_is_refused_with_its_name_and_key(tmp_path, path, changes, said):
    path.write_text(json.dumps({"step": 1, "calls": [to_builtins(CALL) | changes]}))
    with pytest.raises(ResultError) as caught:
        read_operators(tmp_path, 1, 1)
    assert str(path) in str(caught.value)
    assert said in str(caught.value)


MS = 1_000_000


def rank(
    *arrivals_ms: int,
    began_ms: tuple[int, ...] = (0, 100),
    ended_ms: tuple[int, ...] = (100, 200),
    known_from_ms: int = 0,
    **named: int,
) -> Arrivals:
    """Return arrivals at the collectives 0, 1, ... and at named ones; the two steps are 100 ms each."""
    arrived = {str(number): moment for number, moment in enumerate(arrivals_ms)} | named
    return Arrivals(
        [moment * MS for moment in began_ms],
        [moment * MS for moment in ended_ms[-len(began_ms) :]],
        known_from_ms * MS,
        {name: moment * MS for name, moment in arrived.items()},
    )


SHORT = {"ended_ms": (60, 160)}
# Arrivals of each rank -> its waits in each step.
WAITS = {
    "to the last arrival": ([rank(10, 110), rank(50, 105), rank(30, 180)], [[40, 70], [0, 75], [20, 0]]),
    "once for collectives in flight at once": ([rank(10, 20, 30), rank(50, 60, 40)], [[50, 0], [0, 0]]),
    "to the end of the step": ([rank(10, 90), rank(10, 150)], [[10, 0], [0, 0]]),
    "not outside of steps and not alone": (
        [rank(10, own=20, before=-5, after=205), rank(10, before=-1, after=300)],
        [[0, 0], [0, 0]],
    ),
    "not in a step recorded in part": ([rank(10, 110), rank(50, 150, known_from_ms=50)], [[40], [0]]),
    "in no step recorded in part": ([rank(10, 110), rank(50, 150, known_from_ms=120)], [[], []]),
    # The loss is reduced for a log, weights are hashed, or rank 1 writes a checkpoint.
    "not between steps": ([rank(10, 70, 110, **SHORT), rank(10, 95, 110, **SHORT)], [[0, 0], [0, 0]]),
    "to the end of its own step": ([rank(50, **SHORT), rank(99, **SHORT)], [[10, 0], [0, 0]]),
}


@each_of("ranks, waits", WAITS)
def test_rank_waits_from_its_own_arrival(ranks, waits):
    assert waits_of_ranks_ms(ranks) == waits


def result_of(tmp_path, *documents, nodes=None):
    values = rank_values(step_times_ms=[100.0, 100.0], total_iterations=2, configured_iterations=2, loss=[])
    write_ranks(tmp_path, values, values)
    for number, document in enumerate(documents):
        write_rank_file(tmp_path, number, "arrivals.json", json.dumps(document))
    return collect_result(make_plan(tmp_path), ENDED_WELL)


def test_waits_are_computed_when_the_ranks_files_are_read(tmp_path):
    result = result_of(tmp_path, to_builtins(rank(10, 110)), to_builtins(rank(50, 105)))
    assert result.collective_ms == [[40, 0], [0, 5]]


@pytest.mark.parametrize(
    "documents", [[], [to_builtins(rank(10))], [to_builtins(rank(10, began_ms=(0,)))] * 2], ids=len
)
def test_waits_are_unknown_if_a_rank_left_no_arrivals_or_other_steps(tmp_path, documents):
    assert result_of(tmp_path, *documents).collective_ms == [[], []]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"began_ns": [1.5]}, r"\$.began_ns\[0\]: got 1.5"),
        ({"ended_ns": None}, r"\$.ended_ns: got null"),
        ({"arrived_ns": []}, r"\$.arrived_ns"),
    ],
)
def test_file_of_another_shape_is_an_error_that_names_file_and_key(tmp_path, change, message):
    path = tmp_path / "arrivals.json"
    path.write_text(json.dumps(to_builtins(rank(10)) | change))
    with pytest.raises(ResultError, match=f"{path}: {message}"):
        read_arrivals(path)
