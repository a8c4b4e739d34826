"""The task of a run of pytest that a subcommand starts, and what that run leaves."""

from __future__ import annotations

from pytest_aorta.common.model import Model
from pytest_aorta.session.record import TestRecord
from pytest_aorta.session.search import Finding, SearchRequest


class Task(Model, frozen=True):
    """The request of a subcommand to the run of pytest that it starts.

    Attributes:
        findings: Path of the file for :class:`Findings`.
        records: Whether the run may record baselines.
        search: The search for a commit that the one selected test becomes; None: all tests run as they are.
        tolerances: Metric -> the tolerance of this search in place of the test's own.
        log_fd: The descriptor for lines on launches, in the process that owns the terminal.
        parent: The process with which that one ends.
    """

    findings: str
    records: bool = False
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
