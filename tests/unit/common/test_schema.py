"""jsonschema-rs, the fast validator, and jsonschema, the reference, agree on every document that a file can hold."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from pytest_aorta.common.schema import fast_validator, load_schema, violation
from pytest_aorta.plan.world import World
from pytest_aorta.result.outcome import LaunchOutcome
from pytest_aorta.result.reading import SCHEMA, merge
from pytest_aorta.result.trace.profiled_steps import CollectiveTime, StepOverlap
from tests.unit.builders import make_plan, rank_values

WHOLE = load_schema(SCHEMA)
FAILURE = {
    "kind": "all_gather", "iteration": 2, "rank": 1, "layer": None, "source_rank": 0, "index": 5, "count": 7,
    "total": 16, "expected": 1.0, "actual": 0.0, "cause": None,
}  # fmt: skip
RANK = json.loads(
    json.dumps(
        rank_values(
            passed=False,
            failure_count=1,
            failures=[FAILURE],
            wait_ms=[1.0, 2.0],
            memory_bytes=[1, 2],
            canary_before={"gemm_ms": 1.0},
            timeline={"compute": [[0.0, 1.5]]},
            overlap=[asdict(StepOverlap(2.0, 1.0, 1.0, 0.0, 0.5, 0.5, {"all_gather": CollectiveTime(1.0, 0.5)}))],
            tensor_hashes={"weights": {"names": ["w"], "shapes": [[2, 3]], "steps": {"1": ["0" * 32]}}},
        )
    )
)
# Replacements for a value of a document; most of them are wrong in most places.
REPLACEMENTS = st.sampled_from(
    [None, True, False, 0, 1, -1, 1.0, 2.0, -0.5, -0.0, 10**400, 2**64, "", "x", "A", "ab" * 8, [], {}, {"x": 1}]
) | st.sampled_from([[-1.0], [True], ["a", "a"], [1, "x"], [2.0], [[1]]])


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, item in items for found in paths(item, (*path, key)))]


def changed(document: Any, data: st.DataObject) -> Any:
    """Return the document with one value replaced, removed, doubled, or added."""
    document = copy.deepcopy(document)
    *path, key = data.draw(st.sampled_from([path for path in paths(document) if path]))
    parent = document
    for part in path:
        parent = parent[part]
    match data.draw(st.sampled_from(["replace", "remove", "add"])):
        case "replace":
            parent[key] = data.draw(REPLACEMENTS)
        case "remove":
            del parent[key]
        case "add" if isinstance(parent, dict):
            parent[data.draw(st.sampled_from(["x", "X", "1", "loss", "gemm_ms"]))] = data.draw(REPLACEMENTS)
        case "add":
            parent.append(data.draw(REPLACEMENTS | st.just(parent[key])))
    return document


def is_valid(document: Any, definition: str | None) -> bool:
    validator = Draft202012Validator(WHOLE)
    part = validator.evolve(schema={"$ref": f"#/$defs/{definition}"}) if definition else validator
    return bool(part.is_valid(document))


def merged() -> dict[str, Any]:
    plan = make_plan(Path("run"), world=World(2, "cpu"))
    document = merge(plan, LaunchOutcome("exit", 0, (), (), 1.5), [RANK, RANK])
    return json.loads(json.dumps(document))


def test_results_of_launches_are_accepted_without_importing_jsonschema():
    documents = json.dumps({"rank_result": RANK, "": merged()})
    program = (
        "import json, sys; from pytest_aorta.common.schema import violation\n"
        "for name, document in json.loads(sys.stdin.read()).items():\n"
        f"    assert not violation(document, {SCHEMA!r}, name or None)\n"
        "assert 'jsonschema' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], input=documents, text=True, check=True)


def test_importing_the_schemas_module_imports_neither_validator():
    program = "import sys, pytest_aorta.common.schema; assert not {'jsonschema', 'jsonschema_rs'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


@settings(max_examples=300)
@given(st.data())
def test_both_validators_agree_on_mutated_documents(data):
    definition, document = data.draw(st.sampled_from([("rank_result", RANK), (None, merged())]))
    for _ in range(data.draw(st.integers(1, 3))):
        document = changed(document, data)
    assert fast_validator(SCHEMA, definition).is_valid(document) == is_valid(document, definition)
    assert (violation(document, SCHEMA, definition) is None) == is_valid(document, definition)


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss": [0.5, True]},
        {"step_times_ms": [1.0, -1e-9, 3.0]},
        {"step_times_ms": [math.nan, -1.0]},
        {"memory_bytes": [1, 2.5]},
        {"weight_hashes": {"3": "AB" * 8}},
        {"metrics": {"Tokens": 1.0}},
        {"canary_before": {"other_ms": 1.0}},
        {"failures": [FAILURE | {"count": 0}]},
        {"unknown": 1},
    ],
    ids=str,
)
def test_wrong_rank_result_is_refused_by_both_validators(wrong):
    assert not is_valid(RANK | wrong, "rank_result")
    assert not fast_validator(SCHEMA, "rank_result").is_valid(RANK | wrong)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_number_that_is_not_finite_is_refused_although_jsonschema_accepts_it(number):
    document = RANK | {"step_times_ms": [number]}
    assert is_valid(document, "rank_result")
    text = violation(document, SCHEMA, "rank_result")
    assert text is not None
    assert text.startswith("$: ")


def test_name_with_a_trailing_line_end_is_refused_although_jsonschema_accepts_it():
    # Python's "$" matches before a trailing line end; JSON Schema's does not.
    document = RANK | {"metrics": {"tokens\n": 1.0}}
    assert is_valid(document, "rank_result")
    assert violation(document, SCHEMA, "rank_result") is not None


def test_whole_number_written_as_a_float_is_an_integer_to_both_validators():
    document = RANK | {"memory_bytes": [1.0, 2.0]}
    assert is_valid(document, "rank_result")
    assert violation(document, SCHEMA, "rank_result") is None


def test_text_that_the_fast_validator_can_not_represent_is_judged_by_jsonschema():
    document = merged() | {"platform": "\udcff"}
    with pytest.raises(ValueError, match="surrogates"):
        fast_validator(SCHEMA).is_valid(document)
    text = violation(document, SCHEMA)
    assert text == r'$.platform: got "\udcff", allowed is pattern "^[a-z0-9][a-z0-9+-]*$"'


@pytest.mark.parametrize("name", [SCHEMA, "baseline.schema.json", "report_summary.schema.json"])
def test_every_bounded_number_has_a_type(name):
    # At a bound without a type, jsonschema-rs accepts an infinity that jsonschema refuses.
    def schemas(part: Any) -> list[dict[str, Any]]:
        values = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        return [*([part] if isinstance(part, dict) else []), *(found for value in values for found in schemas(value))]

    bounds = {"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf"}
    assert all("type" in part for part in schemas(load_schema(name)) if bounds & set(part) and "properties" not in part)
