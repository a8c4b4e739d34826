"""Checking a document against one of the package's JSON Schemas, with an error a person can act on."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from importlib.resources import files
from typing import Any


@functools.cache
def load_schema(name: str) -> dict[str, Any]:
    """One of the package's schemas by file name."""
    text = files("pytest_aorta.schemas").joinpath(name).read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def violation(document: Any, schema_name: str, definition: str | None = None) -> str | None:
    """The most telling violation as "JSON path: got ..., allowed is ...", or None."""
    from jsonschema.exceptions import best_match  # costs collection 0.1 s otherwise

    whole = _validator()(load_schema(schema_name))
    # Evolving keeps the whole file as the place that "$ref" is resolved in.
    part = whole.evolve(schema={"$ref": f"#/$defs/{definition}"}) if definition else whole
    error = best_match(part.iter_errors(document))
    if error is None:
        return None
    found = "" if error.validator in ("additionalProperties", "required") else f"got {_brief(error.instance)}, "
    return f"{error.json_path}: {found}{_allowed(error.validator, error.validator_value, error.message)}"


@functools.cache
def _validator() -> Any:
    """The draft's validator, which looks at plain numbers a list at a time: a launch has tens of thousands."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    one_by_one = Draft202012Validator.VALIDATORS["items"]

    def items(validator: Any, rule: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if not _is_valid_list(instance, rule):
            yield from one_by_one(validator, rule, instance, schema)

    return extend(Draft202012Validator, {"items": items})  # type: ignore[no-untyped-call]


def _is_valid_list(instance: Any, rule: Any) -> bool:
    """Whether it is surely a list of plain numbers, or of lists of them, that ``rule`` allows; no to all else."""
    if type(instance) is not list or type(rule) is not dict:
        return False
    kind = rule.get("type")
    if kind == "number" and rule.keys() <= {"type", "minimum"}:
        least = rule.get("minimum", -math.inf)
        return all(type(one) is float and one >= least for one in instance)
    if kind == "array" and rule.keys() == {"type", "minItems", "maxItems", "items"}:
        fewest, most, inner = rule["minItems"], rule["maxItems"], rule["items"]
        return all(type(one) is list and fewest <= len(one) <= most and _is_valid_list(one, inner) for one in instance)
    return False


def _allowed(rule: object, value: object, message: str) -> str:
    if rule in ("additionalProperties", "required"):
        return message
    words = {"minimum": "at least", "maximum": "at most", "type": "type", "const": "only", "enum": "one of"}
    return f"allowed is {words.get(str(rule), rule)} {_brief(value)}"


def _brief(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
