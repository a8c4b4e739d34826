"""Plain text for a terminal: tables, lines without control characters, and tracebacks."""

import difflib
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

_GAP = "  "
# Length of the shortest word for which names that contain it are suggested, such as step_time_p50 for p50.
_MIN_PART = 3
_MAX_SUGGESTED = 3
# Similarity, as difflib measures it, of a name with one wrong or missing character.
_NEARLY = 0.85
# Control characters (C0, DEL and C1) other than tab and newline. A terminal interprets them as commands.
_ESCAPES = {code: rf"\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}


def table(rows: Sequence[Sequence[str]], *, indent: str = "") -> list[str]:
    """Return one line per row, the heading first, each after ``indent``, with columns padded to equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [indent + _GAP.join(map(str.ljust, row, widths)).rstrip() for row in rows]


def aligned(rows: Sequence[Sequence[str]], reasons: Sequence[str]) -> list[str]:
    """Return the lines of a table; a reason follows its row after a colon."""
    return [f"{line}: {reason}" if reason else line for line, reason in zip(table(rows), reasons, strict=True)]


def ranks_text(ranks: Iterable[int], count: int = 0) -> str:
    """Return the numbers of ranks as text, three or more in a row as a range; "all ranks" if they are ``count``."""
    numbers = sorted({*ranks})
    if len(numbers) == count > 1:
        return "all ranks"
    # Within a run of consecutive numbers, a number and its index are equally far apart.
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda item: item[1] - item[0])]
    parts = [part for run in runs for part in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run))]
    noun = "rank" if len(numbers) == 1 else "ranks"
    return f"{noun} {', '.join(parts[:8])}{', ...' if len(parts) > 8 else ''}" if runs else "no rank"


def brief(text: str, size: int = 80) -> str:
    """Return ``text``, cut to ``size`` characters with ``...`` at the end."""
    return text if len(text) <= size else f"{text[: size - 3]}..."


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in singular or plural."""
    ending = "" if number == 1 else "es" if noun.endswith("h") else "s"
    return f"{number} {noun}{ending}"


def some_of(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, and how many others there are."""
    more = f" and {counted(len(names) - most, 'other')}" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def duration(seconds: float) -> str:
    """Return a duration as text, such as ``9.4s`` or ``3m10s``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes else f"{seconds:.1f}s"


def did_you_mean(unknown: Iterable[object], known: Iterable[str]) -> str:
    """Return " (did you mean 'steps'?)" with the known names that resemble unknown ones; empty if none does."""
    names = list(known)
    found = dict.fromkeys(name for word in unknown for name in _similar(str(word), names))
    return f" (did you mean {' or '.join(map(repr, found))}?)" if found else ""


def _similar(word: str, names: Sequence[str]) -> list[str]:
    """Return the name that nearly equals the word, else at most three names that contain it, else the closest name."""
    containing = [name for name in names if len(word) >= _MIN_PART and word.lower() in name.lower()]
    nearly = difflib.get_close_matches(word, names, 1, _NEARLY)
    return nearly or containing[:_MAX_SUGGESTED] or difflib.get_close_matches(word, names, 1)


def emit(lines: Iterable[str]) -> None:
    """Print lines; characters that the terminal can't show, or would interpret as a command, are escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    for line in lines:
        print(printable(line).encode(encoding, "backslashreplace").decode(encoding))


def printable(text: str) -> str:
    """Return text with every unprintable character escaped."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def visible(text: str) -> str:
    r"""Return text with every control character other than tab and newline as an escape such as ``\x1b``.

    Surrogates, which UTF-8 can't encode, are escaped too: with one in a report, a pytest-xdist worker would crash.
    """
    return text.translate(_ESCAPES).encode("utf-8", "backslashreplace").decode("utf-8")


# Files of the programs that start a rank's script or workload, and of Python's import system.
_HARNESS = re.compile(
    r"/pytest_aorta/(?:common|launch|plan|result|worker)/|^<frozen (?:runpy|importlib)|/importlib/__init__\.py$"
    r"|/torch/distributed/(?:run\.py|launch\.py|launcher/|elastic/)"
)
# The last is a file that inductor has written.
_LIBRARY = re.compile(r"^<|/(?:site|dist)-packages/|/lib/python3\.\d+/|/torch/|/c[a-z2-7]{51}\.py$")
# A frame of a traceback in a text: its first line, then its source, which is indented further.
_FRAME = re.compile(r'^  File "(?P<file>[^"\n]*)", line \d+.*\n(?:    .*(?:\n|\Z))*', re.MULTILINE)

# What leads to a chain's last error, of which no frame is left.
_LINK = re.compile(r"\n\n(The above exception|During handling of).*:\s*\Z")


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

    Frames of the harness are left out, unless it raised the error.
    If the traceback is longer, a line that names ``file`` comes before what is left: of libraries the innermost frames
    alone, and if that is too long, the begin and the end.
    """
    inner = [frame["file"] for frame in _FRAME.finditer(text)][-1:]
    text = text if any(map(is_harness, inner)) else without_harness(text)
    lines = text.rstrip().splitlines()
    named = re.compile(rf"(?:[\w.]+\.)?{re.escape(error_type)}(?::|$)")
    starts = [number for number, line in enumerate(lines) if named.match(line)]
    # The message of a DataLoader's error ends with the worker's traceback, which can name the same type.
    whole = [number for number in starts if lines[number].endswith(message.partition("\n")[0])]
    start = max(whole or starts, default=len(lines))
    # Notes of the error follow its message.
    lines = lines[:start] + lines[start + max(1, len(message.splitlines())) :]
    return _shortened(_LINK.sub("", "\n".join(lines)), limit, file)


def _shortened(text: str, limit: int, file: str) -> list[str]:
    lines = text.splitlines()
    if len(lines) <= limit:
        return lines
    # Two frames of a library show which of its functions failed and which one called it.
    inner = [frame.start() for frame in _FRAME.finditer(text)][-2:]
    own = _FRAME.sub(lambda frame: frame[0] if frame.start() in inner or not is_library(frame["file"]) else "", text)
    kept = own.splitlines()
    head = limit // 3
    ends = kept if len(kept) <= limit else [*kept[:head], *kept[head - limit :]]
    return [f"  ... {len(lines) - len(ends)} lines left out, see {file}", *ends]


def distinct(names: Iterable[str], mark: str) -> list[str]:
    """Return the names; each but the first of equal ones ends with ``mark``, which has ``{}`` in place of a number."""
    seen, found = Counter[str](), []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else name + mark.format(seen[name]))
    return found
