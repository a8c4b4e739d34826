"""A JSON Schema compiled to functions, for documents with many numbers.

It only ever accepts: a document that it accepts fits the schema, and any other is for jsonschema to judge. So a
keyword that is not known here costs time, and can't let anything through.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

Accept: TypeAlias = Callable[[Any], bool]
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    # 1.0 is an integer too, to the specification; that is left to jsonschema.
    "integer": (int,),
    "number": (int, float),
}
_NOTES = {"$schema", "$id", "$defs", "title", "description", "default"}


def compile_schema(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Accept:
    """A function that accepts only what fits ``schema``, whose references are looked up in ``root``."""
    checks = [check for check in _checks(schema, root) if check is not None]
    if set(schema) - _NOTES - _KNOWN:
        return _refuse
    if (numbers := _numbers(schema)) is not None:
        return numbers
    return lambda value: all(check(value) for check in checks)


def _checks(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[Accept | None]:
    return [
        _type(schema["type"]) if "type" in schema else None,
        _one_of([schema["const"]]) if "const" in schema else None,
        _one_of(schema["enum"]) if "enum" in schema else None,
        _reference(schema["$ref"], root) if "$ref" in schema else None,
        _number(schema) if _OF_NUMBERS & set(schema) else None,
        _text(schema) if {"pattern", "minLength"} & set(schema) else None,
        _array(schema, root) if {"items", "minItems", "maxItems", "uniqueItems"} & set(schema) else None,
        _object(schema, root) if _OF_OBJECTS & set(schema) else None,
    ]


_OF_OBJECTS = {"properties", "required", "additionalProperties", "propertyNames"}
_OF_NUMBERS = {"minimum", "exclusiveMinimum", "maximum"}
_KNOWN = _OF_OBJECTS | _OF_NUMBERS | {
    "type", "const", "enum", "$ref", "pattern", "minLength", "items", "minItems", "maxItems", "uniqueItems",
}  # fmt: skip


def _refuse(_value: Any) -> bool:
    return False


def _type(names: str | list[str]) -> Accept:
    # By the type itself: True is an int to Python.
    allowed = {kind for name in ([names] if isinstance(names, str) else names) for kind in _TYPES[name]}
    return lambda value: type(value) in allowed


def _one_of(allowed: Collection[Any]) -> Accept:
    pairs = {(type(value), value) for value in allowed if not isinstance(value, list | dict | float)}
    return lambda value: not isinstance(value, list | dict) and (type(value), value) in pairs


def _reference(pointer: str, root: Mapping[str, Any]) -> Accept:
    @functools.cache
    def target() -> Accept:
        found: Any = root
        for part in pointer.removeprefix("#/").split("/"):
            found = found[part]
        return compile_schema(found, root)

    # Looked up when first needed: a definition may refer to itself.
    return lambda value: target()(value)


def _number(schema: Mapping[str, Any]) -> Accept:
    least, above, most = (schema.get(key) for key in ("minimum", "exclusiveMinimum", "maximum"))

    def accept(value: Any) -> bool:
        if type(value) not in (int, float):
            return True
        is_low = (least is not None and not value >= least) or (above is not None and not value > above)
        return not is_low and (most is None or value <= most)

    return accept


def _text(schema: Mapping[str, Any]) -> Accept:
    search, least = re.compile(schema.get("pattern", "")).search, schema.get("minLength", 0)
    return lambda value: type(value) is not str or (len(value) >= least and search(value) is not None)


def _array(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Accept:
    item = compile_schema(schema.get("items", {}), root)
    least, most = schema.get("minItems", 0), schema.get("maxItems", math.inf)
    is_set = schema.get("uniqueItems", False)

    def accept(value: Any) -> bool:
        if type(value) is not list:
            return True
        if not least <= len(value) <= most:
            return False
        # Of strings alone, equality is Python's.
        if is_set and not (set(map(type, value)) <= {str} and len(set(value)) == len(value)):
            return False
        return all(map(item, value))

    return accept


def _numbers(schema: Mapping[str, Any]) -> Accept | None:
    """For an array of plain numbers, which are looked at all at once; None for any other schema."""
    items = schema.get("items", {})
    is_plain = set(schema) - _NOTES <= {"type", "items", "minItems", "maxItems"} and set(items) - _NOTES <= {
        "type",
        "minimum",
    }
    if not is_plain or schema.get("type") != "array" or items.get("type") not in ("integer", "number"):
        return None
    allowed, least, count = set(_TYPES[items["type"]]), items.get("minimum"), schema.get("minItems", 0)
    most = schema.get("maxItems", math.inf)

    def accept(value: Any) -> bool:
        if type(value) is not list or not count <= len(value) <= most or not set(map(type, value)) <= allowed:
            return False
        # Where a number is none (NaN), the comparison fails or the smallest of the others is found.
        return least is None or not value or min(value) >= least

    return accept


def _object(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Accept:
    known = {name: compile_schema(part, root) for name, part in schema.get("properties", {}).items()}
    required = schema.get("required", ())
    name_check = compile_schema(schema.get("propertyNames", {}), root)
    others = schema.get("additionalProperties", True)
    other_check = _refuse if others is False else compile_schema({} if others is True else others, root)

    def accept(value: Any) -> bool:
        if type(value) is not dict:
            return True
        return (
            all(name in value for name in required)
            and all(map(name_check, value))
            and all(known.get(name, other_check)(part) for name, part in value.items())
        )

    return accept
