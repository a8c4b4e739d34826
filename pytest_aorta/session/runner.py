"""The ``workload`` fixture's object: launches workloads and compares them with a baseline or another variant."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec

from pytest_aorta.common.errors import BaselineError, ComparisonFailed, SpecError, WorkloadFailed
from pytest_aorta.common.text import brief
from pytest_aorta.plan.options.run import Options
from pytest_aorta.plan.workload.command import ENVIRONMENT_KEY, case_suffix
from pytest_aorta.plan.workload.declaration import find_workload
from pytest_aorta.result.facts import LaunchFacts, launch_facts
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.session.baselines import Recording
from pytest_aorta.session.expected import ExpectedRegression, expected_regression
from pytest_aorta.session.history.entries import MeasuredLaunch, Side
from pytest_aorta.session.record import Compared, TestRecord
from pytest_aorta.session.rounds import joined, settle, settle_pairs, unsettled
from pytest_aorta.session.spec import TestSpec
from pytest_aorta.session.text import comparison_text, failed_checks_text, noisy_baseline_text
from pytest_aorta.session.world import DistributedWorld, check_result, in_test
from pytest_aorta.verdict.applicability import TEST_HOOK_KEY, identity
from pytest_aorta.verdict.baseline import Baseline, StoredLaunch, baseline_path, read_baseline, read_baseline_file
from pytest_aorta.verdict.bitwise import (
    compare_steps,
    difference_text,
    first_difference,
    from_first_step,
    locate_first,
    split,
)
from pytest_aorta.verdict.comparison import PairedComparison, StoredComparison
from pytest_aorta.verdict.learning import NewLaunches, detection_lines, launches_to_learn, objections
from pytest_aorta.verdict.metrics import METRICS, check_compared, measured_values
from pytest_aorta.verdict.noise import platform_priors
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Verdict, Verdicts


class WorkloadRunner:
    """The object of the fixture ``workload``, which launches workloads in a test's world and compares their results."""

    def __init__(self, world: DistributedWorld, options: Options, spec: TestSpec, record: TestRecord) -> None:
        self._world = world
        self._options = options
        self._spec = spec
        self._record = record
        self._fail_on = frozenset(Outcome[verdict.name] for verdict in options.fail_on)

    def __repr__(self) -> str:
        """Return the name and the platform, which pytest shows above a failure."""
        return f"<workload runner on {self._world.platform}>"

    @in_test
    def run(self, name: str, /, **config: Any) -> WorkloadResult:
        """Launch a workload and return its result.

        Raises:
            WorkloadFailed: The workload's own checks found wrong values; the message locates them.
            SpecError, LeaseError, LaunchError, ResultError: As in
                :meth:`~pytest_aorta.session.world.DistributedWorld.launch`.
        """
        return passed(self._world.launch(name, **config))

    @in_test
    def run_script(
        self,
        script: str | Path,
        args: tuple[str, ...] | list[str] = (),
        *,
        environment: Mapping[str, str] | None = None,
    ) -> WorkloadResult:
        """Launch your own training script and return its result.

        The arguments are those of :meth:`~pytest_aorta.session.world.DistributedWorld.launch_script`.

        Raises:
            WorkloadFailed, SpecError, LeaseError, LaunchError, ResultError: As in :meth:`run`.
        """
        return passed(self._world.launch_script(script, args, environment))

    @in_test
    def check(self, result: WorkloadResult, *, label: str | None = None) -> Verdicts:
        """Compare a result with the stored baseline of this test, and fail the test on a failing verdict.

        If one launch is not enough for a verdict, the workload is launched again, up to ``--aorta-max-launches`` times
        in total. With ``--aorta-ab``, these launches alternate with launches of the version that the option names. With
        ``--update-baselines``, the result and further launches become the baseline if the test passes. ``label``
        distinguishes the comparisons of one test; its default is the workload's name.

        Raises:
            ComparisonFailed: A verdict fails the test.
            BaselineError: The baseline can't be read, or the launches can't be added to it.
            WorkloadFailed: The workload's own checks failed in the launch of ``result`` or in a further launch.
            SpecError: An argument is not allowed, an earlier comparison of this test has the same label, a marker was
                added after the world was made, or as in
                :meth:`~pytest_aorta.session.world.DistributedWorld.again`.
            LaunchError, ResultError: As in :meth:`~pytest_aorta.session.world.DistributedWorld.again`.
        """
        self._world.check_markers()
        check_result("check", result)
        if label is not None:
            _check_label("check", label)
        passed(result)
        environment = case_suffix(result.config.get(ENVIRONMENT_KEY, {}))
        case = f"{self._record.nodeid}::{label or result.workload}{environment}"
        if case in self._record.used_cases:
            raise SpecError(
                f"{case}: compared twice in one test; give each comparison a label: check(result, label=...)"
            )
        self._record.used_cases.append(case)
        path = baseline_path(self._options.baselines_dir, result.platform, case)
        facts, config = launch_facts(result), identity(result.config)
        compared = self._compared(case, result, facts, None if self._options.update_baselines else path)
        if self._options.update_baselines:
            return self._learn(compared, config, result)
        baseline = self._stored(case, result)
        launches = [facts]
        verdicts = self._settle(compared, config, baseline, result, launches)
        self._judge(verdicts, result, launches, path, compared, self._record.nodeid)
        return verdicts

    @in_test
    def check_stored(self, results: Sequence[WorkloadResult], path: Path) -> Verdicts:
        """Compare results with the baseline in the file ``path``, without further launches; else as :meth:`check`."""
        result, launches = results[-1], [launch_facts(result) for result in results]
        baseline = self._known(read_baseline_file(path), result)
        priors = platform_priors(path.parent.parent, result.platform, result.device, baseline.case)
        marked = self._spec.tolerances
        comparison = StoredComparison(
            baseline.case, identity(result.config), baseline, marked, priors, len(launches), str(path)
        )
        verdicts = comparison.judge(launches)
        compared = self._compared(baseline.case, result, launches[-1], path)
        self._judge(verdicts, result, launches, path, compared, baseline.test)
        return verdicts

    @in_test
    def compare(
        self,
        candidate: WorkloadResult | Mapping[str, Any],
        reference: WorkloadResult | Mapping[str, Any],
        *,
        steps: int | None = None,
        metrics: Iterable[str] | None = None,
        label: str = "A/B",
        locate: bool | None = None,
    ) -> Verdicts:
        """Compare two variants in this test's world, and fail the test if the candidate differs or is worse.

        Each variant is a result of this test, or a mapping with the key ``workload`` and config keys. A mapping is
        launched.

        With ``steps``, the loss, gradient norm and weight hash of each of the first ``steps`` measured steps must be
        bitwise equal. Mappings that set no other values are launched with this number of steps, without warmup and with
        a hash after each step. The first difference is located. With ``locate`` (default: ``--aorta-locate``), both
        variants are launched once more to locate it. ``metrics`` limits the comparison to the named metrics.

        Without ``steps``, ``metrics`` names metrics of launches. The default is the metrics that a comparison with a
        baseline would use. Metrics with noise need more launches: both variants are launched alternately, up to
        ``--aorta-max-launches`` pairs.

        ``label`` names the comparison in reports and in the history. If a test compares several times with one label,
        later comparisons are numbered from 2.

        Raises:
            ComparisonFailed: The variants differ, the candidate is worse, or one variant lacks a metric.
            WorkloadFailed: The workload's own checks failed in a launch.
            SpecError: An argument or a config is not allowed.
            LaunchError, ResultError: As in :meth:`~pytest_aorta.session.world.DistributedWorld.launch` and
                :meth:`~pytest_aorta.session.world.DistributedWorld.again`.
        """
        self._world.check_markers()
        _check_steps(steps)
        if locate is not None and not isinstance(locate, bool):
            raise SpecError(f"compare: locate is {locate!r}, allowed is True, False or None")
        _check_label("compare", label)
        chosen = None if metrics is None else _names(metrics)
        if steps is None and chosen is not None:
            check_compared(chosen, METRICS)
        by_step, by_launch = split(chosen) if steps is not None else ([], chosen)
        for side, given in (("candidate", candidate), ("reference", reference)):
            _check_variant(side, given)
        there, here = self._variant(reference, steps), self._variant(candidate, steps)
        case = self._case_of_variants(label)
        facts = launch_facts(here)
        compared = self._compared(case, here, facts, None)
        reference_facts = self._kept(compared, there, Side.REFERENCE)
        rows: tuple[Verdict, ...] = ()
        if steps is not None:
            rows = compare_steps(case, here, there, steps, by_step)
            self._judge_steps(Verdicts(case, rows), here, there, steps, locate)
            if not by_launch:
                return Verdicts(case, rows)
        candidates, references = [facts], [reference_facts]
        priors = platform_priors(self._options.baselines_dir, here.platform, here.device, case)
        version, most = self._other_version(here, there), self._options.max_launches
        comparison = PairedComparison(case, self._spec.tolerances, priors, by_launch, most, version)
        again = (
            functools.partial(self._again, here, compared, Side.CANDIDATE),
            functools.partial(self._again, there, compared, Side.REFERENCE),
        )
        reference_first = self._world.has_launched_before(there, here)
        verdicts = settle_pairs(comparison, candidates, references, *again, reference_first=reference_first)
        self._judge(verdicts, here, candidates, None, compared)
        return msgspec.structs.replace(verdicts, rows=(*rows, *verdicts.rows))

    def expect_regression(self, *metrics: str) -> AbstractContextManager[ExpectedRegression]:
        """Return a context manager that requires a regression of exactly ``metrics``, for tests of planted faults.

        The comparison in the block must fail. Its verdicts then count as expected: the summary shows no regression, and
        the test continues after the block. The attribute ``text`` of the object that ``as`` binds is then the text of
        the failure.

        Raises:
            SpecError: ``metrics`` is empty or contains an unknown name.
            ComparisonFailed: No comparison failed in the block, or a comparison failed for another reason as well, such
                as a verdict that ``--aorta-fail-on`` names. A metric that is still open, because the regression ended
                the launches, is no reason.
        """
        return expected_regression(self._record, metrics, self._fail_on)

    def _case_of_variants(self, label: str) -> str:
        """Return the case of a comparison of variants; a number distinguishes comparisons with the same label."""
        first, taken = f"{self._record.nodeid}::{label}", {compared.case for compared in self._record.compared}
        numbered = (f"{first} {number}" for number in itertools.count(2))
        return next(case for case in itertools.chain([first], numbered) if case not in taken)

    def _variant(self, given: WorkloadResult | Mapping[str, Any], steps: int | None) -> WorkloadResult:
        if isinstance(given, WorkloadResult):
            return given
        config = {key: value for key, value in given.items() if key != "workload"}
        spec = find_workload(given["workload"], self._options.workload_dirs)
        if steps is not None:
            config = {key: value for key, value in from_first_step(steps).items() if key in spec.properties} | config
        return passed(self._world.launch(spec.name, **config))

    def _judge_steps(
        self,
        verdicts: Verdicts,
        candidate: WorkloadResult,
        reference: WorkloadResult,
        steps: int,
        locate: bool | None,
    ) -> None:
        self._record.verdicts += verdicts.rows
        failing = verdicts.failing(self._fail_on | {Outcome.MISSING})
        if not failing:
            return
        found: list[str] = []
        different = [row.metric for row in failing if row.outcome is Outcome.REGRESSION]
        if difference := first_difference(candidate, reference, steps, different):
            wants_launches = self._options.locate if locate is None else locate
            keys = self._world.config_keys(candidate) & self._world.config_keys(reference)
            again = self._changed if wants_launches else None
            found = locate_first(candidate, reference, difference, keys, again, self._world.folder)
        raise ComparisonFailed(difference_text(failing, candidate, reference, found))

    def _other_version(self, candidate: WorkloadResult, reference: WorkloadResult) -> str:
        """Return the version that ``reference`` ran, if only the version differs between both sides; else empty."""
        here, there = self._world.launch_of(candidate), self._world.launch_of(reference)
        if here is None or there is None or there.reference is None:
            return ""
        return there.reference.name if (here.request, here.reference) == (there.request, None) else ""

    def _changed(self, result: WorkloadResult, config: Mapping[str, Any]) -> WorkloadResult:
        return self._world.again(result, **config)

    def _stored(self, case: str, result: WorkloadResult) -> Baseline | None:
        stored = read_baseline(self._options.baselines_dir, result.platform, case)
        return stored and self._known(stored, result)

    def _known(self, stored: Baseline, result: WorkloadResult) -> Baseline:
        """Return the baseline with the defaults of config keys that were added after it was recorded."""
        return stored.replace(config=identity(self._world.defaults(result)) | stored.config)

    def _settle(
        self,
        compared: Compared,
        config: dict[str, Any],
        baseline: Baseline | None,
        result: WorkloadResult,
        launches: list[LaunchFacts],
    ) -> Verdicts:
        options, marked, case = self._options, self._spec.tolerances, compared.case
        priors = platform_priors(options.baselines_dir, result.platform, result.device, case)
        file, workload = str(compared.baseline or ""), result.workload
        stored = StoredComparison(case, config, baseline, marked, priors, options.max_launches, file, workload=workload)
        again = functools.partial(self._again, result, compared)
        # Under a profiler no times are compared, and the other metrics need no second launch.
        if options.ab is None or launches[0].profiler:
            return settle(stored, launches, again)
        verdicts = stored.judge(launches)
        if not (open_metrics := unsettled(verdicts, stored)):
            return verdicts
        paired = PairedComparison(case, marked, stored.variance, open_metrics, options.max_launches, options.ab)
        candidates: list[LaunchFacts] = []
        reference_again = functools.partial(self._again, result, compared, Side.REFERENCE, of_reference=True)
        settled = settle_pairs(paired, candidates, [], again, reference_again)
        launches += candidates
        return joined(verdicts, settled)

    def _learn(self, compared: Compared, config: dict[str, Any], result: WorkloadResult) -> Verdicts:
        """Launch as often as a baseline needs; the launches are stored if the test passes."""
        options, marked, case = self._options, self._spec.tolerances, compared.case
        if result.config.get(TEST_HOOK_KEY, {}) not in ({}, None):
            raise BaselineError(f"{case}: not recorded: the config plants a {TEST_HOOK_KEY}")
        launches = [launch_facts(result)]
        if profiler := launches[0].profiler:
            raise BaselineError(
                f"{case}: not recorded: ranks ran under {profiler}, which slows them; record without {profiler}"
            )
        recording = Recording(options, _new_baseline(case, self._record.nodeid, result, config, launches))
        wanted = launches_to_learn(marked, launches[0], options.launches)
        launches = recording.launches(wanted, functools.partial(self._again, result, compared))
        priors = platform_priors(options.baselines_dir, result.platform, result.device, case)
        problems = objections(launches, marked, priors)
        if problems and options.force_baseline is None:
            raise BaselineError(noisy_baseline_text(case, problems))
        new = _new_baseline(case, self._record.nodeid, result, config, launches)
        if problems:
            new = new.replace(forced={str(new.revision): str(options.force_baseline)})
        # Comparing the baseline with itself shows metrics that are missing or differ between launches.
        verdicts = StoredComparison(case, config, new, marked, priors, len(launches)).judge(launches)
        failing = verdicts.failing({Outcome.MISSING})
        if failing:
            raise ComparisonFailed(comparison_text(failing, result, launches, None))
        new_launches = NewLaunches(new, marked, identity(self._world.defaults(result)), options.reset_baselines)
        # Merge now, so that launches that can't be added fail the test. They are merged again when the session ends,
        # since other sessions may have updated the baseline by then.
        stored = new_launches.merged(options.baselines_dir)
        # The rest of the test may be interrupted.
        recording.keep(launches)
        self._record.new_launches.append(new_launches)
        noted = [f"  {recording.note}"] if recording.note else []
        self._record.detection[case] = [*noted, *detection_lines(stored, marked, priors, options.max_launches)]
        return verdicts

    def _compared(self, case: str, result: WorkloadResult, facts: LaunchFacts, baseline: Path | None) -> Compared:
        compared = Compared(
            case,
            baseline=None if baseline is None else str(baseline),
            platform=result.platform,
            workload=result.workload,
        )
        self._record.compared.append(compared)
        self._keep(compared, result, facts, Side.CANDIDATE)
        compared.measured = measured_values([facts])
        return compared

    def _keep(self, compared: Compared, result: WorkloadResult, facts: LaunchFacts, side: Side) -> None:
        compared.launches.append(MeasuredLaunch.of(facts, side))
        if folder := self._world.folder(result):
            (compared.candidate if side is Side.CANDIDATE else compared.reference).append(str(folder))

    def _kept(self, compared: Compared, result: WorkloadResult, side: Side) -> LaunchFacts:
        facts = launch_facts(result)
        self._keep(compared, result, facts, side)
        return facts

    def _again(
        self, result: WorkloadResult, compared: Compared, side: Side = Side.CANDIDATE, *, of_reference: bool = False
    ) -> LaunchFacts:
        """Launch again; ``of_reference`` launches the version that ``--aorta-ab`` names."""
        return self._kept(compared, passed(self._world.again(result, reference=of_reference)), side)

    def _judge(
        self,
        verdicts: Verdicts,
        result: WorkloadResult,
        launches: list[LaunchFacts],
        baseline: Path | None,
        compared: Compared,
        test: str = "",
    ) -> None:
        compared.measured = measured_values(launches)
        self._record.verdicts += verdicts.rows
        self._record.notes += verdicts.notes
        # Nothing is stored for an A/B comparison, so a metric that one side lacks always fails the test.
        failing = verdicts.failing(self._fail_on | {Outcome.MISSING} if baseline is None else self._fail_on)
        if failing:
            raise ComparisonFailed(comparison_text(failing, result, launches, baseline, verdicts.notes, test))


def _check_steps(steps: object) -> None:
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise SpecError(f"compare: steps is {steps!r}, allowed is an integer of 1 or more, or None")


def _check_label(method: str, label: object) -> None:
    if not isinstance(label, str) or not label.strip() or not label.isprintable():
        raise SpecError(f"{method}: label is {brief(repr(label))}, allowed is a text of one line")


def _names(metrics: object) -> tuple[str, ...]:
    """Return the names of metrics; a text in place of the list would be split into characters."""
    names = tuple(metrics) if isinstance(metrics, Iterable) and not isinstance(metrics, str) else None
    if names is None or not all(isinstance(name, str) for name in names):
        example = [metrics] if isinstance(metrics, str) else ["final_loss"]
        raise SpecError(f"compare: metrics is {metrics!r}, allowed is a list of names such as {example}, or None")
    return names


def _check_variant(side: str, given: object) -> None:
    is_mapping = isinstance(given, Mapping) and isinstance(given.get("workload"), str)
    if not is_mapping and not isinstance(given, WorkloadResult):
        raise SpecError(
            f"compare: the {side} is {given!r}, allowed is a result of this test, or a mapping with the name of a "
            f"workload at the key 'workload' and with config keys"
        )
    if isinstance(given, WorkloadResult):
        passed(given)


def _new_baseline(
    case: str, nodeid: str, result: WorkloadResult, config: dict[str, Any], launches: list[LaunchFacts]
) -> Baseline:
    stored = tuple(StoredLaunch(launch) for launch in launches)
    return Baseline(case, nodeid, result.platform, result.workload, config, stored)


def passed(result: WorkloadResult) -> WorkloadResult:
    """Return the result of a workload whose own checks have passed.

    Raises:
        WorkloadFailed: The checks found wrong values.
    """
    if not result.passed:
        raise WorkloadFailed(failed_checks_text(result))
    return result
