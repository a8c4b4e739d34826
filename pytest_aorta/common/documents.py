"""Strict reading of files and of JSON and YAML documents that another process or a person has written."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Hashable
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from pytest_aorta.common.errors import AortaError
from pytest_aorta.common.regular import read_regular
from pytest_aorta.common.text import brief

# A workload's YAML contains a few hundred values. An alias counts each time it is used, so that a few lines can't
# expand to a billion values.
MAX_YAML_BYTES = 1 << 18
MAX_YAML_VALUES = 10_000
# Limit of nested levels in JSON and YAML. Results and configs have fewer than ten; Python's stack holds a thousand.
MAX_DEPTH = 50
# The largest power of two that a float can represent.
_MAX_INTEGER = 1 << 1023


class UnreadableFile(AortaError):
    """A file can't be read or does not have the expected format; the message names the file and the reason."""


def read_bytes(path: Path, *, max_bytes: int, follow_links: bool = False) -> bytes:
    """Return the content of a regular file, of at most ``max_bytes`` bytes, that another process may have left.

    Raises:
        UnreadableFile: The file is absent, is not a regular file, is a symbolic link without ``follow_links``, can't be
            read, or is too large.
    """
    try:
        content = read_regular(path, max_bytes + 1, follow_links=follow_links)
    except (OSError, ValueError) as error:
        raise UnreadableFile(f"{path}: can't be read: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > max_bytes:
        raise UnreadableFile(f"{path}: larger than the {max_bytes:,} bytes allowed")
    return content


def read_json(path: Path, *, max_bytes: int, follow_links: bool = True) -> Any:
    """Parse one strict JSON document: UTF-8, no repeated key, every number finite, at most ``max_bytes``.

    Args:
        path: The file.
        max_bytes: Limit of the file's size in bytes.
        follow_links: Whether the path may be a symbolic link; pass False for files that a rank has left.

    Raises:
        UnreadableFile: The file is absent, not a regular file, too large, truncated or not strict JSON.
    """
    return parse_json(_read_text(path, max_bytes, follow_links=follow_links), str(path))


def parse_json(text: str, name: str) -> Any:
    """Parse text as :func:`read_json` parses a file; ``name`` is the source that an error message names.

    Raises:
        UnreadableFile: The text is not strict JSON.
    """
    try:
        document = json.loads(text, object_pairs_hook=unique_keys, parse_constant=_refuse_constant)
        if not _is_finite(document, MAX_DEPTH):
            # Parse again for the number's own text: a function called on every number would take most of the time.
            json.loads(text, parse_float=_finite)
        return document
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(f"{name}: not valid JSON: {_conflict(text) or error}") from None


def read_yaml(path: Path, *, max_bytes: int = MAX_YAML_BYTES) -> Any:
    """Parse one YAML document with the safe loader, refusing repeated keys.

    Raises:
        UnreadableFile: The file is absent, too large or not safe YAML, or has too many values or levels.
    """
    return parse_yaml(_read_text(path, max_bytes), str(path))


def parse_yaml(text: str, name: str) -> Any:
    """Parse text as :func:`read_yaml` parses a file; ``name`` is the source that an error message names.

    Raises:
        UnreadableFile: The text is not safe YAML, or has too many values or levels.
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        raise UnreadableFile(f"{name}: not valid YAML: {_conflict(text) or error}") from None


def _read_text(path: Path, max_bytes: int, *, follow_links: bool = True) -> str:
    content = read_bytes(path, max_bytes=max_bytes, follow_links=follow_links)
    if not content.strip():
        raise UnreadableFile(f"{path}: empty")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"{path}: not UTF-8: {error}") from None


def _conflict(text: str) -> str:
    """Return where a merge has left git's conflict markers and what to do, or an empty text."""
    lines = text.splitlines()
    begin = next((number for number, line in enumerate(lines, 1) if line.startswith("<<<<<<< ")), None)
    if begin is None or not any(line.startswith(">>>>>>> ") for line in lines):
        return ""
    return f"conflict markers of git from line {begin} on; keep one side, by git checkout --ours or --theirs"


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, as ``object_pairs_hook``; raise ValueError if a key is given twice."""
    document = dict(pairs)
    if len(document) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"key {next(key for key, count in counts.items() if count > 1)!r} is given twice")
    return document


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a finite number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


def _is_finite(value: Any, depth: int) -> bool:
    """Return whether every number in ``value`` is finite.

    A list of floats is checked at once, by its sum, and lists or objects of one list as one: profiles contain many
    short lists.

    Raises:
        ValueError: An integer is too large, or there are more than ``depth`` levels.
    """
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        if abs(value) > _MAX_INTEGER:
            raise ValueError(f"{brief(str(value))}: an integer larger than any float")
        return True
    if not isinstance(value, dict | list):
        return True
    if depth == 0:
        raise ValueError(f"more than the {MAX_DEPTH} levels allowed")
    items = value.values() if isinstance(value, dict) else value
    kinds = set(map(type, items))
    if kinds <= {str} or (kinds == {float} and math.isfinite(sum(items))):
        return True
    if kinds == {list}:
        return _is_finite(list(chain.from_iterable(items)), depth - 1)
    if kinds == {dict}:
        return _is_finite(list(chain.from_iterable(map(dict.values, items))), depth - 1)
    return all(_is_finite(item, depth - 1) for item in items)


class _StrictLoader(yaml.SafeLoader):
    """A SafeLoader with limits, which refuses repeated keys and raises YAMLError for every value it can't construct."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._count = 0
        self._depth = 0
        # Node -> number of values and of levels in it; a node that is not complete yet is absent.
        self._sizes: dict[yaml.Node, tuple[int, int]] = {}
        self._deepest = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        is_alias = self.check_event(yaml.AliasEvent)
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        before, outside = self._count, self._deepest
        self._depth += 1
        self._deepest = self._depth
        self._count += 1
        self._check_size(mark)
        node = super().compose_node(parent, index)
        if node is not None and is_alias:
            if node not in self._sizes:
                raise yaml.composer.ComposerError(None, None, "a value contains itself", mark)
            count, depth = self._sizes[node]
            self._count += count
            self._deepest = self._depth + depth
            self._check_size(mark)
        elif node is not None:
            self._sizes[node] = self._count - before, self._deepest - self._depth
        self._depth -= 1
        self._deepest = max(self._deepest, outside)
        return node

    def _check_size(self, mark: Any) -> None:
        if self._count > MAX_YAML_VALUES:
            raise yaml.composer.ComposerError(
                None, None, f"more than the {MAX_YAML_VALUES:,} values allowed, aliases included", mark
            )
        if self._deepest > MAX_DEPTH:
            raise yaml.composer.ComposerError(None, None, f"more than the {MAX_DEPTH} levels allowed", mark)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError):
            # PyYAML's constructors assume that a value fits its tag.
            given = brief(repr(node.value)) if isinstance(node, yaml.ScalarNode) else "several values"
            raise yaml.constructor.ConstructorError(
                None, None, f"got {given}, which is not a value of tag {node.tag!r}", node.start_mark
            ) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                problem = f"key {brief(repr(key))} is a {type(key).__name__}, allowed is a scalar"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)
