"""Workloads by name: their folders, the declaration in ``default.yaml``, and the checked config of a launch."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, field, structs

from pytest_aorta.common.documents import UnreadableFile, parse_json
from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.model import Model, convert
from pytest_aorta.common.strict_yaml import read_yaml
from pytest_aorta.common.text import brief, did_you_mean
from pytest_aorta.plan.workload.adapter import Adapter, AdapterBlock, AdapterError
from pytest_aorta.plan.workload.command import Command, check_command, refuse_unknown_names, texts_of
from pytest_aorta.plan.workload.environment import ENVIRONMENT_KEY, ENVIRONMENT_SCHEMA, check_environment
from pytest_aorta.plan.workload.logs import make_adapter
from pytest_aorta.plan.workload.schema_errors import refuse_unknown_keywords, refuse_violation, refuse_wrong_fragment

ENTRY_POINT_GROUP = "aorta.workloads"
YAML_NAME = "default.yaml"
# Keys that the schema of a config key needs besides the keywords of JSON Schema.
_FRAGMENT_KEYS = {"type", "default", "description"}


class Declaration(Model, frozen=True):
    """The content of a workload's ``default.yaml``.

    Attributes:
        description: One sentence for lists of workloads.
        class_name: Class of the workload; empty if the workload is a command.
        command: Script or module and its arguments; None if the workload is a class.
        adapter: Adapter for the log of the command; None if the command records its steps itself.
        launch_mode: ``torchrun``.
        min_world_size: Smallest number of ranks.
        preload: Modules of torch that a fork server imports before it forks ranks of this workload.
        properties: Config key -> JSON Schema fragment with type, default and description.
        presets: Config key -> its value -> defaults of other keys.
    """

    description: Annotated[str, Meta(min_length=1)]
    class_name: Annotated[str, Meta(pattern=r"^([A-Za-z_]\w*)?$")] = field(default="", name="class")
    command: Command | None = None
    adapter: AdapterBlock | None = None
    launch_mode: Annotated[str, Meta(pattern="^torchrun$")] = "torchrun"
    min_world_size: Annotated[int, Meta(ge=1)] = 1
    # A fork server outlives a launch, so it imports nothing that the user may edit.
    preload: tuple[Annotated[str, Meta(pattern=r"^torch(\.[A-Za-z_]\w*)+$")], ...] = ()
    properties: dict[Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]*$")], dict[str, Any]] = field(
        default_factory=dict, name="config"
    )
    presets: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse contradictions between keys."""
        if bool(self.class_name) == (self.command is not None):
            raise ValueError("give one of the keys 'class' and 'command', not both")
        if self.adapter is not None and self.command is None:
            raise ValueError("adapter belongs to a command; a class returns its result itself")


class WorkloadSpec(Declaration, frozen=True, kw_only=True):
    """A workload: its declaration and its location. ``properties`` include ``environment``, which every workload has.

    Attributes:
        name: Name of the workload.
        folder: Folder of the code and of ``default.yaml``.
        module: Dotted name of an installed workload; None if the code is loaded from ``folder`` by path.
    """

    name: str
    folder: Path
    module: str | None = None

    @property
    def yaml(self) -> Path:
        """The file of the declaration."""
        return self.folder / YAML_NAME


@dataclass(frozen=True)
class Place:
    """The location of a workload.

    Attributes:
        folder: Folder of the workload; None if its entry point does not name a package.
        module: Dotted name of an installed workload; None for a folder of the user.
    """

    folder: Path | None
    module: str | None


def find_workload(name: str, own_dirs: Sequence[Path]) -> WorkloadSpec:
    """Find a workload among the user's own folders and the entry points of installed packages.

    Raises:
        SpecError: No workload has that name, several workloads have it, or its yaml is wrong.
    """
    places = workload_places(own_dirs)
    if name not in places:
        raise SpecError(f"no workload named {name!r}{did_you_mean([name], places)}; there are {sorted(places)}")
    found = places[name]
    if len(found) > 1:
        where = " and ".join(str(place.folder or place.module) for place in found)
        raise SpecError(f"workload {name!r} is defined twice, in {where}; rename one of them")
    place = found[0]
    if place.folder is None:
        raise SpecError(f"entry point {ENTRY_POINT_GROUP}: {name} = {place.module!r} is not a package with a folder")
    spec = read_workload(name, place.folder, place.module)
    # Not for an A/B reference: an older commit may have keywords that were accepted then.
    for key, fragment in spec.properties.items():
        refuse_unknown_keywords(f"{spec.yaml}: config.{key}", fragment)
    return spec


def workload_places(own_dirs: Sequence[Path]) -> dict[str, list[Place]]:
    """Return the places of each workload, by name; several places if workloads have the same name."""
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
        SpecError: A key is unknown or missing, or its value is not allowed.
    """
    yaml = folder / YAML_NAME
    try:
        declared = convert(read_yaml(yaml), Declaration, str(yaml))
    except UnreadableFile as error:
        raise SpecError(str(error)) from None
    if ENVIRONMENT_KEY in declared.properties:
        raise SpecError(f"{yaml}: config key {ENVIRONMENT_KEY!r} exists for every workload and can't be declared")
    values = structs.asdict(declared) | {"properties": declared.properties | {ENVIRONMENT_KEY: ENVIRONMENT_SCHEMA}}
    spec = WorkloadSpec(**values, name=name, folder=folder, module=module)
    if spec.command is not None:
        check_command(spec.command, spec.yaml, spec.properties)
    if spec.adapter is not None:
        # Braces in a pattern are repetition counts, not names.
        texts = texts_of({**structs.asdict(spec.adapter), "pattern": ""})
        refuse_unknown_names(f"{yaml}: adapter", texts, {*spec.properties, "rank"})
    _check_defaults(spec)
    filled_adapter(spec, default_config(spec, {}), Path("run_dir"), 0)
    return spec


def resolve_config(spec: WorkloadSpec, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the full config: defaults of the yaml, overridden by presets, then by the values in ``given``.

    Raises:
        SpecError: A key is unknown, or a value is not allowed.
    """
    if unknown := sorted(set(given) - set(spec.properties)):
        hint = did_you_mean(unknown, spec.properties)
        raise SpecError(
            f"{spec.yaml}: workload {spec.name!r} has no config keys {unknown}{hint}; "
            f"there are {sorted(spec.properties)}"
        )
    config = _plain(spec, {**default_config(spec, given), **given})
    _check_values(spec, config)
    check_environment(f"{spec.yaml}: config of workload {spec.name!r}", config[ENVIRONMENT_KEY])
    return config


def default_config(spec: WorkloadSpec, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default of every key, under the presets that ``given`` selects."""
    config = {key: schema["default"] for key, schema in spec.properties.items()}
    for key, by_value in spec.presets.items():
        config |= by_value.get(str(given.get(key, config[key])), {})
    return config


def filled_adapter(spec: WorkloadSpec, config: Mapping[str, Any], run_dir: Path, rank: int) -> Adapter | None:
    """Return the adapter for the log of one rank; None if the workload has no adapter.

    Raises:
        SpecError: The adapter is contradictory under this config.
    """
    if spec.adapter is None:
        return None
    try:
        return make_adapter(spec.adapter, {**config, "run_dir": str(run_dir), "folder": str(spec.folder), "rank": rank})
    except AdapterError as error:
        raise SpecError(f"{spec.yaml}: adapter: {error}") from None


def _check_defaults(spec: WorkloadSpec) -> None:
    for key, schema in spec.properties.items():
        if absent := sorted(_FRAGMENT_KEYS - schema.keys()):
            raise SpecError(f"{spec.yaml}: config.{key}: keys {absent} are required")
        refuse_wrong_fragment(f"{spec.yaml}: config.{key}", schema)
    for key, by_value in spec.presets.items():
        overridden = {name for values in by_value.values() for name in values} | {key}
        if unknown := sorted(map(str, overridden - set(spec.properties))):
            hint = did_you_mean(unknown, spec.properties)
            raise SpecError(
                f"{spec.yaml}: presets name config keys {unknown}{hint}; there are {sorted(spec.properties)}"
            )
        for value, values in by_value.items():
            _check_values(spec, _plain(spec, values), f"preset {key}={value} ")
    _check_values(spec, _plain(spec, {key: schema["default"] for key, schema in spec.properties.items()}))


def _check_values(spec: WorkloadSpec, config: dict[str, Any], which: str = "") -> None:
    schema = {"type": "object", "properties": spec.properties}
    refuse_violation(f"{spec.yaml}: {which}config of workload {spec.name!r}", config, schema)


def _plain(spec: WorkloadSpec, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config as plain JSON values, as ranks read it from the plan and as baselines contain it."""
    plain = {}
    for key, value in config.items():
        try:
            plain[key] = parse_json(json.dumps(value, allow_nan=False), key)
        except (TypeError, ValueError, RecursionError, UnreadableFile) as error:
            raise SpecError(
                f"{spec.yaml}: config of workload {spec.name!r}: {key}: got {brief(repr(value))}, "
                f"allowed is plain JSON: {error}"
            ) from None
    return plain


def package_folder(dotted: str) -> Path | None:
    """Return the folder of a package, or None, without running the package's code, which may import torch."""
    if not re.fullmatch(r"\w+(\.\w+)*", dotted):
        return None
    path: Sequence[str] | None = None
    name = ""
    for part in dotted.split("."):
        name = f"{name}.{part}" if name else part
        try:
            found = (finder.find_spec(name, path) for finder in sys.meta_path)
            spec = next((spec for spec in found if spec is not None), None)
        except KeyError:  # a folder without __init__.py needs its parent, which is not imported
            return None
        if spec is None or spec.submodule_search_locations is None:
            return None
        path = list(spec.submodule_search_locations)
    return Path(path[0]) if path else None
