"""Strict reading of YAML that a person has written: the safe loader, without repeated keys."""

import re
from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from pytest_aorta.common.files import UnreadableFile, conflict, read_text

MAX_YAML_BYTES = 1 << 18


class _UniqueKeyLoader(yaml.SafeLoader):
    """A SafeLoader that refuses repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        keys = Counter(repr(self.construct_object(key, deep=True)) for key, _ in pairs)
        if repeated := [key for key, count in keys.items() if count > 1]:
            raise yaml.constructor.ConstructorError(None, None, f"key {repeated[0]} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


# YAML 1.1, which the loader follows, reads 1e-3 as text; YAML 1.2 and JSON read a number.
_UniqueKeyLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+[eE][-+]?[0-9]+$"), [*"-+0123456789"]
)


def read_yaml(path: Path, *, max_bytes: int = MAX_YAML_BYTES) -> Any:
    """Parse one YAML document with the safe loader, refusing repeated keys.

    Raises:
        UnreadableFile: The file is absent, empty, too large or not safe YAML.
    """
    return parse_yaml(read_text(path, max_bytes=max_bytes), str(path))


def parse_yaml(text: str, name: str) -> Any:
    """Parse text as :func:`read_yaml` parses a file; ``name`` is the source that an error message names.

    Raises:
        UnreadableFile: The text is not safe YAML.
    """
    try:
        return yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise UnreadableFile(f"{name}: not valid YAML: {conflict(text) or error}") from None
