"""The file of operators that a rank leaves for one step."""

from __future__ import annotations

import json

import pytest

from pytest_aorta.common.errors import ResultError
from pytest_aorta.common.model import to_builtins
from pytest_aorta.result.folder import OPERATORS_FILE, rank_folder
from pytest_aorta.result.trace.rank_files import OperatorCall, StepOperators, read_operators

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
    path.write_text(json.dumps(to_builtins(StepOperators(3, [CALL, CALL]))))
    assert read_operators(tmp_path, 1, 3) == [CALL, CALL]


def test_file_of_another_step_and_no_file_are_none(tmp_path, path):
    path.write_text(json.dumps(to_builtins(StepOperators(3, [CALL]))))
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


def test_damaged_file_is_refused(tmp_path, path):
    path.write_text('{"step": 1, "calls": [')
    with pytest.raises(ResultError, match=r"operators\.json: not valid JSON"):
        read_operators(tmp_path, 1, 1)
