"""The two fixtures. They hand out handles: whatever fails, fails inside the test that asked for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeAlias, TypeVar

import pytest

from pytest_aorta.baseline import Baseline, StoredLaunch, baseline_path, read_baseline
from pytest_aorta.comparison import TEST_HOOK_KEY, PairedComparison, StoredComparison, identity
from pytest_aorta.decision import Outcome
from pytest_aorta.devices import Device, World, resolve_world
from pytest_aorta.diagnosis import launch_failure
from pytest_aorta.errors import (
    AortaError,
    BaselineError,
    ComparisonFailed,
    DevicesUnavailable,
    LaunchError,
    SpecError,
    WorkloadFailed,
)
from pytest_aorta.facts import LaunchFacts, launch_facts
from pytest_aorta.files import slug
from pytest_aorta.launch import LaunchOutcome, launch_times_s
from pytest_aorta.learning import detection_lines, launches_to_learn, merged, objections
from pytest_aorta.leasing import LeasedWorld
from pytest_aorta.locating import difference_text, locate_first
from pytest_aorta.markers import TestSpec
from pytest_aorta.metrics import METRICS, measured_values
from pytest_aorta.numerics import compare_steps, first_difference, from_first_step, split
from pytest_aorta.options import Options
from pytest_aorta.plan import FORKSERVER, TORCHRUN, LaunchPlan, LaunchRequest, at_reference
from pytest_aorta.priors import platform_priors
from pytest_aorta.records import Compared, LaunchTimes, TestRecord
from pytest_aorta.reference import Reference, References
from pytest_aorta.reporting import comparison_text, failed_checks_text, noisy_baseline_text
from pytest_aorta.result import WorkloadResult
from pytest_aorta.spec import default_config, find_workload, resolve_config
from pytest_aorta.trials import joined, settle, settle_pairs, unsettled
from pytest_aorta.validation import collect_result
from pytest_aorta.verdicts import Verdict, Verdicts

P = ParamSpec("P")
T = TypeVar("T")
Launcher: TypeAlias = Callable[[LaunchPlan], LaunchOutcome]
WARM = {True: FORKSERVER, False: TORCHRUN}


def _in_test(method: Callable[P, T]) -> Callable[P, T]:
    """Raise errors with the test's frames only: ours say nothing about the cause."""

    @functools.wraps(method)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        __tracebackhide__ = True
        try:
            return method(*args, **kwargs)
        except AortaError as error:
            failure = error
        raise failure.with_traceback(None) from None

    return wrapper


class DistributedWorld:
    """The devices a test has leased and how ranks are started on them.

    Attributes:
        size: ranks, one a device.
        device: ``cuda`` or ``cpu``.
        backend: of the process group.
        platform: key of the baselines.
        timeout_s: time limit of one launch.
    """

    def __init__(
        self,
        world: World,
        leased: LeasedWorld,
        options: Options,
        spec: TestSpec,
        run_base: Path,
        record: TestRecord,
        launcher: Launcher,
        references: References,
    ) -> None:
        self._leased = leased
        self._references = references
        # By identity, with the result, whose id would be another's once it is gone.
        self._requests: dict[int, tuple[WorkloadResult, LaunchRequest, Reference | None]] = {}
        self._folders: dict[int, Path] = {}
        self._launcher = launcher
        self._options = options
        self._run_base = run_base
        self._record = record
        self._kind_of_launcher = options.launcher if spec.world.warm is None else WARM[spec.world.warm]
        self.size = world.size
        self.device = world.device
        self.backend = world.backend
        self.platform = world.platform
        self.timeout_s = spec.timeout_s or options.timeout_s

    @_in_test
    def launch(self, name: str, /, **config: Any) -> WorkloadResult:
        """Launch a workload once and return its validated result, whatever its own checks found.

        Raises:
            SpecError: no such workload, config key or value; nothing was started then.
            LaunchError: a rank failed; the message names the first one.
            ResultError: the ranks left no valid result.
        """
        spec = find_workload(name, self._options.workload_dirs)
        return self._launch(LaunchRequest(name, spec, resolve_config(spec, config), None, ()))

    @_in_test
    def launch_script(self, script: str | Path, args: tuple[str, ...] = ()) -> WorkloadResult:
        """Launch a script (a path ending in ``.py``, or a dotted module) that records through the recorder."""
        target = str(script)
        if target.endswith(".py"):
            path = self._options.rootdir / target
            if not path.is_file():
                raise SpecError(f"script {target!r}: there is no file {path}")
            target = str(path)
        elif not all(part.isidentifier() for part in target.split(".")):
            raise SpecError(f"script {target!r}: allowed is a path ending in .py or a dotted module name")
        return self._launch(LaunchRequest(Path(script).name, None, {"args": list(args)}, target, args))

    @_in_test
    def again(self, result: WorkloadResult, *, reference: bool = False, **config: Any) -> WorkloadResult:
        """Launch once more what ``result`` came from, or the reference version of it, and return that result.

        A result of the reference version comes from that version again. ``config`` are keys to change.

        Raises:
            SpecError: this world has not launched it, it is a script's and takes no config, or there is no reference
                version of it; nothing was started then.
            LaunchError, ResultError: as :meth:`launch`.
        """
        request, version = self._origin(result)
        if request is None:
            raise SpecError(f"a result of {result.workload!r} was not launched by this test, so not again either")
        if config:
            if request.spec is None:
                raise SpecError(f"script {request.name!r} has arguments and no config keys to change: {sorted(config)}")
            request = replace(request, config=resolve_config(request.spec, request.config | config))
        return self._launch(request, self._references.open() if reference else version)

    def config_keys(self, result: WorkloadResult) -> set[str]:
        """What :meth:`again` can change of what ``result`` came from; none, where this world has not launched it."""
        request, _ = self._origin(result)
        return set(request.spec.properties) if request and request.spec else set()

    def defaults(self, result: WorkloadResult) -> dict[str, Any]:
        """What keys are where the config that ``result`` came from does not give them; none for a script."""
        request, _ = self._origin(result)
        return default_config(request.spec, request.config) if request and request.spec else {}

    def folder(self, result: WorkloadResult) -> Path | None:
        """Where the launch that ``result`` came from left its files; None where this world has not launched it."""
        return self._folders[id(result)] if self._origin(result)[0] else None

    def _origin(self, result: WorkloadResult) -> tuple[LaunchRequest | None, Reference | None]:
        """The request that ``result`` came from, and the version it ran; no request if not of this world."""
        # By identity, and an id may be that of an object that is gone.
        launched, request, version = self._requests.get(id(result), (None, None, None))
        return (request, version) if launched is result else (None, None)

    def _launch(self, request: LaunchRequest, reference: Reference | None = None) -> WorkloadResult:
        launched = at_reference(request, reference) if reference else request
        self._record.num_launches += 1
        plan = LaunchPlan(
            **vars(launched),
            world=self._leased.world(),
            timeout_s=self.timeout_s,
            run_dir=_new_folder(self._run_base, request.name),
            cwd=reference.root if reference else self._options.rootdir,
            launcher=self._kind_of_launcher,
            lease_fds=self._leased.fds,
            reference=reference,
        )
        outcome = self._launcher(plan)
        times = LaunchTimes(self._record.num_launches, outcome.launcher, launch_times_s(outcome))
        self._record.launch_times.append(times)
        self._leased.note(outcome)
        if failure := launch_failure(plan, outcome):
            raise LaunchError(failure.text, failure.kind, failure.rank)
        result = collect_result(plan, outcome)
        self._requests[id(result)] = (result, request, reference)
        self._folders[id(result)] = plan.run_dir
        return result


class WorkloadRunner:
    """Runs workloads in a test's world and compares what they measured."""

    def __init__(self, world: DistributedWorld, options: Options, spec: TestSpec, record: TestRecord) -> None:
        self._world = world
        self._options = options
        self._spec = spec
        self._record = record

    @_in_test
    def run(self, name: str, /, **config: Any) -> WorkloadResult:
        """Launch a workload and return its result.

        Raises:
            WorkloadFailed: its own checks found wrong values; the message locates them.
            SpecError, LaunchError, ResultError: as :meth:`DistributedWorld.launch`.
        """
        return _passed(self._world.launch(name, **config))

    @_in_test
    def run_script(self, script: str | Path, args: tuple[str, ...] | list[str] = ()) -> WorkloadResult:
        """Launch your own training script and return what it recorded; errors as :meth:`run`."""
        return _passed(self._world.launch_script(script, tuple(map(str, args))))

    @_in_test
    def check(self, result: WorkloadResult, *, label: str | None = None) -> Verdicts:
        """Compare a result with the stored baseline of this test, and fail the test on a failing verdict.

        Where one launch decides nothing, the same is launched again, ``--aorta-max-launches`` times in all, or in
        turn with the version that ``--aorta-ab`` names. ``label`` tells the comparisons of one test apart; it
        defaults to the workload's name. Under ``--update-baselines`` the result and further launches become the
        baseline, if the test passes.

        Raises:
            ComparisonFailed: a regression, or a missing baseline where that fails.
            BaselineError: the baseline can't be read, or what was measured can't be added to it.
            SpecError, LaunchError, ResultError: as :meth:`DistributedWorld.again`.
        """
        case = f"{self._record.nodeid}::{label or result.workload}"
        if case in self._record.used_cases:
            raise SpecError(
                f"{case}: compared twice in one test; give each comparison a label: check(result, label=...)"
            )
        self._record.used_cases.append(case)
        path = baseline_path(self._options.baselines_dir, result.platform, case)
        compared = self._compared(case, result, None if self._options.update_baselines else path)
        facts, config = launch_facts(result), identity(result.config)
        if self._options.update_baselines:
            return self._learn(compared, config, result)
        baseline = self._stored(case, result)
        if baseline is None and self._options.missing_baseline == "record":
            self._record.new_baselines.append(_new_baseline(case, self._record.nodeid, result, config, [facts]))
        launches = [facts]
        verdicts = self._settle(compared, config, baseline, result, launches)
        self._judge(verdicts, result, launches, path, compared)
        return verdicts

    @_in_test
    def compare(
        self,
        candidate: WorkloadResult | Mapping[str, Any],
        reference: WorkloadResult | Mapping[str, Any],
        *,
        steps: int | None = None,
        metrics: Collection[str] | None = None,
        label: str = "A/B",
        locate: bool | None = None,
    ) -> Verdicts:
        """Compare two variants in this test's world, the reference in the baseline's place, and fail where they differ.

        Each is a result of this test, or a mapping that is launched here: the key ``workload`` and config keys.

        With ``steps``, the loss, gradient norm and weight hash of each of the first ``steps`` measured steps have to be
        the same to the bit, and the first difference is located; ``locate``, by default ``--aorta-locate``, launches
        both once more for that. Mappings are launched with these steps from the first one on, each hashed. ``metrics``
        limits it to those named.

        Without ``steps``, ``metrics`` are the launches' own, or all that a baseline is compared by. What has noise is
        launched again, both in turn, until ``--aorta-max-pairs`` pairs have been compared.

        Raises:
            ComparisonFailed: a difference or a regression, or a metric that one of them lacks.
            SpecError, LaunchError, ResultError: as :meth:`DistributedWorld.launch` and :meth:`DistributedWorld.again`.
        """
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise SpecError(f"compare: steps is {steps!r}, allowed is an integer of 1 or more, or None")
        by_step, by_launch = split(metrics) if steps is not None else ([], metrics)
        for side, given in (("candidate", candidate), ("reference", reference)):
            _refuse_no_variant(side, given)
        there, here = self._variant(reference, steps), self._variant(candidate, steps)
        case = f"{self._record.nodeid}::{label}"
        compared = self._compared(case, here, None)
        self._keep(compared.reference, there)
        rows: tuple[Verdict, ...] = ()
        if steps is not None:
            rows = compare_steps(case, here, there, steps, by_step)
            self._judge_steps(Verdicts(case, rows), here, there, steps, locate)
            if not by_launch:
                return Verdicts(case, rows)
        candidates, references = [launch_facts(here)], [launch_facts(there)]
        priors = platform_priors(self._options.baselines_dir, here.platform, here.device, case)
        comparison = PairedComparison(case, self._spec.tolerances, priors, by_launch, self._options.max_pairs)
        again = (
            functools.partial(self._again, here, compared.candidate),
            functools.partial(self._again, there, compared.reference),
        )
        verdicts = settle_pairs(comparison, candidates, references, *again)
        self._judge(verdicts, here, candidates, None, compared)
        return replace(verdicts, rows=(*rows, *verdicts.rows))

    def _variant(self, given: WorkloadResult | Mapping[str, Any], steps: int | None) -> WorkloadResult:
        if isinstance(given, WorkloadResult):
            return given
        config = {key: value for key, value in given.items() if key != "workload"}
        spec = find_workload(given["workload"], self._options.workload_dirs)
        if steps is not None:
            config = {key: value for key, value in from_first_step(steps).items() if key in spec.properties} | config
        return _passed(self._world.launch(spec.name, **config))

    def _judge_steps(
        self,
        verdicts: Verdicts,
        candidate: WorkloadResult,
        reference: WorkloadResult,
        steps: int,
        locate: bool | None,
    ) -> None:
        self._record.verdicts += verdicts.rows
        failing = verdicts.failing(strict=self._options.strict, missing_fails=True)
        if not failing:
            return
        found: list[str] = []
        odd = [row.metric for row in failing if row.outcome is Outcome.REGRESSION]
        if difference := first_difference(candidate, reference, steps, odd):
            wants_launches = self._options.locate if locate is None else locate
            keys = self._world.config_keys(candidate) & self._world.config_keys(reference)
            found = locate_first(candidate, reference, difference, keys, self._changed if wants_launches else None)
        raise ComparisonFailed(difference_text(failing, candidate, reference, found))

    def _changed(self, result: WorkloadResult, config: Mapping[str, Any]) -> WorkloadResult:
        return self._world.again(result, **config)

    def _stored(self, case: str, result: WorkloadResult) -> Baseline | None:
        """The baseline, which keys that it is too old to know had their defaults in."""
        stored = read_baseline(self._options.baselines_dir, result.platform, case)
        return stored and replace(stored, config=identity(self._world.defaults(result)) | stored.config)

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
        stored = StoredComparison(case, config, baseline, marked, priors, options.max_launches)
        again = functools.partial(self._again, result, compared.candidate)
        if options.ab is None:
            return settle(stored, launches, again)
        verdicts = stored.judge(launches)
        if not (open_metrics := unsettled(verdicts, stored)):
            return verdicts
        paired = PairedComparison(case, marked, stored.spread, open_metrics, options.max_pairs)
        candidates: list[LaunchFacts] = []
        reference_again = functools.partial(self._again, result, compared.reference, reference=True)
        settled = settle_pairs(paired, candidates, [], again, reference_again)
        launches += candidates
        return joined(verdicts, settled, options.ab)

    def _learn(self, compared: Compared, config: dict[str, Any], result: WorkloadResult) -> Verdicts:
        """Launch as often as a baseline needs, and have the launches written if the test passes."""
        options, marked, case = self._options, self._spec.tolerances, compared.case
        if result.config.get(TEST_HOOK_KEY, {}) not in ({}, None):
            raise BaselineError(f"{case}: not recorded: the config plants a {TEST_HOOK_KEY}")
        launches = [launch_facts(result)]
        while len(launches) < launches_to_learn(marked, launches[0], options.launches):
            launches.append(self._again(result, compared.candidate))
        problems = objections(launches, marked)
        if problems and options.force_baseline is None:
            raise BaselineError(noisy_baseline_text(case, problems))
        new = _new_baseline(case, self._record.nodeid, result, config, launches)
        if problems:
            new = replace(new, forced={str(new.epoch): str(options.force_baseline)})
        priors = platform_priors(options.baselines_dir, result.platform, result.device, case)
        # Compared with itself it shows whether a metric is lacking, or differs from launch to launch.
        verdicts = StoredComparison(case, config, new, marked, priors, len(launches)).judge(launches)
        failing = verdicts.failing(strict=False, missing_fails=True)
        if failing:
            raise ComparisonFailed(comparison_text(failing, result, launches, None))
        stored = merged(self._stored(case, result), new, marked, priors, options.new_epoch)
        self._record.new_baselines.append(stored)
        self._record.detection[case] = detection_lines(stored, marked, priors, options.max_launches)
        return verdicts

    def _compared(self, case: str, result: WorkloadResult, baseline: Path | None) -> Compared:
        compared = Compared(case, baseline=None if baseline is None else str(baseline))
        self._record.compared.append(compared)
        self._keep(compared.candidate, result)
        compared.measured = measured_values([launch_facts(result)])
        return compared

    def _keep(self, folders: list[str], result: WorkloadResult) -> None:
        if folder := self._world.folder(result):
            folders.append(str(folder))

    def _again(self, result: WorkloadResult, folders: list[str], *, reference: bool = False) -> LaunchFacts:
        launched = _passed(self._world.again(result, reference=reference))
        self._keep(folders, launched)
        return launch_facts(launched)

    def _judge(
        self,
        verdicts: Verdicts,
        result: WorkloadResult,
        launches: list[LaunchFacts],
        baseline: Path | None,
        compared: Compared,
    ) -> None:
        compared.measured = measured_values(launches)
        self._record.verdicts += verdicts.rows
        self._record.notes += verdicts.notes
        failing = verdicts.failing(
            strict=self._options.strict,
            missing_fails=baseline is None or self._options.missing_baseline == "fail",
            improved_fails=self._options.fail_improved,
        )
        if failing:
            raise ComparisonFailed(comparison_text(failing, result, launches, baseline, verdicts.notes))


def _refuse_no_variant(side: str, given: object) -> None:
    is_mapping = isinstance(given, Mapping) and isinstance(given.get("workload"), str)
    if not is_mapping and not isinstance(given, WorkloadResult):
        raise SpecError(
            f"compare: the {side} is {given!r}, allowed is a result of this test, or a mapping with the name of a "
            f"workload at the key 'workload' and with config keys"
        )


def _new_baseline(
    case: str, nodeid: str, result: WorkloadResult, config: dict[str, Any], launches: list[LaunchFacts]
) -> Baseline:
    stored = tuple(StoredLaunch(launch) for launch in launches)
    return Baseline(case, nodeid, result.platform, result.workload, config, stored)


def make_world(
    request: pytest.FixtureRequest, options: Options, devices: list[Device], launcher: Launcher, references: References
) -> Iterator[DistributedWorld]:
    """The ``distributed_world`` fixture; skips or fails where devices are lacking, and gives its lease back."""
    spec, record = test_state(request.node)
    try:
        world = resolve_world(spec.world, options, devices)
    except DevicesUnavailable as error:
        _lacking(record, str(error), options)
    base = options.results_dir or request.getfixturevalue("tmp_path_factory").getbasetemp() / "aorta"
    timed = request.node.get_closest_marker("overlap") or any(
        METRICS[name].kind == "timing" for name in spec.tolerances
    )
    leased = LeasedWorld(
        world,
        devices[: options.gpus],
        exclusive=bool(timed) and not options.share_host,
        wait_s=options.lease_timeout_s,
        owner=record.nodeid,
    )
    try:
        folder = base / slug(record.nodeid)
        yield DistributedWorld(world, leased, options, spec, folder, record, launcher, references)
    finally:
        leased.release()


SPEC = pytest.StashKey[TestSpec]()
RECORD = pytest.StashKey[TestRecord]()


def test_state(item: pytest.Item) -> tuple[TestSpec, TestRecord]:
    """A test's checked markers, put there at collection, and its record, put there when it starts."""
    return item.stash[SPEC], item.stash[RECORD]


test_state.__test__ = False  # type: ignore[attr-defined]


def _lacking(record: TestRecord, reason: str, options: Options) -> NoReturn:
    record.lacked_devices = reason
    if options.require_gpus:
        pytest.fail(f"{reason}; a skip is an error under --aorta-require-gpus", pytrace=False)
    pytest.skip(reason)


def _passed(result: WorkloadResult) -> WorkloadResult:
    if not result.passed:
        raise WorkloadFailed(failed_checks_text(result))
    return result


def _new_folder(base: Path, name: str) -> Path:
    """A folder that did not exist: an earlier launch's evidence is never overwritten."""
    try:
        base.mkdir(parents=True, exist_ok=True)
        for number in range(1, 100_000):
            folder = base / f"{number:02d}-{slug(name, max_length=40)}"
            if not folder.exists():
                folder.mkdir()
                return folder
    except OSError as error:
        raise LaunchError(f"results folder {base} can't be written: {error.strerror or error}") from None
    raise LaunchError(f"results folder {base} is full; empty it")
