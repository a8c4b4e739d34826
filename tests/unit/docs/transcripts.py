"""Comparison of a page's transcript with what its command has printed, line by line."""

import re
from collections.abc import Sequence

# Stands for any number of lines on a line of its own, and for any text within a line.
OMITTED = "..."
# Text that differs between two runs, and the word that replaces it; all other text has to be equal.
_NUMBER = r"\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?"
PATTERNS = {
    r"\b(?=[0-9a-f]*\d)[0-9a-f]{12}\b": "HASH",
    rf"{_NUMBER} (?:to|->) {_NUMBER} ms\b": "TIMES",
    rf"{_NUMBER} ms\b": "TIME",
    rf"{_NUMBER} ms/step\b": "TIME/step",
    rf"([+-]){_NUMBER}%": r"\1CHANGE",
    # A noisy launch is repeated.
    r"\b(?:[2-9]|\d\d+) launches\b": "N launches",
    r"\b(?:\d+m\d\d|\d+\.\d+)s\b": "SECONDS",
    # The length of pytest's rules depends on the seconds between them.
    r"={20,}": "====",
}


def normal(line: str) -> str:
    """Return a line without the text that differs between runs, and with one space between columns."""
    for pattern, word in PATTERNS.items():
        line = re.sub(pattern, word, line)
    return " ".join(line.split())


def difference(shown: str, printed: str) -> str | None:
    """Return why ``shown`` is not what was printed, or None if it is.

    Every line has to be equal, in order and without a gap, except where the transcript says ``...``. Empty lines do not
    count.
    """
    lines = [normal(line) for line in printed.splitlines() if line.strip()]
    segments = _segments([normal(line) for line in shown.splitlines() if line.strip()])
    begin, end = 0, len(lines)
    for number, segment in enumerate(segments):
        if number == 0:
            places = [0]
        elif number == len(segments) - 1:
            places = [end - len(segment)]
        else:
            places = list(range(begin, end - len(segment) + 1))
        found = next((place for place in places if place >= begin and _are_equal(segment, lines[place:])), None)
        if found is None:
            return f"not printed there: {' | '.join(segment)}"
        begin = found + len(segment)
    return None if len(segments) > 1 or begin == end else f"printed, but not in the transcript: {lines[begin]}"


def _segments(lines: Sequence[str]) -> list[list[str]]:
    """Return the lines between omissions; the first and the last segment are empty where lines are omitted there."""
    segments: list[list[str]] = [[]]
    for line in lines:
        if line == OMITTED:
            segments.append([])
        else:
            segments[-1].append(line)
    return segments


def _are_equal(segment: Sequence[str], lines: Sequence[str]) -> bool:
    return len(segment) <= len(lines) and all(map(_is_equal, segment, lines))


def _is_equal(shown: str, printed: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, shown.split(OMITTED))), printed) is not None
