"""The compiled check accepts nothing that jsonschema refuses, and all that launches leave."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from pytest_aorta.common import fast_schema
from pytest_aorta.common.fast_schema import compile_schema
from pytest_aorta.common.schema import acceptor, load_schema
from pytest_aorta.plan.world import World
from pytest_aorta.result.measurements import CollectiveTime, StepOverlap
from pytest_aorta.result.outcome import LaunchOutcome
from pytest_aorta.result.reading import SCHEMA, merge
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
# What a value can be replaced by, most of it wrong most of the time.
ODD = st.sampled_from(
    [None, True, False, 0, 1, -1, 1.0, -0.5, math.nan, "", "x", "A", "ab" * 8, [], {}, {"x": 1}]
) | st.sampled_from([[-1.0], [True], ["a", "a"], [1, "x"], [math.nan, -1.0], [[1]]])


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in items for place in places(item, (*path, key)))]


def changed(document: Any, data: st.DataObject) -> Any:
    """The document with one value replaced, removed, doubled, or added."""
    document = copy.deepcopy(document)
    *path, key = data.draw(st.sampled_from([place for place in places(document) if place]))
    parent = document
    for part in path:
        parent = parent[part]
    match data.draw(st.sampled_from(["replace", "remove", "add"])):
        case "replace":
            parent[key] = data.draw(ODD)
        case "remove":
            del parent[key]
        case "add" if isinstance(parent, dict):
            parent[data.draw(st.sampled_from(["x", "X", "1", "loss", "gemm_ms"]))] = data.draw(ODD)
        case "add":
            parent.append(data.draw(ODD | st.just(parent[key])))
    return document


def is_valid(document: Any, definition: str | None) -> bool:
    validator = Draft202012Validator(WHOLE)
    part = validator.evolve(schema={"$ref": f"#/$defs/{definition}"}) if definition else validator
    return bool(part.is_valid(document))


def merged() -> dict[str, Any]:
    plan = make_plan(Path("run"), world=World(2, "cpu"))
    document = merge(plan, LaunchOutcome("exit", 0, (), (), 1.5), [RANK, RANK])
    return json.loads(json.dumps(document))


def test_what_launches_leave_is_accepted_without_jsonschema():
    assert acceptor(SCHEMA, "rank_result")(RANK)
    assert acceptor(SCHEMA, None)(merged())


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_nothing_is_accepted_that_jsonschema_refuses(data):
    definition, document = data.draw(st.sampled_from([("rank_result", RANK), (None, merged())]))
    for _ in range(data.draw(st.integers(1, 3))):
        document = changed(document, data)
    if acceptor(SCHEMA, definition)(document):
        assert is_valid(document, definition)


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
def test_wrong_rank_result_is_not_accepted(wrong):
    assert not is_valid(RANK | wrong, "rank_result")
    assert not acceptor(SCHEMA, "rank_result")(RANK | wrong)


@pytest.mark.parametrize("keyword", [{"multipleOf": 1}, {"anyOf": []}, {"type": "object", "minProperties": 0}])
def test_keyword_that_is_not_known_accepts_nothing(keyword):
    assert not compile_schema(keyword, {})(0)


@pytest.mark.parametrize(
    ("keyword", "fits", "wrong"), [("minimum", 2, 1), ("exclusiveMinimum", 3, 2), ("maximum", 2, 3)]
)
def test_bound_holds_for_numbers_alone(keyword, fits, wrong):
    check = compile_schema({keyword: 2}, {})
    assert check(fits)
    assert check("1")
    assert not check(wrong)
    assert not check(math.nan)


def test_definition_that_refers_to_itself_is_followed():
    root = {"$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}
    check = compile_schema(root["$defs"]["tree"], root)
    assert check([[], [[]]])
    assert not check([[], [1]])


def test_keywords_of_this_packages_schemas_are_known():
    def keywords(schema: Any) -> set[str]:
        if not isinstance(schema, dict):
            return set()
        named = {name: part for key in ("properties", "$defs") for name, part in schema.get(key, {}).items()}
        parts = [*named.values(), *(schema.get(key) for key in ("items", "additionalProperties", "propertyNames"))]
        return set(schema).union(*map(keywords, parts))

    for name in (SCHEMA, "baseline.schema.json"):
        assert keywords(load_schema(name)) <= fast_schema._KNOWN | fast_schema._NOTES
