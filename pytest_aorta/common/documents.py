"""Strict reading of files, JSON that a person or another process has written."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from pytest_aorta.common.errors import AortaError

# What a number that is larger than any float contains, in text that json.loads accepts.
_HUGE = re.compile(r"[eE]\+?0*[0-9]{3}|[0-9]{300}")


class UnreadableFile(AortaError):
    """A file can't be read or does not have the expected format; the message names the file and the reason."""


@contextmanager
def raised_as(
    kind: type[BaseException],
    before: str = "",
    of: type[Exception] | tuple[type[Exception], ...] = OSError,
    after: str = "",
) -> Iterator[None]:
    """Raise an error ``of`` some type, or of an unreadable file, in the body as one of another ``kind``.

    Its message is the reason between ``before`` and ``after``.
    """
    caught: tuple[type[Exception], ...] = (UnreadableFile, of) if isinstance(of, type) else (UnreadableFile, *of)
    try:
        yield
    except caught as error:
        raise kind(f"{before}{getattr(error, 'strerror', None) or error}{after}") from None


def read_bytes(path: Path, *, max_bytes: int, follow_links: bool = False) -> bytes:
    """Return the content of a regular file, of at most ``max_bytes`` bytes, that another process may have left.

    Raises:
        UnreadableFile: The file is absent, is not a regular file, is a symbolic link without ``follow_links``, can't be
            read, or is too large.
    """
    with raised_as(UnreadableFile, f"{path}: can't be read: ", (OSError, ValueError)):
        content = read_regular(path, max_bytes + 1, follow_links=follow_links)
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
    return parse_json(read_text(path, max_bytes=max_bytes, follow_links=follow_links), str(path))


def parse_json(text: str, name: str) -> Any:
    """Parse text as :func:`read_json` parses a file; ``name`` is the source that an error message names.

    Raises:
        UnreadableFile: The text is not strict JSON.
    """
    try:
        document = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_finite)
        if _HUGE.search(text):
            # Parse again: a function that is called on every number would take most of the time.
            json.loads(text, parse_float=_finite, parse_int=_finite)
        return document
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(f"{name}: not valid JSON: {conflict(text) or error}") from None


def read_text(path: Path, *, max_bytes: int, follow_links: bool = True) -> str:
    """Return the text of a regular file of at most ``max_bytes`` bytes.

    Raises:
        UnreadableFile: As in :func:`read_bytes`, or the file is empty or not UTF-8.
    """
    return decoded(read_bytes(path, max_bytes=max_bytes, follow_links=follow_links), str(path))


def decoded(content: bytes | str, name: str) -> str:
    """Return the text of a document that is not empty; ``name`` is the source that an error message names.

    Raises:
        UnreadableFile: The content is empty or not UTF-8.
    """
    if not content.strip():
        raise UnreadableFile(f"{name}: empty")
    with raised_as(UnreadableFile, f"{name}: not UTF-8: ", UnicodeDecodeError):
        return content if isinstance(content, str) else content.decode("utf-8")


def conflict(text: str) -> str:
    """Return where a merge has left git's conflict markers and what to do, or an empty text."""
    lines = text.splitlines()
    begin = next((number for number, line in enumerate(lines, 1) if line.startswith("<<<<<<< ")), None)
    if begin is None or not any(line.startswith(">>>>>>> ") for line in lines):
        return ""
    return f"conflict markers of git from line {begin} on; keep one side, by git checkout --ours or --theirs"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, as ``object_pairs_hook``; raise ValueError if a key is given twice."""
    document = dict(pairs)
    if len(document) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"key {next(key for key, count in counts.items() if count > 1)!r} is given twice")
    return document


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


def open_regular(path: Path, *, follow_links: bool = False) -> BinaryIO:
    """Open a regular file for reading.

    A FIFO would wait forever for a writer, and a symbolic link could lead to any file of the user.

    Raises:
        OSError: The path can't be opened, is a symbolic link, or is not a regular file.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise OSError(errno.EINVAL, "a symbolic link, not a regular file", str(path)) from None
        raise
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(fd, "rb")


def read_regular(path: Path, max_bytes: int, *, follow_links: bool = False) -> bytes:
    """Return at most ``max_bytes`` from the beginning of a regular file.

    Raises:
        OSError: As in :func:`open_regular`.
    """
    with open_regular(path, follow_links=follow_links) as file:
        return file.read(max_bytes)
