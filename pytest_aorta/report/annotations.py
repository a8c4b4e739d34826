"""Annotations of GitHub and GitLab: each failure at the test, and at the line of the code that the failure names."""

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_aorta.common.text import brief, is_library, printable
from pytest_aorta.session.record import TestRecord

# GitHub shows ten errors of a step.
_MAX_SHOWN = 10
_MAX_MESSAGE = 500
# A frame of a traceback, or a place such as train.py:43.
_PLACE = re.compile(r'File "(?P<file>[^"\n]+\.py)", line (?P<line>\d+)|(?P<path>[\w./-]+\.py):(?P<number>\d+)\b')


def annotations(records: Sequence[TestRecord], rootdir: Path) -> list[str]:
    """Return the lines that a step of GitHub Actions writes on its failures; none elsewhere."""
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return []
    found = _annotations(records, rootdir, Path(os.environ.get("GITHUB_WORKSPACE", rootdir)).resolve())
    return [
        f"::error file={_escaped(one.path, ':,')},line={one.line},title={_escaped(one.test, ':,')}"
        f"::{_escaped(one.message)}"
        for one in found[:_MAX_SHOWN]
    ]


def code_quality(records: Sequence[TestRecord], rootdir: Path) -> list[dict[str, object]] | None:
    """Return the report of code quality that a job of GitLab shows in the diff of a merge request; None elsewhere."""
    if os.environ.get("GITLAB_CI") != "true":
        return None
    return [
        {
            "description": f"{one.test}: {one.message}",
            "check_name": "pytest-aorta",
            # GitLab compares both sides of the merge request by it, so that it has no number of a line.
            "fingerprint": hashlib.sha256(f"{one.path}\0{one.test}".encode()).hexdigest(),
            "severity": "critical",
            "location": {"path": one.path, "lines": {"begin": one.line}},
        }
        for one in _annotations(records, rootdir, Path(os.environ.get("CI_PROJECT_DIR", rootdir)).resolve())
    ]


@dataclass(frozen=True)
class _Annotation:
    """A failure of a test at a line of a file, whose path begins at the root of the repository."""

    path: str
    line: int
    test: str
    message: str


def _annotations(records: Sequence[TestRecord], rootdir: Path, root: Path) -> list[_Annotation]:
    found: dict[_Annotation, None] = {}
    for record in records:
        if record.has_failed and not record.is_retried:
            texts = printable(record.nodeid), brief(printable(record.reason), _MAX_MESSAGE)
            test = rootdir / record.nodeid.partition("::")[0]
            for file, line in [*_named(record.failure, rootdir, test), (test, record.line)]:
                if file.resolve().is_relative_to(root):
                    found[_Annotation(str(file.resolve().relative_to(root)), max(line, 1), *texts)] = None
    return list(found)


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
