"""Workloads by name: where they live, what their yaml declares, and a launch's checked config."""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from pytest_aorta.errors import SpecError
from pytest_aorta.files import UnreadableFile, read_yaml
from pytest_aorta.variables import ENVIRONMENT_KEY, ENVIRONMENT_SCHEMA, check_environment

ENTRY_POINT_GROUP = "aorta.workloads"
YAML_NAME = "default.yaml"
_YAML_KEYS = {"description", "class", "launch_mode", "min_world_size", "config", "presets"}
_REQUIRED_KEYS = ("description", "class", "config")


@dataclass(frozen=True)
class WorkloadSpec:
    """A workload's declaration.

    Attributes:
        folder: where its code and ``default.yaml`` are.
        module: the name to import it by, or None where ``folder`` is loaded by path.
        properties: config key -> JSON Schema fragment with type, default and description; ``environment`` among them,
            which every workload has.
        presets: config key -> its value -> defaults of other keys.
    """

    name: str
    folder: Path
    module: str | None
    class_name: str
    description: str
    launch_mode: str
    min_world_size: int
    properties: dict[str, dict[str, Any]]
    presets: dict[str, dict[str, dict[str, Any]]]

    @property
    def yaml(self) -> Path:
        """The file the declaration was read from."""
        return self.folder / YAML_NAME


@dataclass(frozen=True)
class Place:
    """Where a workload is: a folder, None where an entry point names none; ``module`` where it is installed."""

    folder: Path | None
    module: str | None


def find_workload(name: str, own_dirs: Sequence[Path]) -> WorkloadSpec:
    """Find a workload among the user's own folders and the entry points of installed packages.

    Raises:
        SpecError: there is none of that name, or more than one, or its yaml is wrong.
    """
    places = workload_places(own_dirs)
    if name not in places:
        close = difflib.get_close_matches(name, places, 1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise SpecError(f"no workload named {name!r}{hint}; there are {sorted(places)}")
    found = places[name]
    if len(found) > 1:
        where = " and ".join(str(place.folder or place.module) for place in found)
        raise SpecError(f"workload {name!r} is there twice, in {where}; rename one, so that neither hides the other")
    place = found[0]
    if place.folder is None:
        raise SpecError(f"entry point {ENTRY_POINT_GROUP}: {name} = {place.module!r} is no package with a folder")
    return read_workload(name, place.folder, place.module)


def workload_places(own_dirs: Sequence[Path]) -> dict[str, list[Place]]:
    """Every workload's name -> where it is, more than one place where names clash."""
    places: dict[str, list[Place]] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        places.setdefault(point.name, []).append(Place(package_folder(point.value), point.value))
    known = {place.folder.resolve() for found in places.values() for place in found if place.folder}
    for own in own_dirs:
        for yaml in sorted(own.glob(f"*/{YAML_NAME}")):
            if yaml.parent.resolve() not in known:
                places.setdefault(yaml.parent.name, []).append(Place(yaml.parent, None))
    return places


def read_workload(name: str, folder: Path, module: str | None) -> WorkloadSpec:
    """Read and check a workload's ``default.yaml``.

    Raises:
        SpecError: a key is unknown, absent or has a value that is not allowed.
    """
    yaml = folder / YAML_NAME
    try:
        document = read_yaml(yaml)
    except UnreadableFile as error:
        raise SpecError(str(error)) from None
    if not isinstance(document, dict):
        raise SpecError(f"{yaml}: got {type(document).__name__}, allowed is a mapping with keys {sorted(_YAML_KEYS)}")
    if unknown := sorted(map(str, set(document) - _YAML_KEYS)):
        raise SpecError(f"{yaml}: no such keys {unknown}; there are {sorted(_YAML_KEYS)}")
    if absent := [key for key in _REQUIRED_KEYS if key not in document]:
        raise SpecError(f"{yaml}: keys {absent} are required")
    _check(yaml, document, _YAML_SCHEMA)
    if ENVIRONMENT_KEY in document["config"]:
        raise SpecError(f"{yaml}: config key {ENVIRONMENT_KEY!r} is every workload's and can't be declared")
    spec = WorkloadSpec(
        name=name,
        folder=folder,
        module=module,
        class_name=document["class"],
        description=document["description"],
        launch_mode=document.get("launch_mode", "torchrun"),
        min_world_size=document.get("min_world_size", 1),
        properties=document["config"] | {ENVIRONMENT_KEY: ENVIRONMENT_SCHEMA},
        presets=document.get("presets", {}),
    )
    _check_defaults(spec)
    return spec


def resolve_config(spec: WorkloadSpec, given: Mapping[str, Any]) -> dict[str, Any]:
    """The full config: yaml defaults, then presets, then the test's own values.

    Raises:
        SpecError: a key is unknown or a value is not allowed.
    """
    if unknown := sorted(set(given) - set(spec.properties)):
        close = difflib.get_close_matches(unknown[0], spec.properties, 1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise SpecError(
            f"{spec.yaml}: workload {spec.name!r} has no config keys {unknown}{hint}; "
            f"there are {sorted(spec.properties)}"
        )
    config = _plain(spec, {**default_config(spec, given), **given})
    _check_values(spec, config)
    check_environment(f"{spec.yaml}: config of workload {spec.name!r}", config[ENVIRONMENT_KEY])
    return config


def default_config(spec: WorkloadSpec, given: Mapping[str, Any]) -> dict[str, Any]:
    """Every key's default, under the presets that ``given`` chooses."""
    config = {key: schema["default"] for key, schema in spec.properties.items()}
    for key, by_value in spec.presets.items():
        config |= by_value.get(str(given.get(key, config[key])), {})
    return config


_YAML_SCHEMA: dict[str, Any] = {
    "properties": {
        "description": {"type": "string", "minLength": 1},
        "class": {"type": "string", "pattern": r"^[A-Za-z_]\w*$"},
        "launch_mode": {"enum": ["torchrun"]},
        "min_world_size": {"type": "integer", "minimum": 1},
        "config": {
            "type": "object",
            "propertyNames": {"type": "string", "pattern": r"^[a-z][a-z0-9_]*$"},
            "additionalProperties": {"type": "object", "required": ["type", "default", "description"]},
        },
        "presets": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                # YAML reads `1:` and `on:` as other types, which no config value would be looked up by.
                "propertyNames": {"type": "string"},
                "additionalProperties": {"type": "object"},
            },
        },
    }
}


def _check_defaults(spec: WorkloadSpec) -> None:
    from jsonschema import Draft202012Validator, SchemaError

    for key, schema in spec.properties.items():
        try:
            Draft202012Validator.check_schema(schema)
        except SchemaError as error:
            raise SpecError(f"{spec.yaml}: config.{key} is not a JSON Schema: {error.message}") from None
    for key, by_value in spec.presets.items():
        overridden = {name for values in by_value.values() for name in values} | {key}
        if unknown := sorted(map(str, overridden - set(spec.properties))):
            raise SpecError(f"{spec.yaml}: presets name config keys {unknown}; there are {sorted(spec.properties)}")
        for value, values in by_value.items():
            _check_values(spec, _plain(spec, values), f"preset {key}={value} ")
    _check_values(spec, _plain(spec, {key: schema["default"] for key, schema in spec.properties.items()}))


def _check_values(spec: WorkloadSpec, config: dict[str, Any], which: str = "") -> None:
    schema = {"type": "object", "properties": spec.properties}
    _check(spec.yaml, config, schema, what=f"{which}config of workload {spec.name!r}")


def _plain(spec: WorkloadSpec, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config as ranks will read it from the plan, and as a baseline will hold it."""
    plain = {}
    for key, value in config.items():
        try:
            plain[key] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise SpecError(
                f"{spec.yaml}: config of workload {spec.name!r}: {key}: got {_brief(value)}, "
                f"allowed is plain JSON: {error}"
            ) from None
    return plain


def _check(yaml: Path, document: Any, schema: dict[str, Any], what: str = "workload") -> None:
    from jsonschema import Draft202012Validator  # costs collection 0.1 s otherwise
    from jsonschema.exceptions import best_match

    error = best_match(Draft202012Validator(schema).iter_errors(document))
    if error is not None:
        path = ".".join(map(str, error.absolute_path)) or "top level"
        allowed = f"{error.validator}: {error.validator_value!r}"
        if error.validator == "additionalProperties" and error.validator_value is False:
            allowed = f"keys {sorted(error.schema['properties'])}"
        raise SpecError(f"{yaml}: {what}: {path}: got {_brief(error.instance)}, allowed is {allowed}")


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def package_folder(dotted: str) -> Path | None:
    """The folder of a package, found without running any of its code (it may import torch)."""
    if not re.fullmatch(r"\w+(\.\w+)*", dotted):
        return None
    path: Sequence[str] | None = None
    name = ""
    for part in dotted.split("."):
        name = f"{name}.{part}" if name else part
        try:
            found = (finder.find_spec(name, path) for finder in sys.meta_path)
            spec = next((spec for spec in found if spec is not None), None)
        except KeyError:  # a folder without __init__.py asks for its parent, which is not imported
            return None
        if spec is None or spec.submodule_search_locations is None:
            return None
        path = list(spec.submodule_search_locations)
    return Path(path[0]) if path else None
