"""The ``workload`` fixture's object: launches workloads and compares them with a baseline or another variant."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pytest_aorta.common.errors import BaselineError, ComparisonFailed, LaunchError, NothingCompared, SpecError
from pytest_aorta.common.text import brief
from pytest_aorta.plan.options import FailOn
from pytest_aorta.plan.reference import git
from pytest_aorta.plan.workloads import ENVIRONMENT_KEY, WorkloadSpec, case_suffix, find_workload, resolve_config
from pytest_aorta.result.facts import LaunchFacts
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.result.series import first_other_weights
from pytest_aorta.session.baselines import Recording
from pytest_aorta.session.launcher import Launcher
from pytest_aorta.session.record import ComparedLaunch, Comparison, Side
from pytest_aorta.session.rounds import Repeated, comparison_text, in_pairs, passed, settle, with_baseline, with_both
from pytest_aorta.session.search import MAX_PAIRS, Bisection, CommitSearch
from pytest_aorta.session.world import DistributedWorld, check_result
from pytest_aorta.verdict.baseline import Baseline, StoredLaunch, baseline_path, read_baseline
from pytest_aorta.verdict.bitwise import (
    LOCATE,
    STEP_METRICS,
    compare_steps,
    first_difference,
    from_first_step,
    joined,
    locate_first,
    other_keys,
    split,
)
from pytest_aorta.verdict.comparison import PairedComparison, StoredComparison
from pytest_aorta.verdict.learning import with_every_step
from pytest_aorta.verdict.metrics import METRICS, check_compared, metric_of
from pytest_aorta.verdict.noise import Priors, platform_priors
from pytest_aorta.verdict.rows import identity
from pytest_aorta.verdict.statistics.decision import Outcome
from pytest_aorta.verdict.verdicts import Note, NoteKind, ReferenceKind, Verdict, Verdicts

# Config keys of checkpoints, and of a learning rate that may depend on the length of the run.
_SAVE, _LOAD, _SCHEDULE = "save_checkpoint", "load_checkpoint", "lr_schedule"
_CHANGED = (Outcome.REGRESSION, Outcome.IMPROVED)
N = TypeVar("N")
R = TypeVar("R")


class WorkloadRunner(DistributedWorld):
    """The object of the fixture ``workload``, which launches workloads in a test's world and compares their results."""

    def __init__(self, launcher: Launcher) -> None:
        super().__init__(launcher)
        self._session = launcher.session
        self._marked = launcher.spec.marked
        self._test = launcher.test
        fail_on = self._options.fail_on
        self._fail_on = frozenset(Outcome[word.name] for word in fail_on - {FailOn.MARKED_INCONCLUSIVE})
        self._of_marked = {Outcome.INCONCLUSIVE} if FailOn.MARKED_INCONCLUSIVE in fail_on else set()
        self._checked: set[str] = set()

    def _returned(self, result: WorkloadResult) -> WorkloadResult:
        return passed(result)

    def check(self, result: WorkloadResult, *, label: str | None = None) -> Verdicts:
        """Compare a result with the stored baseline of this test, and fail the test on a failing verdict.

        If one launch is not enough for a verdict, the workload is launched again, up to ``--aorta-max-launches`` times
        in total. With ``--aorta-ab``, these launches alternate with launches of the version that the option names. With
        ``--update-baselines``, the result and further launches become the baseline if the test passes. ``label``
        distinguishes the comparisons of one test; its default is the workload's name.

        Raises:
            ComparisonFailed: A verdict fails the test.
            NothingCompared: All that fails the test is that metrics are missing.
            BaselineError: The baseline can't be read, or the launches can't be added to it.
            WorkloadFailed: The workload's own checks failed in the launch of ``result`` or in a further launch.
            SpecError: An argument is not allowed, an earlier comparison of this test has the same label, a marker was
                added after the world was made, or as in
                :meth:`~pytest_aorta.session.world.DistributedWorld.again`.
            LaunchError, ResultError: As in :meth:`~pytest_aorta.session.world.DistributedWorld.again`.
        """
        self._test.check()
        check_result("check", result)
        case = self._case(passed(result), label)
        path = baseline_path(self._options.baselines_dir, result.platform, case)
        comparison = self._begun(case, ReferenceKind.BASELINE, (Side.CANDIDATE, result), baseline=path)
        if self._session.bisection:
            return self._search(comparison, result, self._session.bisection)
        if self._options.update_baselines:
            return self._learn(comparison, result)
        stored = self._stored(comparison, result, read_baseline(self._options.baselines_dir, result.platform, case))
        facts, version = comparison.launches[0].facts, self._options.ab
        # Under a profiler no times are compared, and the other metrics need no second launch.
        is_alone = version is None or facts.profiler
        comparing = with_baseline(stored, facts) if is_alone else with_both(stored, facts, str(version))
        again = {Side.CANDIDATE: (result, False), Side.REFERENCE: (result, True)}
        verdicts, comparison = self._settled(comparison, comparing, again)

        def again_with_places() -> Verdicts:
            return stored.judge([self._repeat(result, locates_costs=True).facts])

        def located(comparison: Comparison, failing: Sequence[Verdict]) -> Comparison:
            comparison = self._located_in_script(result, stored.baseline, comparison, failing)
            return self._costs_located(again_with_places, self._options.locate, comparison, failing)

        return self._concluded(comparison, verdicts, located)

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
        ``--aorta-max-launches`` pairs. With ``locate``, a further launch of each names the lines of changed costs.

        ``label`` names the comparison in reports and in the history. If a test compares several times with one label,
        later comparisons are numbered from 2.

        Raises:
            ComparisonFailed: The variants differ, the candidate is worse, or one variant lacks a metric.
            WorkloadFailed: The workload's own checks failed in a launch.
            SpecError: An argument or a config is not allowed, or a search for a commit runs the test.
            LaunchError, ResultError: As in :meth:`~pytest_aorta.session.world.DistributedWorld.run` and
                :meth:`~pytest_aorta.session.world.DistributedWorld.again`.
        """
        self._check_arguments("compare", label, steps)
        if locate is not None and not isinstance(locate, bool):
            raise SpecError(f"compare: locate is {locate!r}, allowed is True, False or None")
        chosen = None if metrics is None else _names(metrics)
        if steps is None and chosen is not None:
            check_compared(chosen, METRICS)
        by_step, by_launch = split(chosen) if steps is not None else ([], chosen)
        for side, given in (("candidate", candidate), ("reference", reference)):
            _check_variant(side, given)
        there, here = self._variant(reference, steps), self._variant(candidate, steps)
        case = self._case_of_variants(label)
        comparison = self._begun(case, ReferenceKind.AB, (Side.CANDIDATE, here), (Side.REFERENCE, there))
        is_asked = self._options.locate if locate is None else locate
        if steps is not None:
            verdicts = Verdicts(comparison.case, compare_steps(comparison.case, here, there, steps, by_step))
            if not by_launch or verdicts.failing(self._fail_on | {Outcome.MISSING}):
                located = partial(self._located, here, there, steps, with_launches=is_asked)
                return self._concluded(comparison, verdicts, located)
            comparison = comparison.replace(rows=verdicts.rows)
        version, most = self._other_version(here, there), self._options.max_launches
        priors = self._priors(here, comparison.case)
        pairs = PairedComparison(comparison.case, self._marked, priors, by_launch, most, version)
        facts = [[launch.facts] for launch in comparison.launches]
        comparing = in_pairs(pairs, *facts, reference_first=self.launcher.is_before(there, here))
        again = {Side.CANDIDATE: (here, False), Side.REFERENCE: (there, False)}
        verdicts, comparison = self._settled(comparison, comparing, again)

        def again_with_places() -> Verdicts:
            placed = [self._repeat(result, locates_costs=True).facts for result in (here, there)]
            return pairs.judge(placed[:1], placed[1:])

        return self._concluded(comparison, verdicts, partial(self._costs_located, again_with_places, is_asked))

    def compare_restart(
        self,
        config: Mapping[str, Any],
        *,
        steps: int,
        after: int,
        into: Mapping[str, Any] | None = None,
        ranks: tuple[int, int] | None = None,
        metrics: Iterable[str] | None = None,
        label: str = "restart",
    ) -> Verdicts:
        """Train ``steps`` steps, then again with new processes after a checkpoint; fail the test if a bit differs.

        The workload is launched three times: straight on; for ``after`` steps, at whose end it saves a checkpoint; and
        for the other steps from this checkpoint. The loss, gradient norm and weight hash of each step must be bitwise
        equal, aligned by the number of the training step. The order of data, random state, learning rate and state of
        the optimizer show in them.

        Args:
            config: The workload, at the key ``workload``, and config keys.
            steps: Training steps in total.
            after: The step after which training is restarted.
            into: Config keys that differ after the restart, such as another layout that has equal bits.
            ranks: Number of ranks before and after the restart, the first ones of the test's world; all by default.
            metrics: Which of loss, grad_norm and weight_hash are compared; all by default.
            label: As in :meth:`compare`.

        Raises:
            ComparisonFailed: A value of a step differs.
            SpecError: An argument is not allowed, the workload has no checkpoints, or its learning rate depends on the
                number of steps.
            WorkloadFailed, LaunchError, ResultError: As in :meth:`compare`.
        """
        self._check_arguments("compare_restart", label, steps)
        _check_variant("config", config, "compare_restart")
        if isinstance(after, bool) or not isinstance(after, int) or not 0 < after < steps:
            raise SpecError(f"compare_restart: after is {after!r}, allowed is an integer from 1 to {steps - 1}")
        before, after_it = self._restarted(ranks)
        by_step = [*STEP_METRICS] if metrics is None else [*_names(metrics)]
        check_compared(by_step, STEP_METRICS)
        changed = {**config, **(into or {})}
        for given in (config, changed):
            _check_restarts(find_workload(given["workload"], self._options.workload_dirs), given)
        with tempfile.TemporaryDirectory(dir=self.launcher.shared_folder(), prefix="checkpoint-") as folder:
            straight = self._variant(config, steps, before)
            saved = self._variant({**config, _SAVE: folder}, after, before)
            resumed = self._variant({**changed, _LOAD: folder}, steps - after, after_it)
        here, case = joined(saved, resumed), self._case_of_variants(label)
        comparison = self._begun(case, ReferenceKind.AB, (Side.CANDIDATE, here), (Side.REFERENCE, straight))
        verdicts = Verdicts(comparison.case, compare_steps(comparison.case, here, straight, steps, by_step))
        return self._concluded(comparison, verdicts, partial(self._located, here, straight, steps, with_launches=False))

    def _check_arguments(self, method: str, label: object, steps: object) -> None:
        """Refuse wrong arguments of a comparison of variants, and a world or a run of pytest that can't compare them.

        Raises:
            SpecError: An argument is not allowed, or a search for a commit runs the test.
        """
        self._test.check()
        if self._session.bisection:
            used = "workload.compare" if method == "compare" else method
            raise SpecError(f"aorta bisect: the test uses {used}; name a test that uses workload.check")
        _check_label(method, label)
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise SpecError(f"{method}: steps is {steps!r}, allowed is an integer of 1 or more, or None")
        if steps is not None and self.launcher.world.simulated:
            self._test.lacks("compares values step by step, which a simulated world does not have")

    def _case(self, result: WorkloadResult, label: str | None) -> str:
        if label is not None:
            _check_label("check", label)
        environment = case_suffix(result.config.get(ENVIRONMENT_KEY, {}))
        case = f"{self._test.record.nodeid}::{label or result.workload}{environment}"
        if case in self._checked:
            raise SpecError(f"{case}: compared twice in one test; give each one a label: check(result, label=...)")
        self._checked.add(case)
        return case

    def _case_of_variants(self, label: str) -> str:
        """Return the case of a comparison of variants; a number distinguishes comparisons with the same label."""
        first, taken = f"{self._test.record.nodeid}::{label}", {one.case for one in self._test.record.comparisons}
        numbered = (f"{first} {number}" for number in itertools.count(2))
        return next(case for case in itertools.chain([first], numbered) if case not in taken)

    def _restarted(self, ranks: object) -> list[WorkloadRunner]:
        """Return the worlds before and after a restart."""
        size = self.size
        if ranks is None:
            return [self, self]
        match ranks:
            case (int(), int()) if min(ranks) > 0 and max(ranks) <= size and self.launcher.world.nodes == 1:
                return [WorkloadRunner(self.launcher.first(count)) for count in ranks]
        raise SpecError(f"compare_restart: ranks is {ranks!r}, allowed are two numbers from 1 to {size}, on one node")

    def _variant(
        self, given: WorkloadResult | Mapping[str, Any], steps: int | None, world: WorkloadRunner | None = None
    ) -> WorkloadResult:
        if isinstance(given, WorkloadResult):
            return given
        config = _without_name(given)
        spec = find_workload(given["workload"], self._options.workload_dirs)
        if steps is not None:
            config = {key: value for key, value in from_first_step(steps).items() if key in spec.properties} | config
        return (world or self).run(spec.name, **config)

    def _begun(
        self, case: str, kind: ReferenceKind, *launched: tuple[Side, WorkloadResult], baseline: Path | None = None
    ) -> Comparison:
        first = launched[0][1]
        launches = tuple(itertools.starmap(self._compared, launched))
        return Comparison(case, kind, first.platform, first.workload, launches, baseline=str(baseline or ""))

    def _compared(self, side: Side, result: WorkloadResult) -> ComparedLaunch:
        return ComparedLaunch(side, result.facts, str(self._folder(result) or ""))

    def _stored(self, comparison: Comparison, result: WorkloadResult, baseline: Baseline | None) -> StoredComparison:
        if baseline:
            # A key that was added after the baseline was recorded had its default then.
            baseline = baseline.replace(config=self._defaults(result) | baseline.config)
        case, config, file = comparison.case, identity(result.config), comparison.baseline
        priors, most = self._priors(result, case), self._options.max_launches
        return StoredComparison(case, config, baseline, self._marked, priors, most, file, workload=result.workload)

    def _priors(self, result: WorkloadResult, case: str) -> Priors:
        return platform_priors(self._options.baselines_dir, result.platform, result.device, case)

    def _defaults(self, result: WorkloadResult) -> dict[str, Any]:
        launch = self.launcher.find(result)
        return identity(launch.defaults) if launch else {}

    def _learn(self, comparison: Comparison, result: WorkloadResult) -> Verdicts:
        launches, test = (StoredLaunch(comparison.launches[0].facts),), self._test.record.nodeid
        first = Baseline(comparison.case, test, result.platform, result.workload, result.config, launches)
        old = read_baseline(self._options.baselines_dir, first.platform, first.case)
        recording = Recording(first, self._marked, self._options, old, self._defaults(result))
        learned, comparison = self._settled(comparison, recording.launched(), {Side.CANDIDATE: (result, False)})
        new, verdicts = learned
        compared = comparison.replace(rows=verdicts.rows)
        if self._options.fail_on and compared.compared_nothing:  # as the comparison with this baseline would fail
            self._test.compared(comparison)
            again = Repeated(self._options.argument_of(test), self._options.repeated, is_recording=True)
            raise ComparisonFailed(comparison_text(compared, [], again))
        hashed = self._refuse_varying(comparison.case, result, is_alone=len(new.launches) == 1)
        if hashed is not None:
            new = with_every_step(new, hashed.facts, self._marked)
        self._test.compared(comparison.replace(new=recording.merged(new)))
        return verdicts

    def _refuse_varying(self, case: str, result: WorkloadResult, *, is_alone: bool) -> WorkloadResult | None:
        """Check that launches of the same code compute the same weights; launch again if the result is alone.

        Return the launch of a script that hashed every step, so that later differences are located.

        Raises:
            BaselineError: The weights differ; the message says which parameters differ first.
        """
        launch = self.launcher.find(result)
        if launch is None or not result.weight_hashes or not result.environment.get("bitwise_reproducible", True):
            return None
        hashed = self._hashing_every_step(result)
        same = [other.result for other in self.launcher.launches if other.request == launch.request]
        others = [other for other in same if other is not result]
        if is_alone and not others and hashed is None:
            others = [self.again(result)]
        steps = result.total_iterations
        found = ((other, first_difference(other, result, steps, ["weight_hash"])) for other in others)
        lines: list[object] = []
        if varying := next(((other, first) for other, first in found if first is not None), None):
            lines = [*locate_first(varying[0], result, varying[1], (), None, self._folder)]
        elif hashed is not None:
            # A hash of all optimizers would not do: it covers those that were hashed in a step.
            lines = [first_other_weights(passed(hashed).facts.series, result.facts.series)]
        if any(lines):
            raise BaselineError(
                f"{case}: not recorded, because two launches of the same code compute different weights:"
                + "".join(f"\n  {line}" for line in lines)
                + "\n  next: set the seed before the model is made, give every parameter a value, and start from one "
                "checkpoint; or do not record weights (recorder.weights, hash_weights, hash_every)"
            )
        return hashed

    def _search(self, comparison: Comparison, result: WorkloadResult, bisection: Bisection) -> Verdicts:
        """Search for the commit that changed a metric of a comparison."""
        request, only = self.launcher.launch_of(result).request, bisection.request.metric
        priors, good = self._priors(result, comparison.case), bisection.commits[0][:12]
        pairs = PairedComparison(comparison.case, self._marked, priors, only and [only], MAX_PAIRS, good)

        def launched(number: int) -> LaunchFacts:
            return passed(self.launcher.launch(request, bisection.commit(number)).result).facts

        return CommitSearch(bisection, pairs, comparison.launches[0].facts, launched, self._session.say).run()

    def _settled(
        self,
        comparison: Comparison,
        comparing: Generator[Side, LaunchFacts, R],
        again: Mapping[Side, tuple[WorkloadResult, bool]],
    ) -> tuple[R, Comparison]:
        """Launch what a comparison asks for; return what it returns, and its launches.

        ``again`` maps each side to a result whose launch is repeated, and whether its A/B reference is launched.
        """
        launches = [*comparison.launches]

        def launched(side: Side) -> LaunchFacts:
            result, of_reference = again[side]
            launches.append(self._compared(side, self.again(result, reference=of_reference)))
            return launches[-1].facts

        try:
            found = settle(comparing, launched)
        except BaseException:
            self._test.compared(comparison.replace(launches=tuple(launches)))
            raise
        return found, comparison.replace(launches=tuple(launches))

    def _concluded(
        self,
        comparison: Comparison,
        verdicts: Verdicts,
        located: Callable[[Comparison, Sequence[Verdict]], Comparison] | None = None,
    ) -> Verdicts:
        """Add a comparison with its verdicts to the test, and fail the test on a failing verdict."""
        # Nothing is stored for an A/B comparison, so a metric that one side lacks always fails the test.
        fail_on = self._fail_on | {Outcome.MISSING} if comparison.kind is ReferenceKind.AB else self._fail_on
        failing = verdicts.failing(fail_on, self._of_marked)
        comparison = comparison.replace(
            rows=(*comparison.rows, *verdicts.rows), notes=verdicts.notes, suspect=verdicts.suspect
        )
        is_nothing = bool(self._options.fail_on) and comparison.compared_nothing
        raised = failing or (comparison.rows if is_nothing else ())
        comparison = comparison.replace(failing=tuple(row.metric for row in raised))
        try:
            comparison = located(comparison, failing) if failing and located else comparison
        finally:
            self._test.compared(comparison)
        details = {row.metric: row.detail for row in comparison.rows}
        failing = [row.replace(detail=details[row.metric]) for row in failing]
        if failing or is_nothing:
            text = comparison_text(comparison, failing, self._repeated(comparison.baseline))
            if all(row.outcome is Outcome.MISSING for row in failing):
                raise NothingCompared(text)
            raise ComparisonFailed(text, tuple(row.metric for row in failing))
        return Verdicts(comparison.case, comparison.rows, comparison.notes)

    def _repeated(self, baseline: str) -> Repeated:
        """Return how this test is repeated; git is asked for the commit that last changed the baseline."""
        found: list[str] = []
        if baseline:
            file = Path(baseline)
            with suppress(SpecError, OSError):
                found = git(file.parent, "log", "-1", "--format=%h%n%cr%n%D", "--", file.name).splitlines()
        has_later = bool(found) and not found[-1].startswith("HEAD")
        commit = [*found[:2], *(["deleted since"] if found and not file.exists() else [])]
        options = [word for word in self._options.repeated if not word.startswith("--aorta-ab=")]
        return Repeated(self._options.argument_of(self._test.record.nodeid), options, tuple(commit), has_later)

    def _costs_located(
        self, again: Callable[[], Verdicts], is_asked: bool, comparison: Comparison, failing: Sequence[Verdict]
    ) -> Comparison:
        """Return a comparison whose changed costs name lines and modules, by ``again``, which launches for these."""
        changed = [row for row in failing if metric_of(row.metric).cost and row.outcome in _CHANGED]
        if not changed:
            return comparison
        note = Note(f"{LOCATE} launches once more to name the lines and modules of these costs", NoteKind.LOCATE)
        if is_asked:
            try:
                found = {(row.metric, row.outcome, row.value): row.detail for row in again().rows}
            except (LaunchError, SpecError) as error:
                note = Note(f"not located, because a launch failed: {error}")
            else:
                rows = (
                    row.replace(detail=found.get((row.metric, row.outcome, row.value), row.detail))
                    for row in comparison.rows
                )
                return comparison.replace(rows=tuple(rows))
        return comparison.replace(notes=(*comparison.notes, note))

    def _located_in_script(
        self, result: WorkloadResult, baseline: Baseline | None, comparison: Comparison, failing: Sequence[Verdict]
    ) -> Comparison:
        """Return the comparison of a script with a note on where its weights first differ, by one more launch."""
        hashed = [(row, METRICS[row.metric].hashed) for row in failing if row.metric in METRICS]
        found = [(row, kind) for row, kind in hashed if kind and row.outcome is Outcome.REGRESSION]
        if not found or not result.ranks[0].series:
            return comparison
        if not self._options.locate:
            text = f"{LOCATE} launches once more to find the step, the parameters and the rank"
            note = Note(text, NoteKind.LOCATE)
            return comparison.replace(notes=(*comparison.notes, note))
        row, kind = found[0]
        is_by_ab = row.reference.is_ab
        try:
            here = self._hashing_every_step(result)
            other = self._hashing_every_step(result, reference=True) if is_by_ab else None
        except LaunchError as error:
            return comparison.replace(notes=(*comparison.notes, Note(f"not located, because a launch failed: {error}")))
        if here is None or (other is None and (is_by_ab or baseline is None)):
            return comparison
        # The launch of the baseline that has the hashes of every step.
        recorded = baseline.center_launches if baseline else []
        there = other.facts if other else max(recorded, key=_num_hashes)
        where = first_other_weights(here.facts.series, there.series, kind)
        text = where or f"no {kind} differ, so launches of the same code differ"
        note = Note(f"launched once more with hashes of every step: {text}")
        return comparison.replace(notes=(*comparison.notes, note))

    def _located(
        self,
        here: WorkloadResult,
        there: WorkloadResult,
        steps: int,
        comparison: Comparison,
        failing: Sequence[Verdict],
        *,
        with_launches: bool,
    ) -> Comparison:
        """Return a comparison step by step whose notes locate the first difference."""
        found = [Note(f"config: {keys}")] if (keys := other_keys(here, there)) else []
        different = [row.metric for row in failing if row.outcome is Outcome.REGRESSION]
        if difference := first_difference(here, there, steps, different):
            launches = [launch for launch in map(self.launcher.find, (here, there)) if launch]
            unchecked = DistributedWorld(self.launcher)
            shared = launches[0].defaults.keys() & launches[1].defaults.keys() if len(launches) == 2 else ()
            again = (lambda result, config: unchecked.again(result, **config)) if with_launches else None
            found += locate_first(here, there, difference, shared, again, self._folder)
        names = dict.fromkeys([here.workload, there.workload])
        return comparison.replace(workload=" against ".join(names), notes=tuple(found))

    def _repeat(self, result: WorkloadResult, **changes: Any) -> WorkloadResult:
        return self.launcher.repeat(self.launcher.launch_of(result), **changes).result

    def _hashing_every_step(self, result: WorkloadResult, *, reference: bool = False) -> WorkloadResult | None:
        """Repeat the launch of a script, or launch its A/B reference, with hashes of every step.

        None if the script's weights are not hashed by the recorder of optimizer steps.
        """
        launch = self.launcher.find(result)
        if launch is None or launch.request.record is None or not launch.request.record.hash_weights:
            return None
        record = launch.request.record.replace(hash_every_step=True)
        return self.launcher.repeat(launch, reference=reference, record=record).result

    def _folder(self, result: WorkloadResult) -> Path | None:
        launch = self.launcher.find(result)
        return launch.plan.run_dir if launch else None

    def _other_version(self, candidate: WorkloadResult, reference: WorkloadResult) -> str:
        """Return the version that ``reference`` ran, if only the version differs between both sides; else empty."""
        here, there = self.launcher.find(candidate), self.launcher.find(reference)
        if here is None or there is None or there.plan.reference is None:
            return ""
        is_same = (here.request, here.plan.reference) == (there.request, None)
        return there.plan.reference.name if is_same else ""


def _num_hashes(facts: LaunchFacts) -> int:
    return sum(len(series.weights) for series in facts.series)


def _check_restarts(spec: WorkloadSpec, config: Mapping[str, Any]) -> None:
    """Check that a workload can go on from a checkpoint, and computes the same when it does."""
    if absent := sorted({_SAVE, _LOAD} - set(spec.properties)):
        raise SpecError(f"compare_restart: workload {spec.name!r} has no config key {absent[0]}, so it can't go on")
    schedule = resolve_config(spec, _without_name(config)).get(_SCHEDULE) or {}
    if schedule.get("kind", "constant") != "constant" and schedule.get("steps") is None:
        raise SpecError(
            f"compare_restart: {_SCHEDULE}.steps is null, so the learning rate depends on the number of steps of each "
            f"launch, and a restart changes it; allowed is the number of all training steps"
        )


def _without_name(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config keys of a variant."""
    return {key: value for key, value in config.items() if key != "workload"}


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


def _check_variant(side: str, given: object, method: str = "compare") -> None:
    is_mapping = isinstance(given, Mapping) and isinstance(given.get("workload"), str)
    if not is_mapping and (method != "compare" or not isinstance(given, WorkloadResult)):
        raise SpecError(
            f"{method}: the {side} is {given!r}, allowed is a result of this test, or a mapping with the name of a "
            f"workload at the key 'workload' and with config keys"
        )
    if isinstance(given, WorkloadResult):
        passed(given)
