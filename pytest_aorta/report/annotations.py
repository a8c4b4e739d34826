"""GitHub's annotations: each failure at the test, and at the line of the code that the failure names."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_aorta.common.text import brief, is_library, printable
from pytest_aorta.session.record import TestRecord

# GitHub shows ten errors of a step.
_MAX_SHOWN = 10
_MAX_MESSAGE = 500
# A frame of a traceback, or a place such as train.py:43.
_PLACE = re.compile(r'File "(?P<file>[^"\n]+\.py)", line (?P<line>\d+)|(?P<path>[\w./-]+\.py):(?P<number>\d+)\b')


def annotations(records: Sequence[TestRecord], rootdir: Path, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the lines that a step of GitHub Actions writes on its failures; none elsewhere."""
    if environ.get("GITHUB_ACTIONS") != "true":
        return []
    root = Path(environ.get("GITHUB_WORKSPACE", rootdir)).resolve()
    lines: dict[str, None] = {}
    for record in records:
        if record.has_failed and not record.is_retried:
            message = _escaped(brief(printable(record.reason), _MAX_MESSAGE))
            title = _escaped(printable(record.nodeid), ":,")
            test = rootdir / record.nodeid.partition("::")[0]
            for file, line in [*_named(record.failure, rootdir, test), (test, record.line)]:
                if file.resolve().is_relative_to(root):
                    place = _escaped(str(file.resolve().relative_to(root)), ":,")
                    lines[f"::error file={place},line={max(line, 1)},title={title}::{message}"] = None
    return list(lines)[:_MAX_SHOWN]


def _named(text: str, rootdir: Path, test: Path) -> list[tuple[Path, int]]:
    """Return the line below pytest's root folder that a failure names: the innermost of a traceback, or the first."""
    frames, places = [], []
    for found in _PLACE.finditer(text):
        parts = Path(found["file"] or found["path"]).parts
        # Diagnoses shorten paths to their last parts, which may begin above the root folder.
        paths = (rootdir.joinpath(*parts[start:]) for start in range(len(parts)))
        file = next((path for path in paths if path.is_file() and path.is_relative_to(rootdir)), None)
        if file is None or is_library(str(file)):
            continue
        if found["file"]:
            frames.append((file, int(found["line"])))
        elif file != test:
            places.append((file, int(found["number"])))
    return frames[-1:] or places[:1]


def _escaped(text: str, special: str = "") -> str:
    """Return text in which the runner reads neither a command's end nor, in a property, its separators."""
    return "".join(f"%{ord(char):02X}" if char in f"%\r\n{special}" else char for char in text)
