"""Checking a document against one of the package's JSON Schemas, with an error a person can act on."""

from __future__ import annotations

import functools
import json
from importlib.resources import files
from typing import Any

from pytest_aorta.common.fast_schema import Accept, compile_schema
from pytest_aorta.common.text import brief


@functools.cache
def load_schema(name: str) -> dict[str, Any]:
    """One of the package's schemas by file name."""
    text = files("pytest_aorta.common.schemas").joinpath(name).read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def violation(document: Any, schema_name: str, definition: str | None = None) -> str | None:
    """The most telling violation as "JSON path: got ..., allowed is ...", or None.

    jsonschema takes 0.1 s for one rank of 300 steps: it has the last word, but is asked only about what the compiled
    check does not accept.
    """
    if acceptor(schema_name, definition)(document):
        return None
    from jsonschema import Draft202012Validator  # costs collection 0.1 s otherwise
    from jsonschema.exceptions import best_match

    whole = Draft202012Validator(load_schema(schema_name))
    # Evolving keeps the whole file as the place that "$ref" is resolved in.
    part = whole.evolve(schema={"$ref": f"#/$defs/{definition}"}) if definition else whole
    error = best_match(part.iter_errors(document))
    if error is None:
        return None
    found = (
        "" if error.validator in ("additionalProperties", "required") else f"got {brief(json.dumps(error.instance))}, "
    )
    return f"{error.json_path}: {found}{_allowed(error.validator, error.validator_value, error.message)}"


@functools.cache
def acceptor(schema_name: str, definition: str | None) -> Accept:
    """The fast check of a schema, or of one of its definitions."""
    schema = load_schema(schema_name)
    return compile_schema({"$ref": f"#/$defs/{definition}"} if definition else schema, schema)


def _allowed(rule: object, value: object, message: str) -> str:
    if rule in ("additionalProperties", "required"):
        return message
    words = {"minimum": "at least", "maximum": "at most", "type": "type", "const": "only", "enum": "one of"}
    return f"allowed is {words.get(str(rule), rule)} {brief(json.dumps(value))}"
