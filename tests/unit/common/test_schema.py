"""jsonschema, which others validate results with too, checks lists of numbers at once, to the same result."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from pytest_aorta.common.schema import load_schema, violation
from pytest_aorta.result.reading import SCHEMA
from tests.unit.builders import make_result

PLAIN = Draft202012Validator(load_schema(SCHEMA))
VALID = make_result([[1.0, 2.0], [1.0, 3.0]], memory_bytes=[[1], [2]], loss=[1.0, 0.5]).to_json()
ODD = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-2, 2) | st.booleans() | st.none() | st.text()


def with_rank(**changes):
    return VALID | {"ranks": [VALID["ranks"][0] | changes, VALID["ranks"][1]]}


@given(st.lists(st.floats(-1, 5) | ODD, max_size=4), st.sampled_from(["step_times_ms", "loss", "memory_bytes"]))
def test_lists_of_numbers_are_judged_as_by_jsonschema_alone(values, name):
    document = with_rank(**{name: values})
    assert (violation(document, SCHEMA) is None) == PLAIN.is_valid(document)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (VALID | {"extra": 1}, "'extra' was unexpected"),
        ({key: value for key, value in VALID.items() if key != "metrics"}, "'metrics' is a required property"),
        (with_rank(step_times_ms=[1.0, -1e-9]), "$.ranks[0].step_times_ms[1]: got -1e-09, allowed is at least 0"),
        (with_rank(step_times_ms=[math.nan, -1.0]), "step_times_ms"),
        (with_rank(weight_hashes={"3": "AB" * 8}), "allowed is pattern"),
        (VALID | {"platform": "\udcff"}, "$.platform"),
    ],
)
def test_wrong_document_is_refused_with_the_place_and_what_is_allowed(document, said):
    assert said in str(violation(document, SCHEMA))


def test_importing_the_schemas_module_imports_no_validator():
    program = "import sys, pytest_aorta.common.schema; assert 'jsonschema' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
