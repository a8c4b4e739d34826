"""Validation of JSON documents against the package's JSON Schemas, with error messages a person can act on."""

from __future__ import annotations

import functools
import json
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from pytest_aorta.common.text import brief

if TYPE_CHECKING:
    from jsonschema_rs import Draft202012Validator


@functools.cache
def load_schema(name: str) -> dict[str, Any]:
    """Return one of the package's schemas by file name."""
    text = files("pytest_aorta.common.schemas").joinpath(name).read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def violation(document: Any, schema_name: str, definition: str | None = None) -> str | None:
    """Return the most relevant violation as "JSON path: got ..., allowed is ...", or None for a valid document.

    jsonschema-rs decides, since it validates a rank file in a hundredth of the time that jsonschema takes; jsonschema
    is imported only to word an error. The exception is a document with a lone surrogate in a string: jsonschema-rs
    can't represent the document, so jsonschema decides.

    Args:
        document: A parsed JSON document.
        schema_name: File name of a schema in ``pytest_aorta.common.schemas``.
        definition: Name of one of the schema's ``$defs``; None for the whole schema.
    """
    fast = fast_validator(schema_name, definition)
    refusal = None
    try:
        if fast.is_valid(document):
            return None
        refusal = next(fast.iter_errors(document)).message
    except ValueError:  # the document can't be represented
        pass
    return _worded_violation(document, schema_name, definition) or (refusal and f"$: {refusal}")


@functools.cache
def fast_validator(schema_name: str, definition: str | None = None) -> Draft202012Validator:
    """Return jsonschema-rs's validator of a schema, or of one of the schema's definitions."""
    from jsonschema_rs import Draft202012Validator, Registry  # takes 25 ms, which test collection doesn't need

    schema = load_schema(schema_name)
    if definition is None:
        return Draft202012Validator(schema)
    # The definition refers to other parts of its file, so the registry needs the whole file.
    registry = Registry([(schema["$id"], schema)])
    return Draft202012Validator({"$ref": f"{schema['$id']}#/$defs/{definition}"}, registry=registry)


def _worded_violation(document: Any, schema_name: str, definition: str | None) -> str | None:
    from jsonschema import Draft202012Validator  # takes 100 ms, and a valid document doesn't need it
    from jsonschema.exceptions import best_match

    whole = Draft202012Validator(load_schema(schema_name))
    # An evolved validator still resolves "$ref" in the whole file.
    part = whole.evolve(schema={"$ref": f"#/$defs/{definition}"}) if definition else whole
    error = best_match(part.iter_errors(document))
    if error is None:
        return None
    if error.validator in ("additionalProperties", "required"):
        return f"{error.json_path}: {error.message}"
    found = f"got {brief(json.dumps(error.instance))}"
    return f"{error.json_path}: {found}, {allowed(error.validator, error.validator_value)}"


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
