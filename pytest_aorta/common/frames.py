"""Tracebacks as text, and whether a frame's file belongs to the harness that starts ranks, a library or the user."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Files of the programs that start a rank's script or workload, and of Python's import system.
_HARNESS = re.compile(
    r"/pytest_aorta/(?:common|launch|plan|result|worker)/|^<frozen (?:runpy|importlib)|/importlib/__init__\.py$"
    r"|/torch/distributed/(?:run\.py|launch\.py|launcher/|elastic/)"
)
_LIBRARY = re.compile(r"^<|/(?:site|dist)-packages/|/lib/python3\.\d+/|/torch/")
# A frame of a traceback in a text: its first line, then its source, which is indented further.
_FRAME = re.compile(r'^  File "(?P<file>[^"\n]*)", line \d+.*\n(?:    .*(?:\n|\Z))*', re.MULTILINE)


def is_harness(file: str) -> bool:
    """Return whether the file starts, imports or watches the code of ranks."""
    return _HARNESS.search(file) is not None


def is_library(file: str) -> bool:
    """Return whether the file belongs to the harness, to Python or to an installed package."""
    return is_harness(file) or _LIBRARY.search(file) is not None


def without_harness(text: str) -> str:
    """Return ``text`` without the harness's frames in its tracebacks."""
    return _FRAME.sub(lambda match: "" if is_harness(match["file"]) else match[0], text)


def traceback_lines(text: str, error_type: str, message: str, limit: int, file: str) -> list[str]:
    """Return about ``limit`` lines of a traceback, without the last error's message, which a headline already shows.

    If the traceback is longer, one line, which names ``file``, replaces the lines between the outermost and the
    innermost frames.
    """
    lines = text.rstrip().splitlines()
    named = re.compile(rf"(?:[\w.]+\.)?{re.escape(error_type)}(?::|$)")
    starts = [number for number, line in enumerate(lines) if named.match(line)]
    # The message of a DataLoader's error ends with the worker's traceback, which can name the same type.
    whole = [number for number in starts if lines[number].endswith(message.partition("\n")[0])]
    start = max(whole or starts, default=len(lines))
    # Notes of the error follow its message.
    lines = lines[:start] + lines[start + max(1, len(message.splitlines())) :]
    return _without_middle(lines, limit, file)


def _without_middle(lines: Sequence[str], limit: int, file: str) -> list[str]:
    if len(lines) <= limit:
        return list(lines)
    places = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    head = max((place for place in places if place <= limit // 3), default=limit // 3)
    tail = min((place for place in places if place >= len(lines) - 2 * limit // 3), default=len(lines) - limit // 2)
    return [*lines[:head], f"  ... {tail - head} lines left out, see {file}", *lines[tail:]]
