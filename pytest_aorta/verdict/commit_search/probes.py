"""The launches of a search for a commit, and the end of the search."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.verdict.metrics import Metric
from pytest_aorta.verdict.noise.priors import transformed_values
from pytest_aorta.verdict.verdicts import Verdict


class SearchOutcome(StrEnum):
    """The outcome of a search."""

    FOUND = "found"
    ABSENT = "absent"
    """The ends do not differ."""
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Probe:
    """A launch of a commit, in a pair with a launch of another commit unless only bits are compared.

    Attributes:
        reference: The launch of the other commit: the good commit, or ``before``.
        before: Number of the commit before ``commit`` that starts, if the pair confirms that ``commit`` brought the
            change in.
    """

    commit: int
    candidate: LaunchFacts
    reference: LaunchFacts | None
    before: int | None = None


@dataclass(frozen=True)
class NextLaunch:
    """The launch to make next.

    Attributes:
        commit: Number of the commit to launch.
        paired: Whether another commit is launched too: the good commit, or ``before``.
        candidate_first: Whether the commit is launched before the other one. The order alternates, so that a drift of
            the machine affects both sides equally.
        before: Number of the commit before ``commit`` that starts, if the pair confirms that ``commit`` brought the
            change in.
    """

    commit: int
    paired: bool
    candidate_first: bool
    before: int | None = None


@dataclass(frozen=True)
class ProbedCommit:
    """A row of the table of probes.

    Attributes:
        launches: Number of launches of the commit.
        change: Mean change against the good commit on the metric's scale, e.g. 0.05 for 5%; None if bits are compared
            or if the commit has no pair.
        probability: Probability that the commit has the change.
        detail: Why the commit was skipped, or a remark; else empty.
    """

    commit: int
    launches: int
    change: float | None
    probability: float
    detail: str = ""


@dataclass(frozen=True)
class SearchEnd:
    """The end of a search.

    Attributes:
        reason: Explanation of an outcome other than *found*.
        suspects: Numbers of the commits that may have introduced the change; empty if the search can't name any.
        probability: Probability that the first commit with the change is one of ``suspects``.
        metric: The metric that was searched; empty if the ends do not differ.
        change, low, high: The change on the metric's scale with its 95% interval; None without suspects, or if bits are
            compared.
        num_confirming: Number of pairs that confirm the named commit; 0 if it is not confirmed or bits are compared.
        probed: Every commit that was launched or skipped, in order.
        verdicts: The comparison of the ends.
        notes: Remarks.
    """

    outcome: SearchOutcome
    reason: str = ""
    suspects: tuple[int, ...] = ()
    probability: float = 0.0
    metric: str = ""
    change: float | None = None
    low: float | None = None
    high: float | None = None
    num_confirming: int = 0
    probed: tuple[ProbedCommit, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    notes: tuple[str, ...] = ()


def difference(metric: Metric, probe: Probe) -> float | None:
    """Return how much worse a probe's metric is than the good commit's, as a difference of transformed values.

    None if the good commit was not launched, or if a launch has no value that can be transformed.
    """
    here, there = transformed(metric, probe)
    return None if here is None or there is None else metric.worse * (here - there)


def transformed(metric: Metric, probe: Probe) -> tuple[float | None, float | None]:
    """Return the transformed value of both launches of a pair; None for a launch without one."""
    if probe.reference is None:
        return None, None
    here, there = transformed_values(metric, [probe.candidate, probe.reference], [probe.reference])
    return here, there


def differences_of(metric: Metric, probes: Sequence[Probe]) -> dict[int, list[float]]:
    """Return the differences of each commit, by number; see :func:`difference`."""
    found: dict[int, list[float]] = defaultdict(list)
    for probe in probes:
        if (value := difference(metric, probe)) is not None:
            found[probe.commit].append(value)
    return dict(found)
