"""The config and the tolerances of ``aorta run``."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_aorta.common.documents import UnreadableFile
from pytest_aorta.common.errors import SpecError, UsageError
from pytest_aorta.common.strict_yaml import parse_yaml, read_yaml
from pytest_aorta.common.text import brief
from pytest_aorta.plan.workloads import WorkloadSpec, resolve_config


def given_config(
    spec: WorkloadSpec, file: Path | None, steps: int | None, assignments: Sequence[str]
) -> dict[str, Any]:
    """Return the given values without defaults, after a check of the whole config.

    Raises:
        UsageError: The file is not a mapping, or an assignment is not KEY=VALUE.
        SpecError: A key is unknown, or a value is not allowed.
    """
    given = _read_file(file) if file else {}
    if steps is not None:
        given["steps"] = steps
    # A dotted key changes a part of the default.
    for assignment in assignments:
        key, value = _parse(assignment)
        path = key.split(".")
        _assign(spec, given, path, _typed(_schema(spec, path), value, assignment.partition("=")[2]))
    resolve_config(spec, given)
    return given


def tolerance_texts(given: Sequence[str]) -> dict[str, str]:
    """Return metric -> text from values of ``--tolerance``.

    Raises:
        UsageError: A value is not METRIC=VALUE.
    """
    pairs = [text.partition("=") for text in given]
    if wrong := [text for text, (key, equals, _) in zip(given, pairs, strict=True) if not (key and equals)]:
        raise UsageError(f"--tolerance: got {wrong[0]!r}, allowed is METRIC=VALUE, e.g. step_time_p50=5%")
    return {key: value for key, _, value in pairs}


def _read_file(file: Path) -> dict[str, Any]:
    try:
        document = read_yaml(file)
    except UnreadableFile as error:
        raise UsageError(f"--config: {error}") from None
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise UsageError(f"--config: {file}: got {type(document).__name__}, allowed is a mapping of config keys")
    return document


def _parse(assignment: str) -> tuple[str, Any]:
    key, equals, text = assignment.partition("=")
    if not equals or not key or not all(key.split(".")):
        raise UsageError(f"--set: got {assignment!r}, allowed is KEY=VALUE, with dots into objects (fault.kind=zero)")
    try:
        return key, parse_yaml(text, brief(repr(text)))
    except UnreadableFile as error:
        problem = " ".join(str(error).split())
        raise UsageError(f"--set: {key}: {problem}") from None


def _assign(spec: WorkloadSpec, given: dict[str, Any], path: list[str], value: Any) -> None:
    name = path[0]
    if name in spec.properties and name not in given:
        given[name] = copy.deepcopy(spec.properties[name]["default"])
    if len(path) == 1:
        given[name] = value
        return
    parent: Any = given.get(name) if name in spec.properties else None
    for number, part in enumerate(path[1:], 1):
        if not isinstance(parent, dict):
            # This reports an unknown first key in the same way as any other unknown key.
            resolve_config(spec, {name: given.get(name)})
            where = ".".join(path[:number])
            raise SpecError(f"--set: {'.'.join(path)}: {where} is {parent!r}, and only objects have keys")
        if number == len(path) - 1:
            parent[part] = value
        else:
            parent = parent.setdefault(part, {})


def _schema(spec: WorkloadSpec, path: Sequence[str]) -> Mapping[str, Any]:
    """Return the schema of a key, or of a part of it; empty without a declaration."""
    schema: Any = spec.properties.get(path[0], {})
    for part in path[1:]:
        schema = schema.get("properties", {}).get(part) or schema.get("additionalProperties", {})
        if not isinstance(schema, Mapping):
            return {}
    return dict(schema)


def _typed(schema: Mapping[str, Any], value: Any, text: str) -> Any:
    """Correct a type that YAML 1.1 misreads: it reads the 0 of HSA_ENABLE_SDMA=0 as a number, and 1e-3 as text."""
    types = schema.get("type", ())
    types = {types} if isinstance(types, str) else set(types)
    if types == {"string"} and isinstance(value, bool | int | float):
        return text
    if isinstance(value, str) and "number" in types and "string" not in types:
        try:
            return float(value)
        except ValueError:
            return value
    return value
