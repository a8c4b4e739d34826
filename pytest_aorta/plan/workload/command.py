"""A workload that is a command: how its yaml becomes a script or module with arguments. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_aorta.common.errors import SpecError

# Names in braces that are no config keys: the launch's own folder, and that of the yaml.
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


@dataclass(frozen=True)
class CommandLine:
    """What a rank runs: a path ending in ``.py`` or a dotted module, its arguments, and variables on top."""

    target: str
    args: tuple[str, ...]
    environment: dict[str, str]


def command_line(command: Mapping[str, Any], config: Mapping[str, Any], *, folder: Path, run_dir: Path) -> CommandLine:
    """Fill a command's texts in with the config; a path of a script is relative to ``folder``, the yaml's."""
    values = {**config, "run_dir": str(run_dir), "folder": str(folder)}
    script = command.get("script")
    args: list[str] = []
    for entry in command.get("args", ()):
        if isinstance(entry, str):
            args.append(filled(entry, values))
        elif config[entry["when"]]:
            args += [filled(text, values) for text in entry["args"]]
    environment = {name: filled(text, values) for name, text in command.get("environment", {}).items()}
    return CommandLine(str(folder / script) if script else command["module"], tuple(args), environment)


def filled(text: str, values: Mapping[str, Any]) -> str:
    """``text`` with each ``{name}`` replaced: strings as they are, everything else as JSON."""

    def value_of(match: re.Match[str]) -> str:
        value = values[match[1]]
        return value if isinstance(value, str) else json.dumps(value)

    return _NAME.sub(value_of, text)


def refuse_unknown_names(where: str, texts: Iterable[str], properties: Iterable[str]) -> None:
    """See that every name in braces is a config key or a place.

    Raises:
        SpecError: one is not.
    """
    known = {*properties, *PLACES}
    if unknown := sorted({name for text in texts for name in _NAME.findall(text)} - known):
        raise SpecError(f"{where}: no such names {unknown} to fill in; there are {sorted(known)}")


def texts_of(value: Any) -> list[str]:
    """Every string in a value of the yaml."""
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return [text for item in items for text in texts_of(item)]
