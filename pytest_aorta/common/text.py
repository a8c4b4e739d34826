"""Plain text for a terminal: tables that fit its width, and lines that can't harm it."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

_UNLIMITED = 1 << 20
_MIN_FLEXIBLE = 16
_GAP = "  "


def output_width() -> int:
    """Columns of the terminal, or of COLUMNS; where there is neither, as in a pipe, there is no limit."""
    return shutil.get_terminal_size(fallback=(_UNLIMITED, 1)).columns


def table(rows: Sequence[Sequence[str]], width: int, *, flexible: int | None = None, indent: str = "") -> list[str]:
    """One line a row, the first one the head; column ``flexible`` is shortened where the width asks for it.

    What is too wide all the same is wrapped, row by row.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    surplus = len(indent) + sum(widths) + len(_GAP) * (len(widths) - 1) - width
    if flexible is not None and surplus > 0:
        widths[flexible] = max(min(widths[flexible], _MIN_FLEXIBLE), widths[flexible] - surplus)
    return [line for row in rows for line in _row_lines(row, widths, width, indent)]


def _row_lines(row: Sequence[str], widths: Sequence[int], width: int, indent: str) -> list[str]:
    """As many cells a line as fit."""
    lines = [indent]
    for cell, size in zip(row, widths, strict=True):
        if len(lines[-1]) + size > width and lines[-1].strip():
            lines.append(f"{indent}    ")
        lines[-1] += shortened(cell, size).ljust(size) + _GAP
    return [line.rstrip() for line in lines]


def shortened(text: str, size: int) -> str:
    """Text of at most ``size`` characters; the end of a name tells more than its beginning."""
    return text if len(text) <= size else f"...{text[3 - size :]}"


def brief(text: str, size: int = 80) -> str:
    """Return ``text``, cut to ``size`` characters with ``...`` at the end."""
    return text if len(text) <= size else f"{text[: size - 3]}..."


def counted(number: int, noun: str) -> str:
    """A number of things."""
    ending = "" if number == 1 else "es" if noun.endswith("h") else "s"
    return f"{number} {noun}{ending}"


def percent(share: float) -> str:
    """Up to a tenfold, beyond which a digit tells nothing."""
    return f"{share:.2%}" if share < 0.1 else f"{share:.1%}" if share < 10 else ">1000%"


def wrapped(line: str, width: int) -> list[str]:
    """The line itself, or several, of which the later are indented."""
    if len(line) <= width:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.wrap(
        line.strip(), max(width, 20), initial_indent=indent, subsequent_indent=f"{indent}    ", break_long_words=False,
        break_on_hyphens=False, drop_whitespace=True,
    )  # fmt: skip


def emit(lines: Iterable[str]) -> None:
    """Print lines; what a terminal would not show, or take for a command, is escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    for line in lines:
        print(printable(line).encode(encoding, "backslashreplace").decode(encoding))


def printable(text: str) -> str:
    """Text whose every character shows."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def aligned(rows: list[tuple[str, ...]], reasons: list[str]) -> list[str]:
    """Return one line per row with columns padded to equal width; a reason follows its row after a colon."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row, reason in zip(rows, reasons, strict=True):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        lines.append(f"{line}: {reason}" if reason else line)
    return lines
