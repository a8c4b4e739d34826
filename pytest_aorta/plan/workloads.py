"""Workloads by name: the declaration in default.yaml, and the checked config of a launch."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, field, structs

from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.files import UnreadableFile, parse_json, raised_as
from pytest_aorta.common.model import Model, convert
from pytest_aorta.common.strict_yaml import read_yaml
from pytest_aorta.common.text import brief, did_you_mean

# Config key that every workload has: variables of the ranks, name -> value, set before they start.
ENVIRONMENT_KEY = "environment"
ENVIRONMENT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "additionalProperties": {"type": "string"},
    "default": {},
    "description": "environment variables of the ranks",
}
ALLOWED_PREFIXES = (
    "CUBLAS_",
    "CUDNN_",
    "GLOO_",
    "HSA_",
    "MIOPEN_",
    "NCCL_",
    "OMP_",
    "RCCL_",
    "TORCHINDUCTOR_",
    "TORCH_NCCL_",
)
ALLOWED = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "GPU_MAX_HW_QUEUES",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
)
# Variables that the launcher sets: they switch on the flight recorder and name its files.
_LAUNCHERS_OWN = ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT")

# One code path of ATen, MKL and oneDNN on every x86-64 CPU with AVX2. By default these libraries choose kernels by CPU
# model, and results depend on the choice. COMPATIBLE is MKL's only mode that is the same on CPUs of several vendors.
CPU_KERNELS = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "AVX2"}
ENTRY_POINT_GROUP = "aorta.workloads"
# The distribution whose workloads need no qualified name.
_DISTRIBUTION = "pytest-aorta"
YAML_NAME = "default.yaml"
# Keys that the schema of a config key needs besides the keywords of JSON Schema.
_FRAGMENT_KEYS = {"type", "default", "description"}


def pinned_cpu_kernels(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Return the variables that pin the kernels of CPU ranks; none on a CPU without AVX2, where ATen would crash."""
    return dict(CPU_KERNELS) if "avx2" in cpu_field("flags", cpuinfo).split() else {}


def cpu_field(name: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the field ``name``, such as ``vendor_id``, of this host's first CPU in ``cpuinfo``; "" if unknown."""
    with suppress(OSError), cpuinfo.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return ""


def is_allowed(name: str) -> bool:
    """Return whether a config may set the variable; the launcher's own variables are not allowed."""
    return name not in _LAUNCHERS_OWN and (name in ALLOWED or name.startswith(ALLOWED_PREFIXES))


def check_environment(where: str, environment: Any) -> None:
    """Check the value of the config key ``environment``; ``where`` starts the message.

    Raises:
        SpecError: A variable is not allowed in a config, or its value is not text.
    """
    texts = [*environment.keys(), *environment.values()] if isinstance(environment, Mapping) else [environment]
    # Lone surrogates and NUL, which no process can be given, are not printable.
    if not all(isinstance(text, str) and text.isprintable() for text in texts):
        got = f"got {brief(ascii(environment))}"
        raise SpecError(f"{where}: {ENVIRONMENT_KEY}: {got}, allowed is a mapping from names to printable texts")
    if wrong := sorted(name for name in environment if not is_allowed(name)):
        patterns = sorted([*(f"{prefix}*" for prefix in ALLOWED_PREFIXES), *ALLOWED])
        raise SpecError(
            f"{where}: {ENVIRONMENT_KEY}: got {wrong}, allowed is {patterns} without {list(_LAUNCHERS_OWN)}, which "
            f"the launcher sets"
        )


def case_suffix(environment: Mapping[str, str]) -> str:
    """Return the suffix of a case's name; empty if the config sets no variables."""
    pairs = ",".join(f"{name}={value}" for name, value in sorted(environment.items()))
    return f"[{pairs}]" if pairs else ""


class SharedKeys(Model, frozen=True):
    """The content of a file that several workloads extend; attributes as in :class:`Declaration`."""

    properties: dict[Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]*$")], dict[str, Any]] = field(
        default_factory=dict, name="config"
    )
    presets: dict[str, dict[str, dict[str, Any]]] = {}


class Declaration(SharedKeys, frozen=True, kw_only=True):
    """The content of a workload's ``default.yaml``.

    Attributes:
        description: One sentence for lists of workloads.
        class_name: Class of the workload.
        min_world_size: Smallest number of ranks.
        preload: Modules of torch that a fork server imports before it forks ranks of this workload.
        extends: File beside the workload's folder, whose config keys and presets the workload has too; empty for none.
        properties: Config key -> JSON Schema fragment with type, default and description.
        presets: Config key -> its value -> defaults of other keys.
    """

    description: Annotated[str, Meta(min_length=1)]
    class_name: Annotated[str, Meta(pattern=r"^[A-Za-z_]\w*$")] = field(name="class")
    min_world_size: Annotated[int, Meta(ge=1)] = 1
    # A fork server outlives a launch, so it imports nothing that the user may edit.
    preload: tuple[Annotated[str, Meta(pattern=r"^torch(\.[A-Za-z_]\w*)+$")], ...] = ()
    extends: Annotated[str, Meta(pattern=r"^([A-Za-z0-9_]+\.yaml)?$")] = ""


class WorkloadSpec(Declaration, frozen=True, kw_only=True):
    """A workload: its declaration and its location. ``properties`` include ``environment``, which every workload has.

    Attributes:
        name: Name of the workload.
        folder: Folder of the code and of ``default.yaml``.
        module: Dotted name of an installed workload, or ``module:Class`` for a class with AORTA's contract; None if the
            code is loaded from ``folder`` by path.
        shared: Config keys and presets of the file that the workload extends, which the workload's own replace.
    """

    name: str
    folder: Path
    module: str | None = None
    shared: SharedKeys = SharedKeys()

    @property
    def yaml(self) -> Path:
        """The file of the declaration."""
        return self.folder / YAML_NAME

    @property
    def is_of_aorta(self) -> bool:
        """True if the class has AORTA's contract: no file declares its config keys, and any key is passed on."""
        return self.module is not None and ":" in self.module

    def declared_in(self, key: str) -> Path:
        """Return the file that declares a config key."""
        is_shared = self.properties[key] is self.shared.properties.get(key)
        return self.folder.parent / self.extends if is_shared else self.yaml

    def default_config(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the default of every key, under the presets that ``given`` selects."""
        config = {key: schema["default"] for key, schema in self.properties.items()}
        for key, by_value in self.presets.items():
            config |= by_value.get(str(given.get(key, config[key])), {})
        return config


@dataclass(frozen=True)
class WorkloadPlace:
    """The location of a workload.

    Attributes:
        folder: Folder of the workload; None if its entry point names neither a package nor a class.
        module: Value of the entry point of an installed workload; None for a folder of the user.
        qualified: Name of an installed workload with its distribution, such as ``aorta:fsdp``; empty for a folder of
            the user and for the workloads of this package.
    """

    folder: Path | None
    module: str | None
    qualified: str = ""


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
        remedy = " or ".join(place.qualified for place in found if place.qualified)
        raise SpecError(
            f"workload {name!r} is defined twice, in {where}; "
            + (f"name one of them as {remedy}" if remedy else "rename the folder of your own")
        )
    place = found[0]
    if place.folder is None:
        raise SpecError(
            f"entry point {ENTRY_POINT_GROUP}: {name} = {place.module!r} is not a package with a folder, nor a class "
            f"(module:Class)"
        )
    return read_workload(name, place.folder, place.module)


def workload_places(own_dirs: Sequence[Path]) -> dict[str, list[WorkloadPlace]]:
    """Return the places of each workload, by name; several places if workloads have the same name.

    A workload of another distribution has its qualified name, and the plain one too unless a workload of this package
    or of the user has that.
    """
    own: dict[str, list[WorkloadPlace]] = {}
    others: dict[str, list[WorkloadPlace]] = {}
    qualified: dict[str, list[WorkloadPlace]] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        place = _place(point)
        if place.qualified:
            qualified[place.qualified] = [place]
        (others if place.qualified else own).setdefault(point.name, []).append(place)
    found = (place for places in (*own.values(), *others.values()) for place in places)
    known = {place.folder.resolve() for place in found if place.folder}
    for folder in own_dirs:
        for yaml in sorted(folder.glob(f"*/{YAML_NAME}")):
            if yaml.parent.resolve() not in known:
                own.setdefault(yaml.parent.name, []).append(WorkloadPlace(yaml.parent, None))
    return qualified | others | own


def _place(point: EntryPoint) -> WorkloadPlace:
    """Return the place that an entry point names, without running the package's code."""
    # The syntax allows spaces, and the name of an extra, which decides nothing.
    value = re.sub(r"\s|\[.*", "", point.value)
    module, colon, name = value.partition(":")
    folder = package_folder(module)
    if colon:
        folder = (folder or _module_folder(module)) if name.isidentifier() else None
    distribution = point.dist.name if point.dist else ""
    return WorkloadPlace(folder, value, "" if distribution == _DISTRIBUTION else f"{distribution}:{point.name}")


def read_workload(name: str, folder: Path, module: str | None) -> WorkloadSpec:
    """Read and check a workload's ``default.yaml``; a class with AORTA's contract has none.

    Raises:
        SpecError: A key is unknown or missing, or its value is not allowed.
    """
    if module is not None and ":" in module:
        return WorkloadSpec(
            description=f"class of AORTA's contract, {module}",
            class_name=module.partition(":")[2],
            properties={ENVIRONMENT_KEY: ENVIRONMENT_SCHEMA},
            name=name,
            folder=folder,
            module=module,
        )
    yaml, shared = folder / YAML_NAME, SharedKeys()
    with raised_as(SpecError):
        declared = convert(read_yaml(yaml), Declaration, str(yaml))
        if declared.extends:
            extended = folder.parent / declared.extends
            shared = convert(read_yaml(extended), SharedKeys, str(extended))
    properties = shared.properties | declared.properties
    if ENVIRONMENT_KEY in properties:
        raise SpecError(f"{yaml}: config key {ENVIRONMENT_KEY!r} exists for every workload and can't be declared")
    values = structs.asdict(declared) | {
        "properties": properties | {ENVIRONMENT_KEY: ENVIRONMENT_SCHEMA},
        "presets": shared.presets | declared.presets,
    }
    spec = WorkloadSpec(**values, name=name, folder=folder, module=module, shared=shared)
    _check_defaults(spec)
    return spec


def resolve_config(spec: WorkloadSpec, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the full config: defaults of the yaml, overridden by presets, then by the values in ``given``.

    Raises:
        SpecError: A key is unknown, or a value is not allowed.
    """
    unknown = sorted(set(given) - set(spec.properties))
    if unknown and not spec.is_of_aorta:
        hint = did_you_mean(unknown, spec.properties)
        raise SpecError(
            f"{spec.yaml}: workload {spec.name!r} has no config keys {unknown}{hint}; "
            f"there are {sorted(spec.properties)}"
        )
    config = _checked(spec, {**spec.default_config(given), **given})
    check_environment(f"{spec.yaml}: config of workload {spec.name!r}", config[ENVIRONMENT_KEY])
    return config


def _check_defaults(spec: WorkloadSpec) -> None:
    from jsonschema import Draft202012Validator, SchemaError

    for key, schema in spec.properties.items():
        if absent := sorted(_FRAGMENT_KEYS - schema.keys()):
            raise SpecError(f"{spec.declared_in(key)}: config.{key}: keys {absent} are required")
        try:
            Draft202012Validator.check_schema(schema)
        except SchemaError as error:
            raise SpecError(
                f"{spec.declared_in(key)}: config.{key} is not a JSON Schema: {error.json_path}: {error.message}"
            ) from None
    for key, by_value in spec.presets.items():
        overridden = {name for values in by_value.values() for name in values} | {key}
        if unknown := sorted(map(str, overridden - set(spec.properties))):
            hint = did_you_mean(unknown, spec.properties)
            raise SpecError(f"{spec.yaml}: presets name config keys {unknown}{hint}; known: {sorted(spec.properties)}")
        for value, values in by_value.items():
            _checked(spec, values, f"preset {key}={value} ")
    _checked(spec, {key: schema["default"] for key, schema in spec.properties.items()})


def _checked(spec: WorkloadSpec, config: Mapping[str, Any], which: str = "") -> dict[str, Any]:
    """Return a config as plain JSON values, as ranks read it from the plan and as baselines contain it.

    Raises:
        SpecError: A value is no JSON, or its key's schema does not allow it.
    """
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    where, plain = f"{spec.yaml}: {which}config of workload {spec.name!r}", dict[str, Any]()
    for key, value in config.items():
        try:
            plain[key] = parse_json(json.dumps(value, allow_nan=False), key)
        except (TypeError, ValueError, RecursionError, UnreadableFile) as error:
            raise SpecError(f"{where}: {key}: got {brief(repr(value))}, allowed is plain JSON: {error}") from None
    validator = Draft202012Validator({"type": "object", "properties": spec.properties})
    if (found := best_match(validator.iter_errors(plain))) is not None:
        known = sorted(found.schema["properties"]) if found.validator == "additionalProperties" else []
        place = ".".join(map(str, found.absolute_path)) or "top level"
        raise SpecError(f"{where}: {place}: {brief(found.message, 400)}{f'; there are {known}' if known else ''}")
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


def _module_folder(dotted: str) -> Path | None:
    """Return the folder of a module that is no package, or None, without running any code."""
    parent, _, name = dotted.rpartition(".")
    folder = package_folder(parent)
    places = [str(folder)] if folder else None if parent else sys.path
    spec = None if places is None else PathFinder.find_spec(name, places)
    return Path(spec.origin).parent if spec and spec.origin else None
