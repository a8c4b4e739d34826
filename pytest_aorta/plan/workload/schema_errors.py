"""Refusals of a workload's yaml and of config values: the place, the given value and what is allowed there."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.schema import allowed
from pytest_aorta.common.text import brief, did_you_mean

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator, ValidationError

# Keywords that validate nothing, and that a list of allowed keywords should name.
_ANNOTATIONS = {"default", "description", "examples", "title"}


def refuse_violation(where: str, document: Any, schema: Mapping[str, Any]) -> None:
    """Check a document against a schema.

    Raises:
        SpecError: The document violates the schema; ``where`` begins the message.
    """
    from jsonschema import Draft202012Validator  # takes 0.1 s to import, which collection does not need

    _refuse_first(where, Draft202012Validator(schema), document, "top level")


def refuse_wrong_fragment(where: str, fragment: Mapping[str, Any]) -> None:
    """Check that every keyword of a JSON Schema has an allowed value.

    Raises:
        SpecError: A value is not allowed; ``where`` begins the message.
    """
    _refuse_first(f"{where} is not a JSON Schema", _meta_validators()[0], fragment)


def refuse_unknown_keywords(where: str, fragment: Mapping[str, Any]) -> None:
    """Check the keywords of a JSON Schema; validators ignore unknown ones, so a misspelled limit would be lost.

    Raises:
        SpecError: A keyword is unknown; ``where`` begins the message.
    """
    standard, strict = _meta_validators()
    # An unknown keyword in a subschema is an error of the schemas around it, too.
    error = max(strict.iter_errors(fragment), key=lambda found: len(found.absolute_path), default=None)
    if error is None:
        return
    given = cast("dict[Any, Any]", error.instance)
    found = {str(name): value for name, value in given.items() if not strict.is_valid({name: value})}
    unknown, known = sorted(found), sorted({name for name in standard.VALIDATORS if name[0] != "$"} | _ANNOTATIONS)
    cut = "; a text with a comma needs quotes" if None in found.values() else ""
    path = ".".join([where, *map(str, error.absolute_path)])
    raise SpecError(f"{path}: unknown keywords {unknown}{did_you_mean(unknown, known)}{cut}; there are {known}")


@functools.cache
def _meta_validators() -> tuple[Draft202012Validator, Draft202012Validator]:
    """Return the validator of JSON Schemas, and one that refuses unknown keywords in every subschema as well."""
    from jsonschema import Draft202012Validator

    standard = Draft202012Validator.META_SCHEMA
    # The parts of the standard's schema refer to "#meta" for subschemas; the strict schema takes that name over.
    strict = {"$id": "urn:aorta:fragment", "$schema": standard["$id"], "$dynamicAnchor": "meta"}
    strict |= {"$ref": standard["$id"], "unevaluatedProperties": False}
    formats = Draft202012Validator.FORMAT_CHECKER
    return Draft202012Validator(standard, format_checker=formats), Draft202012Validator(strict)


def _refuse_first(where: str, validator: Draft202012Validator, document: Any, root: str = "") -> None:
    from jsonschema.exceptions import best_match

    error = best_match(validator.iter_errors(document))
    if error is not None:
        error = _innermost(error)
        path = ".".join(map(str, error.absolute_path)) or root
        raise SpecError(f"{where}: {path}: {_problem(error)}")


def _innermost(error: ValidationError) -> ValidationError:
    """Return the error of the alternative that fits best, which is the deepest; other types fit worst."""
    while error.context:
        error = max(error.context, key=lambda found: (len(found.absolute_path), found.validator != "type"))
    return error


def _problem(error: ValidationError) -> str:
    rule, value = error.validator, cast(Any, error.validator_value)
    if rule == "additionalProperties" and value is False:
        known = sorted(cast(Any, error.schema)["properties"])
        unknown = sorted(map(str, set(cast(Any, error.instance)) - set(known)))
        return f"unknown keys {unknown}{did_you_mean(unknown, known)}; there are {known}"
    hint = did_you_mean([error.instance], map(str, value)) if rule == "enum" else ""
    return f"got {brief(repr(error.instance))}, {allowed(rule, value)}{hint}"
