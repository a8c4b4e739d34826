"""A comparison of a test while it runs: launches until it is decided, then the record and the failure of the test."""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pytest_aorta.common.errors import ComparisonFailed, NothingCompared, SpecError
from pytest_aorta.plan.options import FailOn
from pytest_aorta.plan.reference import git
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.session.history import speed_checks
from pytest_aorta.session.launcher import Launcher
from pytest_aorta.session.locating import Capture, locate
from pytest_aorta.session.record import ComparedLaunch, Comparison, Side
from pytest_aorta.session.rounds import Repeated, comparison_text, passed, settle, with_baseline, with_both
from pytest_aorta.verdict.attribution import Sides
from pytest_aorta.verdict.baseline import Baseline, baseline_path, read_baseline
from pytest_aorta.verdict.bitwise import compare_lengths, compare_steps, num_steps
from pytest_aorta.verdict.comparison import PairedComparison, StoredComparison
from pytest_aorta.verdict.environment import identity
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import DIFFERS, Note, NoteKind, ReferenceKind, Verdict, Verdicts

R = TypeVar("R")


def compare_with_baseline(running: RunningComparison) -> Verdicts:
    """Compare with the stored baseline, and in pairs with the version of ``--aorta-ab`` what the baseline can't decide.

    Raises:
        BaselineError: The baseline can't be read.
        ComparisonFailed, NothingCompared: A verdict fails the test.
    """
    first = running.results[Side.CANDIDATE].facts
    # Under a profiler no times are compared, and the other metrics need no second launch.
    if running.version and not first.profiler:
        return running.conclude(running.settle(with_both(running.stored, first, running.version)))
    return running.conclude(running.settle(with_baseline(running.stored, first)))


class RunningComparison:
    """A comparison with the stored baseline, or of two variants, while it runs.

    Attributes:
        launcher: Launches either side again.
        results: The first result of each side; that of the candidate alone if the other side is the baseline.
        comparison: The comparison as far as it has come.
        steps: The number of steps that are compared one by one, else 0.
        stops: The steps after which the candidate was restarted.
        locates: Whether further launches locate what fails.
        version: The name of the version that the other side launches; empty if both run the same version.
    """

    def __init__(self, launcher: Launcher, case: str, candidate: WorkloadResult, *others: WorkloadResult) -> None:
        self.launcher = launcher
        self.options = launcher.session.options
        self.marked = launcher.spec.marked
        self.results = dict(zip(Side, (candidate, *others), strict=False))
        kind, platform = ReferenceKind.AB if others else ReferenceKind.BASELINE, candidate.platform
        baseline = "" if others else str(baseline_path(self.options.baselines, platform, case))
        launches = tuple(self._compared(side, result) for side, result in self.results.items())
        self.comparison = Comparison(case, kind, platform, candidate.workload, launches, baseline=baseline)
        self.steps = 0
        self.stops: list[int] = []
        self.locates = not self.options.no_locate
        self.version = "" if others else self.options.ab or ""

    @cached_property
    def old(self) -> Baseline | None:
        """The stored baseline; None if there is none.

        Raises:
            BaselineError: It can't be read.
        """
        return read_baseline(self.options.baselines, self.comparison.platform, self.comparison.case)

    @cached_property
    def stored(self) -> StoredComparison:
        """The comparison of the candidate with the stored baseline.

        The baseline has the default of each config key that was added after it was recorded.
        """
        result, old = self.results[Side.CANDIDATE], self.old
        if old and (launch := self.launcher.find(result)):
            old = old.replace(config=identity(launch.defaults) | old.config)
        return StoredComparison(
            self.comparison.case,
            identity(result.config),
            old,
            self.marked,
            self.options.max_launches,
            self.comparison.baseline,
            workload=result.workload,
        )

    def paired(self, only: Collection[str] | None, most: int = 1) -> PairedComparison:
        """Return the comparison of both sides by ``most`` pairs of launches, of ``only`` these metrics."""
        return PairedComparison(self.comparison.case, self.marked, only, most, self.version)

    def again(self, side: Side, capture: Capture = lambda _: {}) -> WorkloadResult:
        """Launch a side again, with the changes of its request that ``capture`` returns.

        Raises:
            SpecError, LeaseError, LaunchError, ResultError: As in :meth:`Launcher.repeat`.
        """
        launch = self.launcher.launch_of(self.results.get(side, self.results[Side.CANDIDATE]))
        return self.launcher.repeat(launch, reference=side not in self.results, **capture(launch.request)).result

    def judge_steps(self, steps: int | None, metrics: Collection[str]) -> Verdicts:
        """Return the verdicts on the bits of the first steps of both sides, or of all; a difference is then located."""
        here, there = self.results.values()
        self.steps = steps or min(map(num_steps, (here, there)))
        rows = compare_steps(self.comparison.case, here, there, self.steps, metrics)
        rows += () if steps else compare_lengths(self.comparison.case, here, there)
        return Verdicts(self.comparison.case, rows)

    def settle(self, comparing: Generator[Side, LaunchFacts, R]) -> R:
        """Launch what a comparison asks for, and return what it returns; if it fails, add what was launched."""
        try:
            return settle(comparing, self._launched)
        except BaseException:
            self.add()
            raise

    def _launched(self, side: Side) -> LaunchFacts:
        launch = self._compared(side, passed(self.again(side)))
        self.comparison = self.comparison.replace(launches=(*self.comparison.launches, launch))
        return launch.facts

    def _compared(self, side: Side, result: WorkloadResult) -> ComparedLaunch:
        return ComparedLaunch(side, result.facts, str(self.launcher.folder_of(result) or ""))

    def failing(self, verdicts: Verdicts) -> list[Verdict]:
        """Return the verdicts that fail the test."""
        fail_on = self.options.fail_on
        words = {Outcome[word.name] for word in fail_on - {FailOn.MARKED_INCONCLUSIVE}}
        # Nothing is stored for an A/B comparison, so a metric that one side lacks always fails the test.
        words |= {Outcome.MISSING} if self.comparison.kind is ReferenceKind.AB else set()
        return verdicts.failing(words, {Outcome.INCONCLUSIVE} if FailOn.MARKED_INCONCLUSIVE in fail_on else ())

    def conclude(self, verdicts: Verdicts) -> Verdicts:
        """Add the comparison with its verdicts to the test, and fail the test on a failing verdict.

        Raises:
            ComparisonFailed, NothingCompared: A verdict fails the test.
        """
        failing, before = self.failing(verdicts), self.comparison
        now = before.replace(rows=(*before.rows, *verdicts.rows), notes=verdicts.notes, suspect=verdicts.suspect)
        is_nothing = bool(self.options.fail_on) and now.compared_nothing
        raised = failing or (now.rows if is_nothing else ())
        notes = (*self._moved(failing), *now.notes)
        self.comparison = now.replace(failing=tuple(row.metric for row in raised), notes=notes)
        try:
            locate(self, failing)
        finally:
            self.add()
        if failing or is_nothing:
            names = [row.metric for row in failing]
            failing = [row for row in self.comparison.rows if row.metric in names]
            text = comparison_text(self.comparison, failing, self.repeated)
            if all(row.outcome is Outcome.MISSING for row in failing):
                raise NothingCompared(text)
            raise ComparisonFailed(text, tuple(names))
        return Verdicts(self.comparison.case, self.comparison.rows, self.comparison.notes)

    def _moved(self, failing: Sequence[Verdict]) -> list[Note]:
        """Return a note on what moved between the sides, with the command that settles it, if facts tell."""
        if not failing or failing[0].reference.is_variant:
            return []
        in_turn = failing[0].reference.is_ab
        others = self.comparison.facts(Side.REFERENCE) if in_turn else self.old.center_launches if self.old else ()
        if not others:
            return []
        noisy = [row.definition.has_noise for row in failing if row.is_compared]
        here = self.comparison.facts(Side.CANDIDATE)[-1]
        checks = speed_checks()
        # The host's own checks tell nothing of a baseline that another host recorded.
        is_of_host = others[-1].provenance.block in {one.provenance.block for one in checks}
        sides = Sides(
            others[-1],
            here,
            is_exact=not all(noisy),
            in_turn=in_turn,
            # Metrics that can't be compared for it tell of the environment.
            are_next=all(row.not_applicable in DIFFERS for row in failing),
            checks=checks if is_of_host else (),
        )
        line = sides.line(self.repeated.test, self.repeated.command)
        return [Note(line, NoteKind.MOVED)] if line else []

    def add(self, **changes: Any) -> None:
        """Add the comparison, which is final with these changes, to the test."""
        self.launcher.test.compared(self.comparison.replace(**changes))

    @cached_property
    def repeated(self) -> Repeated:
        """How this test is repeated; git is asked for the commit that last changed the baseline."""
        found: list[str] = []
        file = Path(self.comparison.baseline)
        if self.comparison.baseline:
            with suppress(SpecError, OSError):
                found = git(file.parent, "log", "-1", "--format=%h%n%cr%n%D", "--", file.name).splitlines()
        has_later = bool(found) and not found[-1].startswith("HEAD")
        commit = [*found[:2], *(["deleted since"] if found and not file.exists() else [])]
        options = [word for word in self.options.repeated if not word.startswith("--aorta-ab=")]
        test = self.options.argument_of(self.launcher.test.record.nodeid)
        version = self.options.ab or ""
        return Repeated(test, options, tuple(commit), has_later, version, is_stored=self.old is not None)
