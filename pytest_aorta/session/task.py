"""The task of a run of pytest that a subcommand starts, and what that run leaves."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from pytest_aorta.common.files import write_text
from pytest_aorta.common.model import Model
from pytest_aorta.session.record import TestRecord
from pytest_aorta.session.search import Finding, SearchRequest


class Task(Model, frozen=True):
    """The request of a subcommand to the run of pytest that it starts.

    Attributes:
        findings: Path of the file for :class:`Findings`.
        search: The search for a commit that the one selected test becomes; None: all tests run as they are.
        tolerances: Metric -> the tolerance of this search in place of the test's own.
        log_fd: The descriptor for lines on launches, in the process that owns the terminal.
        parent: The process with which that one ends.
    """

    findings: str
    search: SearchRequest | None = None
    tolerances: dict[str, str] = {}
    log_fd: int = 2
    parent: int = 0


class Findings(Model, frozen=True):
    """The findings of a run of pytest with a task.

    Attributes:
        records: The records of all tests.
        search: The end of the search.
    """

    records: tuple[TestRecord, ...]
    search: Finding = Finding()

    def write(self, path: Path) -> None:
        """Write a file for :meth:`read`, which keeps infinite changes.

        Raises:
            OSError: The file can't be written.
        """
        write_text(path, json.dumps(msgspec.to_builtins(self)), durable=False)

    @classmethod
    def read(cls, path: Path) -> Findings:
        """Return what :meth:`write` has written.

        Raises:
            OSError: The file can't be read.
        """
        return msgspec.convert(json.loads(path.read_text(encoding="utf-8")), cls)
