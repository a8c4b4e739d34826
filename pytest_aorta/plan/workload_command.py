"""Commands of ranks: a script or module and its arguments, from a yaml and a config; and the variables of ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, field, structs

from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.model import Model
from pytest_aorta.common.text import brief, did_you_mean
from pytest_aorta.plan.device_kind import VISIBLE_VARIABLES

# Names in braces besides config keys: the launch's folder, and the folder of the yaml.
PLACES = ("run_dir", "folder")
_NAME = re.compile(r"\{([a-z][a-z0-9_]*)\}")
# Config key that every workload has: variables of the ranks, name -> value, set before they start.
ENVIRONMENT_KEY = "environment"
ENVIRONMENT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "additionalProperties": {"type": "string"},
    "default": {},
    "description": "environment variables of the ranks",
}
ALLOWED_PREFIXES = (
    "CUBLAS_", "CUDNN_", "GLOO_", "HSA_", "MIOPEN_", "NCCL_", "OMP_", "RCCL_", "TORCHINDUCTOR_", "TORCH_NCCL_",
)  # fmt: skip
ALLOWED = (
    "CUDA_DEVICE_MAX_CONNECTIONS", "GPU_MAX_HW_QUEUES", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
)  # fmt: skip
# Variables in old guides that RCCL does not read -> variables that replace them.
_REPLACED = {
    "RCCL_BUFFER_SIZE": "NCCL_BUFFSIZE",
    "RCCL_ENABLE_SDMA": "HSA_ENABLE_SDMA",
    "RCCL_NUM_CHANNELS": "NCCL_MIN_NCHANNELS and NCCL_MAX_NCHANNELS",
}
# Variables that the launcher sets: they switch on the flight recorder and name its files.
_LAUNCHERS_OWN = ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT")

# One code path of ATen, MKL and oneDNN on every x86-64 CPU with AVX2. By default these libraries choose kernels by CPU
# model, and results depend on the choice. COMPATIBLE is MKL's only mode that is the same on CPUs of several vendors.
CPU_KERNELS = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "AVX2"}
# Variables that the launcher sets for each rank, and variables that load code into every program of the launch.
_REFUSED = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT",
    *VISIBLE_VARIABLES, "NVIDIA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "LD_AUDIT", "LD_PRELOAD",
}  # fmt: skip
_REFUSED_PREFIXES = ("AORTA_", "PET_", "TORCHELASTIC_")


class _WhenTrue(Model, frozen=True):
    """Arguments that are passed where the config key ``when`` is true."""

    when: str
    args: tuple[str, ...]


class Command(Model, frozen=True):
    """The block ``command:`` of a workload's yaml; names of config keys in braces are replaced by their values.

    Attributes:
        script: Path of a script, relative to the yaml's folder; empty if ``module`` is given.
        module: Dotted name of a module; empty if ``script`` is given.
        args: Arguments.
        environment: Variables that are added to the environment.
    """

    script: Annotated[str, Meta(pattern=r"(^|\.py)$")] = ""
    module: Annotated[str, Meta(pattern=r"^([A-Za-z_]\w*(\.[A-Za-z_]\w*)*)?$")] = ""
    args: tuple[str | _WhenTrue, ...] = ()
    environment: dict[Annotated[str, Meta(pattern=r"^[A-Za-z_]\w*$")], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse a command that is both a script and a module, or neither."""
        if bool(self.script) == bool(self.module):
            raise ValueError("give one of the keys 'script' and 'module', not both")


@dataclass(frozen=True)
class CommandLine:
    """The command of a rank.

    Attributes:
        target: Path ending in ``.py``, or dotted module.
        args: Arguments.
        environment: Variables that are added to the environment.
    """

    target: str
    args: tuple[str, ...]
    environment: dict[str, str]


def command_line(command: Command, config: Mapping[str, Any], *, folder: Path, run_dir: Path) -> CommandLine:
    """Return the command with the config's values filled in; a script is relative to the yaml's ``folder``.

    Raises:
        SpecError: An argument or a variable contains a character that can't be passed to a process.
    """
    values = {**config, "run_dir": str(run_dir), "folder": str(folder)}
    texts: list[str] = []
    for entry in command.args:
        if isinstance(entry, str):
            texts.append(entry)
        elif config[entry.when]:
            texts += entry.args
    args = [filled(text, values) for text in texts]
    environment = {name: filled(text, values) for name, text in command.environment.items()}
    for where, text in [
        *(("args", text) for text in args),
        *((f"environment.{name}", environment[name]) for name in environment),
    ]:
        if not _is_passable(text):
            raise SpecError(
                f"{folder / 'default.yaml'}: command.{where}: got {brief(ascii(text))}, allowed is text without NUL "
                f"characters and lone surrogates"
            )
    return CommandLine(str(folder / command.script) if command.script else command.module, tuple(args), environment)


def check_command(command: Command, yaml: Path, properties: Collection[str]) -> None:
    """Check a workload's command against its config keys.

    Raises:
        SpecError: A name can't be filled in, a variable is the launcher's own, or the script does not exist.
    """
    _refuse_variables(f"{yaml}: command.environment", command.environment)
    refuse_unknown_names(f"{yaml}: command", texts_of(structs.asdict(command)), properties)
    for entry in command.args:
        if isinstance(entry, _WhenTrue) and entry.when not in properties:
            hint = did_you_mean([entry.when], properties)
            raise SpecError(
                f"{yaml}: command: when: no config key {entry.when!r}{hint}; there are {sorted(properties)}"
            )
    if command.script and not (yaml.parent / command.script).is_file():
        raise SpecError(f"{yaml}: command: there is no file {yaml.parent / command.script}")


def filled(text: str, values: Mapping[str, Any]) -> str:
    """Replace each ``{name}`` in ``text`` with its value: a string as it is, any other value as JSON."""

    def value_of(match: re.Match[str]) -> str:
        value = values[match[1]]
        return value if isinstance(value, str) else json.dumps(value)

    return _NAME.sub(value_of, text)


def _is_passable(text: str) -> bool:
    """Return whether ``text`` can be passed to a process as an argument or a variable."""
    try:
        return b"\0" not in text.encode("utf-8")
    except UnicodeEncodeError:
        return False


def _refuse_variables(where: str, names: Iterable[str]) -> None:
    """Check that a command sets none of the launcher's variables; ``where`` starts the message.

    Raises:
        SpecError: A variable would show ranks other devices than those leased, or change the launch's own programs.
    """
    if wrong := sorted(name for name in names if name in _REFUSED or name.startswith(_REFUSED_PREFIXES)):
        patterns = sorted([*_REFUSED, *(f"{prefix}*" for prefix in _REFUSED_PREFIXES)])
        raise SpecError(f"{where}: got {wrong}; a command may set any variable except {', '.join(patterns)}")


def refuse_unknown_names(where: str, texts: Iterable[str], properties: Iterable[str]) -> None:
    """Check that every name in braces can be filled in; ``where`` starts the message.

    Raises:
        SpecError: A name is neither a config key nor ``run_dir`` or ``folder``.
    """
    known = {*properties, *PLACES}
    if unknown := sorted({name for text in texts for name in _NAME.findall(text)} - known):
        hint = did_you_mean(unknown, sorted(known))
        raise SpecError(f"{where}: names {unknown} can't be filled in{hint}; there are {sorted(known)}")


def texts_of(value: Any) -> list[str]:
    """Return every string in a value of the yaml."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, _WhenTrue):
        return list(value.args)
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple) else ()
    return [text for item in items for text in texts_of(item)]


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


def check_environment(where: str, environment: object) -> None:
    """Check the value of the config key ``environment``; ``where`` starts the message.

    Raises:
        SpecError: A variable is not allowed in a config, or its value is not text.
    """
    if not isinstance(environment, Mapping):
        raise SpecError(
            f"{where}: {ENVIRONMENT_KEY}: got {brief(ascii(environment))}, allowed is a mapping from names to texts"
        )
    if wrong := sorted(str(name) for name in environment if not isinstance(name, str) or not is_allowed(name)):
        patterns = sorted([*(f"{prefix}*" for prefix in ALLOWED_PREFIXES), *ALLOWED])
        raise SpecError(
            f"{where}: {ENVIRONMENT_KEY}: got {wrong}, allowed is {patterns} without {list(_LAUNCHERS_OWN)}, which "
            f"the launcher sets"
        )
    if unread := sorted(_REPLACED.keys() & environment.keys()):
        replaced = ", ".join(f"{_REPLACED[name]} for {name}" for name in unread)
        raise SpecError(f"{where}: {ENVIRONMENT_KEY}: got {unread}, which RCCL does not read; set {replaced}")
    for name, value in environment.items():
        if not isinstance(value, str) or not _is_passable(value):
            raise SpecError(
                f"{where}: {ENVIRONMENT_KEY}.{name}: got {brief(ascii(value))}, allowed is text without NUL "
                f"characters and lone surrogates"
            )


def case_suffix(environment: Mapping[str, str]) -> str:
    """Return the suffix of a case's name; empty if the config sets no variables."""
    pairs = ",".join(f"{name}={value}" for name, value in sorted(environment.items()))
    return f"[{pairs}]" if pairs else ""
