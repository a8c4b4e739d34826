"""Runs a test as a search for a commit: each comparison of the test launches commits until it names one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

from pytest_aorta.common.errors import AortaError, ComparisonFailed, LaunchError, ResultError, SpecError, WorkloadFailed
from pytest_aorta.common.text import brief
from pytest_aorta.plan.options.run import Options
from pytest_aorta.plan.reference import CommitReference, References
from pytest_aorta.plan.workload.command import ENVIRONMENT_KEY, case_suffix
from pytest_aorta.plan.worktree import Setup
from pytest_aorta.result.facts import LaunchFacts, launch_facts
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.session.record import TestRecord
from pytest_aorta.session.runner import WorkloadRunner, passed
from pytest_aorta.session.search.log import SearchLog, Skip, give
from pytest_aorta.session.spec import TestSpec
from pytest_aorta.session.world import DistributedWorld, in_test
from pytest_aorta.verdict.commit_search import MAX_END_PAIRS, CommitSearch, NextLaunch, Probe, SearchEnd, SearchOutcome
from pytest_aorta.verdict.comparison import PairedComparison
from pytest_aorta.verdict.noise import platform_priors
from pytest_aorta.verdict.verdicts import Verdicts

# Errors that count as a commit that does not start.
UNTESTABLE = (LaunchError, ResultError, SpecError, WorkloadFailed)
_MAX_REASON = 300


class Bisection:
    """The state of a search that outlasts a test's runner: the log, and the commits that are checked out."""

    def __init__(self, log: SearchLog, rootdir: Path) -> None:
        """Prepare the search that ``log`` requests, for a pytest run in ``rootdir``."""
        self.log = log
        self.commits = log.request.commits
        setup = Setup(log.request.setup, Path(log.request.environments))
        self._references = References(None, rootdir, setup)

    def reference(self, number: int) -> CommitReference:
        """Return a commit as an A/B reference; errors as in :meth:`~pytest_aorta.plan.reference.References.commit`.

        ``number`` counts commits from the good commit, which is number 0.
        """
        commit = self.commits[number]
        return self._references.commit(commit, commit[:12])


class BisectionRunner(WorkloadRunner):
    """The runner of a test whose comparison searches for a commit, in place of the stored baseline."""

    def __init__(
        self, bisection: Bisection, world: DistributedWorld, options: Options, spec: TestSpec, record: TestRecord
    ) -> None:
        super().__init__(world, options, spec, record)
        self._bisection = bisection
        self._ends = (0, len(bisection.commits) - 1)

    @in_test
    def run(self, name: str, /, **config: Any) -> WorkloadResult:
        """Launch a workload in the good commit's version; errors as in :meth:`WorkloadRunner.run`."""
        self._world.base = self._end_reference(0)
        return super().run(name, **config)

    @in_test
    def run_script(
        self,
        script: str | Path,
        args: tuple[str, ...] | list[str] = (),
        *,
        environment: Mapping[str, str] | None = None,
    ) -> WorkloadResult:
        """Launch a script in the good commit's version; errors as in :meth:`WorkloadRunner.run`."""
        self._world.base = self._end_reference(0)
        return super().run_script(script, args, environment=environment)

    @in_test
    def check(self, result: WorkloadResult, *, label: str | None = None) -> Verdicts:
        """Search for the commit that changed a metric of this comparison.

        Returns:
            The comparison of the ends, if they do not differ.

        Raises:
            ComparisonFailed: The search ended in any other way. The log contains the end.
            LaunchError, SpecError: The good or the bad commit does not start.
            WorkloadFailed: The workload's own checks failed in the launch of ``result``.
        """
        passed(result)
        environment = case_suffix(result.config.get(ENVIRONMENT_KEY, {}))
        case = f"{self._record.nodeid}::{label or result.workload}{environment}"
        log = self._bisection.log
        search = CommitSearch(len(self._bisection.commits) - 1, self._comparison(case, result))
        # The test's own launch ran the good commit, so this launch is one half of the first pair.
        first = None if log.replay(case, search) else launch_facts(result)
        while isinstance(step := search.next(), NextLaunch):
            event = self._probe(result, step, first)
            first = None
            give(search, event)
            log.add(case, event)
        return self._ended(case, step)

    @in_test
    def compare(self, *_: object, **__: object) -> NoReturn:
        """Refuse the comparison of variants.

        Raises:
            SpecError: Always.
        """
        raise SpecError("aorta bisect: the test uses workload.compare; name a test that uses workload.check")

    def _comparison(self, case: str, result: WorkloadResult) -> PairedComparison:
        only: Collection[str] | None = None
        if (metric := self._bisection.log.request.metric) is not None:
            only = [metric]
        priors = platform_priors(self._options.baselines_dir, result.platform, result.device, case)
        good = self._bisection.commits[0][:12]
        return PairedComparison(case, self._spec.tolerances, priors, only, MAX_END_PAIRS, good)

    def _ended(self, case: str, end: SearchEnd) -> Verdicts:
        log = self._bisection.log
        if case not in [logged.case for logged in log.ends()]:
            log.add_end(case, end)
        if end.outcome is SearchOutcome.ABSENT:
            return Verdicts(case, end.verdicts)
        names = ", ".join(self._bisection.commits[number][:12] for number in end.suspects)
        raise ComparisonFailed(f"{case}: {end.outcome.value}: {end.reason or names}")

    def _probe(self, result: WorkloadResult, step: NextLaunch, first: LaunchFacts | None) -> Probe | Skip:
        other = step.before or 0
        wanted = [step.commit, *([other] if step.paired and first is None else [])]
        launched: dict[int, LaunchFacts] = {} if first is None else {other: first}
        for number in wanted if step.candidate_first else reversed(wanted):
            try:
                launched[number] = self._at(result, number)
            except UNTESTABLE as error:
                if number in self._ends:
                    raise
                return Skip(number, brief(" ".join(str(error).split()) or type(error).__name__, _MAX_REASON))
        return Probe(step.commit, launched[step.commit], launched[other] if step.paired else None, step.before)

    def _at(self, result: WorkloadResult, number: int) -> LaunchFacts:
        """Launch a commit and return its facts. An error of the good or the bad commit names the commit.

        If a commit that started before fails now, it is launched once more, because the machine can be the cause.
        """
        is_end = number in self._ends
        reference = self._end_reference(number) if is_end else self._bisection.reference(number)
        try:
            try:
                return self._launched(result, reference)
            except UNTESTABLE:
                if number not in self._bisection.log.started():
                    raise
            return self._launched(result, reference)
        except UNTESTABLE as error:
            if is_end:
                raise self._end_failed(number, error) from None
            raise

    def _launched(self, result: WorkloadResult, reference: CommitReference) -> LaunchFacts:
        return launch_facts(passed(self._world.again(result, reference=reference)))

    def _end_reference(self, number: int) -> CommitReference:
        try:
            return self._bisection.reference(number)
        except SpecError as error:
            raise self._end_failed(number, error) from None

    def _end_failed(self, number: int, error: AortaError) -> LaunchError:
        side = "bad" if number else "good"
        commit = self._bisection.commits[number][:12]
        return LaunchError(f"aorta bisect: the {side} commit {commit} does not start: {error}")
