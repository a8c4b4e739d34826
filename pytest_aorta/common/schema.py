"""Validation of JSON documents against the package's JSON Schemas, with error messages a person can act on."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from pytest_aorta.common.text import brief


@functools.cache
def load_schema(name: str) -> dict[str, Any]:
    """Return one of the package's schemas by file name."""
    text = files("pytest_aorta.common").joinpath("schemas", name).read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def violation(document: Any, schema_name: str) -> str | None:
    """Return the most relevant violation as "JSON path: got ..., allowed is ..."; None for a valid document.

    Args:
        document: A JSON document, whose arrays may be tuples.
        schema_name: File name of a schema in ``pytest_aorta/common/schemas``.
    """
    from jsonschema.exceptions import best_match  # takes 100 ms, which test collection doesn't need

    error = best_match(_validator(schema_name).iter_errors(document))
    return None if error is None else _words(error)


@functools.cache
def _validator(schema_name: str) -> Any:
    """Return jsonschema's validator of a schema, which checks a list of numbers at once."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    each = Draft202012Validator.VALIDATORS["items"]

    def items(validator: Any, rule: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if not _all_numbers_fit(instance, rule):
            yield from each(validator, rule, instance, schema)

    types = Draft202012Validator.TYPE_CHECKER.redefine("array", lambda _, value: isinstance(value, list | tuple))
    kind: Any = extend(Draft202012Validator, {"items": items}, type_checker=types)  # type: ignore[no-untyped-call]
    return kind(load_schema(schema_name))


def _all_numbers_fit(values: Any, rule: Any) -> bool:
    """Return whether all values are floats within the limits of a rule that has no other keywords."""
    if not isinstance(values, list) or not isinstance(rule, dict) or rule.keys() - {"type", "minimum", "maximum"}:
        return False
    kinds = {float} if rule.get("type") == "number" else {int} if rule.get("type") == "integer" else set()
    if not values or not set(map(type, values)) <= kinds:
        return False
    return bool(min(values) >= rule.get("minimum", -math.inf) and max(values) <= rule.get("maximum", math.inf))


def _words(error: Any) -> str:
    if error.validator in ("additionalProperties", "required"):
        return f"{error.json_path}: {error.message}"
    return (
        f"{error.json_path}: got {brief(json.dumps(error.instance))}, {allowed(error.validator, error.validator_value)}"
    )


def allowed(rule: object, value: object) -> str:
    """Return what one keyword of a JSON Schema allows, in words."""
    words = {
        "exclusiveMinimum": "above",
        "minimum": "at least",
        "maximum": "at most",
        "type": "type",
        "const": "only",
        "enum": "one of",
    }
    return f"allowed is {words.get(str(rule), rule)} {brief(json.dumps(value), 200)}"
