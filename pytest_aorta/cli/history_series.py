"""Arranges a history by case: versions of the code in order, the launches of each, and the metrics' medians."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from pytest_aorta.common.errors import UsageError
from pytest_aorta.session.history.entries import HistoryEntry, MeasuredLaunch, Side
from pytest_aorta.verdict.metrics import METRICS
from pytest_aorta.verdict.verdicts import ReferenceKind

# Git's name for a head that is not on a branch.
DETACHED = "HEAD"


@dataclass(frozen=True)
class Version:
    """A version of the code: a commit, or the uncommitted changes of one run.

    Attributes:
        commit: The commit; None if unknown.
        dirty: Whether a tracked file differed from the commit; uncommitted changes of two runs are two versions.
        measured_at: UTC time of the first launch.
        torch, accelerator: As in :class:`~pytest_aorta.session.history.entries.MeasuredLaunch`.
        revision: Revision of the baseline that the version was last compared with; None without one.
        launches: The launches of the version, oldest first.
        baselines: Metric -> baseline center that the version was last compared with.
    """

    commit: str | None
    dirty: bool
    measured_at: str
    torch: str | None
    accelerator: str | None
    revision: int | None
    launches: tuple[MeasuredLaunch, ...]
    baselines: dict[str, float]

    @property
    def name(self) -> str:
        """Return the short commit, and whether the code differed from the commit."""
        return f"{self.commit[:12] if self.commit else 'unknown'}{' and changes' if self.dirty else ''}"

    def numbers(self, metric: str) -> list[float]:
        """Return the metric's value in each launch in which the value is a number."""
        values = (launch.values.get(metric) for launch in self.launches)
        return [float(value) for value in values if isinstance(value, float | int)]


@dataclass(frozen=True)
class Point:
    """A metric at one version: the median over launches, or the text if the metric is a text.

    ``version`` is the index of the version in its case.
    """

    version: int
    value: float | str


@dataclass(frozen=True)
class CaseHistory:
    """The history of one case on one platform; versions are in the order in which they were first measured."""

    case: str
    test: str
    platform: str
    versions: tuple[Version, ...]

    @property
    def metrics(self) -> list[str]:
        """Return the metrics that any launch has, in the order of the table of metrics."""
        found = {name for version in self.versions for launch in version.launches for name in launch.values}
        return [name for name in METRICS if name in found]

    @property
    def revisions(self) -> list[tuple[int, int]]:
        """Return, for each baseline revision after the first, the index of its first version and its number."""
        known = [(index, row.revision) for index, row in enumerate(self.versions) if row.revision is not None]
        return [here for before, here in pairwise(known) if here[1] != before[1]]

    @property
    def num_launches(self) -> int:
        """Return the number of launches of all versions."""
        return sum(len(version.launches) for version in self.versions)

    def points(self, metric: str) -> list[Point]:
        """Return the metric at every version that has it."""
        found = []
        for index, version in enumerate(self.versions):
            texts = [value for launch in version.launches if isinstance(value := launch.values.get(metric), str)]
            if numbers := version.numbers(metric):
                found.append(Point(index, median(numbers)))
            elif texts:
                found.append(Point(index, texts[-1]))
        return found

    def until(self, moment: str) -> CaseHistory:
        """Return the history of the versions that were first measured at ``moment`` or before."""
        return replace(self, versions=tuple(row for row in self.versions if row.measured_at <= moment))


def of_branch(entries: Sequence[HistoryEntry], branch: str | None) -> list[HistoryEntry]:
    """Return the entries of one branch.

    Args:
        entries: Entries of any branch.
        branch: Name of the branch, or :data:`DETACHED` for a detached head; None if there is only one branch.

    Raises:
        UsageError: The branch has no entry, or there are several branches and none was named.
    """
    found = sorted({_branch(entry) for entry in entries})
    if branch is None and len(found) > 1:
        raise UsageError(
            f"--branch: the history is of {len(found)} branches, and values of two branches are not one series; "
            f"give one of {found}"
        )
    if branch is not None and branch not in found:
        raise UsageError(f"--branch: got {branch!r}, allowed is one of {found}")
    return [entry for entry in entries if branch is None or _branch(entry) == branch]


def _branch(entry: HistoryEntry) -> str:
    return entry.launches[0].branch or DETACHED


def case_histories(entries: Sequence[HistoryEntry]) -> list[CaseHistory]:
    """Return the history of each case and platform.

    Launches of an A/B reference and launches that a profiler slowed down are left out.
    """
    grouped: dict[tuple[str, str], list[HistoryEntry]] = defaultdict(list)
    for entry in entries:
        grouped[entry.case, entry.platform].append(entry)
    histories = (
        CaseHistory(case, group[0].test, platform, _versions(group))
        for (case, platform), group in sorted(grouped.items())
    )
    return [history for history in histories if history.versions]


def _versions(entries: Sequence[HistoryEntry]) -> tuple[Version, ...]:
    launches: dict[tuple[str, ...], list[MeasuredLaunch]] = defaultdict(list)
    entry_of: dict[tuple[str, ...], list[HistoryEntry]] = defaultdict(list)
    for entry in entries:
        for launch in entry.launches:
            if launch.side is Side.CANDIDATE and not launch.profiler:
                key = _version_key(launch, entry.run)
                launches[key].append(launch)
                entry_of[key].append(entry)
    versions = (_version(group, entry_of[key]) for key, group in launches.items())
    return tuple(sorted(versions, key=lambda version: version.measured_at))


def _version_key(launch: MeasuredLaunch, run: str) -> tuple[str, ...]:
    # Uncommitted changes of two runs may differ, as may two versions without a known commit.
    if launch.commit is None or launch.dirty:
        return launch.commit or "", run
    return (launch.commit,)


def _version(launches: Sequence[MeasuredLaunch], entries: Sequence[HistoryEntry]) -> Version:
    revisions = [entry.revision for entry in entries if entry.revision is not None]
    compared = (
        verdict for entry in entries for verdict in entry.verdicts if verdict.reference == ReferenceKind.BASELINE
    )
    ordered = sorted(launches, key=lambda launch: launch.measured_at)
    first, last = ordered[0], ordered[-1]
    return Version(
        commit=first.commit,
        dirty=bool(first.dirty),
        measured_at=first.measured_at,
        torch=last.torch,
        accelerator=last.accelerator,
        revision=revisions[-1] if revisions else None,
        launches=tuple(ordered),
        baselines={row.metric: float(row.baseline) for row in compared if isinstance(row.baseline, float | int)},
    )
