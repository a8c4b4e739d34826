"""Strict reading and atomic writing of files that another process or a later commit reads."""

from __future__ import annotations

import fcntl
import fnmatch
import hashlib
import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from pytest_aorta.common.errors import AortaError
from pytest_aorta.common.regular import read_regular
from pytest_aorta.common.signals import uninterrupted
from pytest_aorta.common.text import brief

# The package's folder, computed only here: programs are started from it, and versions compared by its files.
PACKAGE_ROOT = Path(__file__).resolve().parents[1]
# Suffix of files that are being written; a file older than ABANDONED_S was left by a killed writer.
SCRATCH_SUFFIX = ".tmp"
ABANDONED_S = 3600.0
_STANDARD_LIBRARY = Path(os.__file__).resolve().parent
_LOCK_POLL_S = 0.02
_INSTALLED = {"site-packages", "dist-packages"}
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
        document = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
        if not _is_finite(document, MAX_DEPTH):
            # Parse again for the number's own text: a function called on every number would take most of the time.
            json.loads(text, parse_float=_finite)
        return document
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(f"{name}: not valid JSON: {error}") from None


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
        raise UnreadableFile(f"{name}: not valid YAML: {error}") from None


def write_json(path: Path, document: Any) -> None:
    """Write ``document`` atomically, with sorted keys and indentation.

    Raises:
        ValueError: A number is NaN or infinite.
        OSError: The file can't be written.
    """
    write_text(path, json.dumps(document, allow_nan=False, indent=2, sort_keys=True) + "\n")


def write_json_rows(path: Path, document: Mapping[str, Any]) -> None:
    """Write ``document`` as :func:`write_json` does, but with one line per key, which takes a tenth of the time."""
    rows = [
        f"{json.dumps(key)}: {json.dumps(document[key], allow_nan=False, sort_keys=True)}" for key in sorted(document)
    ]
    write_text(path, "{\n" + ",\n".join(rows) + "\n}\n")


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Write ``text`` as UTF-8, in the way of :func:`write_bytes`."""
    # A test's id or output can hold surrogates, which UTF-8 can't encode.
    write_bytes(path, text.encode("utf-8", "backslashreplace"), durable=durable)


def write_bytes(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write ``data`` atomically: a reader gets the old file or the whole new file, even if the writer dies.

    Args:
        path: The file to replace.
        data: The file's new content.
        durable: Whether the content must also survive a loss of power, for which the call waits for the disk. Pass
            False for files that are written often and matter only during a launch.

    Raises:
        OSError: The file can't be written; the old file remains.
    """
    if durable:
        remove_scratch(path.parent, _scratch_prefix(path), ABANDONED_S)
    # The kernel applies the umask, which a process can read only by changing it for a moment, for all of its threads.
    with _replacing(path) as scratch, scratch.open("xb") as file:
        file.write(data)
        file.flush()
        if durable:
            os.fsync(file.fileno())


def write_link(path: Path, target: Path) -> None:
    """Make ``path`` a symbolic link to ``target`` atomically: another process follows the old link or the new one.

    Raises:
        OSError: The link can't be written; an old link remains.
    """
    with _replacing(path) as scratch:
        scratch.symlink_to(target)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a path that no other writer uses; what the body puts there replaces ``path``, unless the body fails."""
    scratch = path.parent / f"{_scratch_prefix(path)}{os.urandom(8).hex()}{SCRATCH_SUFFIX}"
    try:
        yield scratch
        scratch.replace(path)
    except BaseException:
        with suppress(OSError):
            scratch.unlink()
        raise


def _scratch_prefix(path: Path) -> str:
    return f".{path.name[:40]}."


def create_numbered_folder(base: Path, name: str) -> Path:
    """Create the folder ``<number>-<name>`` in ``base`` with the lowest number from 01 on whose folder is not there.

    No folder is returned twice, even to processes that call at the same time, such as workers of
    ``pytest -n2 --dist=each``, which run one test in one results folder.

    Raises:
        OSError: A folder can't be created, or all numbers up to 99,999 are taken.
    """
    base.mkdir(parents=True, exist_ok=True)
    for number in range(1, 100_000):
        folder = base / f"{number:02d}-{name}"
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise OSError(f"it has 99,999 folders named *-{name}; empty it")


def files_below(folder: Path, pattern: str) -> list[Path]:
    """Return the files in ``folder`` and below it whose names match ``pattern``, sorted.

    A folder that another process deletes meanwhile has no files; ``Path.rglob`` would raise an error.
    """
    return sorted(Path(base, name) for base, _, names in os.walk(folder) for name in fnmatch.filter(names, pattern))


def remove_scratch(folder: Path, prefix: str = ".", age_s: float = 0.0) -> None:
    """Delete unfinished files that killed writers have left.

    Args:
        folder: The folder that the writers wrote to.
        prefix: The beginning of the files' names.
        age_s: Smallest age of a file to delete, in seconds; 0 only if no writer can be alive.
    """
    limit_s = time.time() - age_s
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not (entry.name.startswith(prefix) and entry.name.endswith(SCRATCH_SUFFIX)):
                continue
            with suppress(OSError):
                if entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_mtime <= limit_s:
                    os.unlink(entry.path)  # noqa: PTH108 - the path of a DirEntry is text


@contextmanager
def locked(path: Path, *, limit_s: float = 60.0) -> Iterator[None]:
    """Hold an exclusive lock on the file ``path``, which exists only while a process holds or awaits the lock.

    The kernel releases the lock of a process that ends.

    Raises:
        OSError: The file can't be created, or another process has held the lock for ``limit_s`` seconds.
    """
    deadline_s = time.monotonic() + limit_s
    handle: int | None = None
    try:
        while handle is None:
            # A lock that an interruption left held would block this process's own cleanup.
            with uninterrupted():
                handle = _acquired(path)
            if handle is None:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"another process has held {path} for {limit_s:g} s; end it, then try again")
                time.sleep(_LOCK_POLL_S)
        yield
    finally:
        if handle is not None:
            with uninterrupted():
                # Remove the file before releasing its lock, while no other process can hold the lock.
                path.unlink(missing_ok=True)
                os.close(handle)


def _acquired(path: Path) -> int | None:
    """Return the open file of a lock that this call has acquired, or None if another process holds the lock."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A former holder may have removed the file after this call opened it.
        if os.path.samestat(os.fstat(handle), path.stat()):
            return handle
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(handle)
    return None


def slug(text: str, *, max_length: int = 80) -> str:
    """Return a file name for any text: readable, without folders, and distinct even where case is ignored."""
    readable = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:max_length].strip("-")
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{readable}-{digest}" if readable else digest


def is_source_of(checkout: Path, path: Path) -> bool:
    """Return whether ``path`` belongs to the checkout itself, not to an environment installed inside the checkout."""
    path = path.resolve()
    if not path.is_relative_to(checkout) or path.is_relative_to(_STANDARD_LIBRARY):
        return False
    return not _INSTALLED & set(path.relative_to(checkout).parts)


def _read_text(path: Path, max_bytes: int, *, follow_links: bool = True) -> str:
    content = read_bytes(path, max_bytes=max_bytes, follow_links=follow_links)
    if not content.strip():
        raise UnreadableFile(f"{path}: empty")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"{path}: not UTF-8: {error}") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
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
    """Return whether every number in ``value`` is finite; a list of floats is checked at once, by its sum.

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
    if isinstance(value, dict):
        return all(_is_finite(item, depth - 1) for item in value.values())
    if set(map(type, value)) <= {float} and math.isfinite(sum(value)):
        return True
    return all(_is_finite(item, depth - 1) for item in value)


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
