"""What a report tells, as frozen values: tests, their comparisons, the launches of each side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_aorta.common.errors import AortaError
from pytest_aorta.result.facts import LaunchFacts, launch_facts
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.result.reading import read_result
from pytest_aorta.verdict.baseline import Baseline
from pytest_aorta.verdict.verdicts import Verdict


@dataclass(frozen=True)
class Launch:
    """One launch: ``number`` counts those of its side from 1."""

    number: int
    result: WorkloadResult
    facts: LaunchFacts


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        name: its label; the test's node id is the test's.
        candidate, reference: launches that were read; ``reference`` only in an A/B.
        baseline: the stored launches that the candidate was compared with.
        against: what the other side is called.
    """

    name: str
    verdicts: tuple[Verdict, ...] = ()
    candidate: tuple[Launch, ...] = ()
    reference: tuple[Launch, ...] = ()
    baseline: Baseline | None = None
    against: str = "baseline"

    @property
    def others(self) -> tuple[LaunchFacts, ...]:
        """What the candidate is held against: the launches of an A/B's reference, or the baseline's centre."""
        if self.reference:
            return tuple(launch.facts for launch in self.reference)
        return self.baseline.anchor if self.baseline else ()


@dataclass(frozen=True)
class Test:
    """One test, or what stands for one: ``outcome`` is pytest's word, ``failure`` the reason with its evidence."""

    __test__ = False

    nodeid: str
    outcome: str
    failure: str = ""
    notes: tuple[str, ...] = ()
    cases: tuple[Case, ...] = ()

    @property
    def is_failing(self) -> bool:
        """Whether it is red."""
        return self.outcome in ("failed", "error")

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Those of all its comparisons."""
        return tuple(verdict for case in self.cases for verdict in case.verdicts)


@dataclass(frozen=True)
class Report:
    """Everything that is told; ``candidate`` and ``reference`` are the names of the two sides."""

    title: str
    created_at: str
    candidate: str
    reference: str
    tests: tuple[Test, ...]
    warnings: tuple[str, ...] = ()


def read_launches(files: Sequence[Path]) -> tuple[tuple[Launch, ...], list[str]]:
    """The launches of result files, and why others can't be read: one broken file spoils no report."""
    launches: list[Launch] = []
    problems: list[str] = []
    for number, file in enumerate(files, 1):
        try:
            result = read_result(file)
            launches.append(Launch(number, result, launch_facts(result)))
        except (AortaError, ValueError) as error:
            problems.append(f"left out of the report: {error}")
    return tuple(launches), problems
