"""Commands as workloads: a script or module and its arguments, from a yaml and a config. Pure functions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.text import brief, did_you_mean
from pytest_aorta.plan.world import VISIBLE_VARIABLES

# Names in braces besides config keys: the launch's folder, and the folder of the yaml.
PLACES = ("run_dir", "folder")
_NAME = re.compile(r"\{([a-z][a-z0-9_]*)\}")
COMMAND_SCHEMA: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "script": {"type": "string", "pattern": r"\.py$"},
        "module": {"type": "string", "pattern": r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"},
        "args": {
            "type": "array",
            "items": {
                "anyOf": [
                    {"type": "string"},
                    {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["when", "args"],
                        "properties": {
                            "when": {"type": "string"},
                            "args": {"type": "array", "items": {"type": "string"}},
                        },
                    },
                ]
            },
        },
        "environment": {
            "type": "object",
            "propertyNames": {"type": "string", "pattern": r"^[A-Za-z_]\w*$"},
            "additionalProperties": {"type": "string"},
        },
    },
    "oneOf": [{"required": ["script"]}, {"required": ["module"]}],
}


# Variables that the launcher sets for each rank, and variables that load code into every program of the launch.
_REFUSED = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT",
    *VISIBLE_VARIABLES, "NVIDIA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "LD_AUDIT", "LD_PRELOAD",
}  # fmt: skip
_REFUSED_PREFIXES = ("AORTA_", "PET_", "TORCHELASTIC_")


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


def command_line(command: Mapping[str, Any], config: Mapping[str, Any], *, folder: Path, run_dir: Path) -> CommandLine:
    """Return the command with the config's values filled in; a script is relative to the yaml's ``folder``.

    Raises:
        SpecError: An argument or a variable contains a character that can't be passed to a process.
    """
    values = {**config, "run_dir": str(run_dir), "folder": str(folder)}
    script = command.get("script")
    args: list[str] = []
    for entry in command.get("args", ()):
        if isinstance(entry, str):
            args.append(filled(entry, values))
        elif config[entry["when"]]:
            args += [filled(text, values) for text in entry["args"]]
    environment = {name: filled(text, values) for name, text in command.get("environment", {}).items()}
    for where, text in [
        *(("args", text) for text in args),
        *((f"environment.{name}", environment[name]) for name in environment),
    ]:
        if not is_passable(text):
            raise SpecError(
                f"{folder / 'default.yaml'}: command.{where}: got {brief(ascii(text))}, allowed is text without NUL "
                f"characters and lone surrogates"
            )
    return CommandLine(str(folder / script) if script else command["module"], tuple(args), environment)


def filled(text: str, values: Mapping[str, Any]) -> str:
    """Replace each ``{name}`` in ``text`` with its value: a string as it is, any other value as JSON."""

    def value_of(match: re.Match[str]) -> str:
        value = values[match[1]]
        return value if isinstance(value, str) else json.dumps(value)

    return _NAME.sub(value_of, text)


def is_passable(text: str) -> bool:
    """Return whether ``text`` can be passed to a process as an argument or a variable."""
    try:
        return b"\0" not in text.encode("utf-8")
    except UnicodeEncodeError:
        return False


def refuse_variables(where: str, names: Iterable[str]) -> None:
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
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return [text for item in items for text in texts_of(item)]
