"""Launches requests in a world of leased devices and collects their results, for pytest and for ``aorta run``."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeAlias, TypeVar

from msgspec.structs import asdict, replace

from pytest_aorta.common.errors import AortaError, DevicesUnavailable, LaunchError, SpecError, hide_frames
from pytest_aorta.common.files import create_numbered_folder, slug
from pytest_aorta.common.text import brief
from pytest_aorta.launch.leases import LeasedWorld
from pytest_aorta.launch.watch import LaunchWatch, StateLine
from pytest_aorta.plan.device_kind import DeviceKind
from pytest_aorta.plan.launch_plan import LaunchPlan, LaunchRequest, at_reference, limits_under
from pytest_aorta.plan.options.run import Options
from pytest_aorta.plan.options.values import LauncherKind
from pytest_aorta.plan.profiler import TORCH, WRAPPERS
from pytest_aorta.plan.reference import AnyReference, References
from pytest_aorta.plan.workload.command import ENVIRONMENT_KEY, check_environment
from pytest_aorta.plan.workload.declaration import default_config, find_workload, resolve_config
from pytest_aorta.plan.world import ALL_DEVICES, World
from pytest_aorta.result.diagnosis.launch import launch_failure
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.result.outcome import LaunchOutcome, launch_times_s
from pytest_aorta.result.reading import collect_result
from pytest_aorta.result.trace.merged import merge_run, traces_note
from pytest_aorta.session.record import LaunchTimes, TestRecord
from pytest_aorta.session.spec import TestSpec

P = ParamSpec("P")
T = TypeVar("T")
Launcher: TypeAlias = Callable[[LaunchPlan], LaunchOutcome]
WARM = {True: LauncherKind.FORKSERVER, False: LauncherKind.TORCHRUN}


def in_test(method: Callable[P, T]) -> Callable[P, T]:
    """Hide the frames of this package in the errors of a test, because they say nothing about the cause."""

    @functools.wraps(method)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        __tracebackhide__ = True
        try:
            return method(*args, **kwargs)
        except AortaError as error:
            hide_frames(error)
            raise

    return wrapper


def _raise_unavailable(reason: str) -> NoReturn:
    raise DevicesUnavailable(reason)


@dataclass(frozen=True)
class LaunchRecord:
    """A launch of a world, with everything needed to repeat it.

    Attributes:
        request: the workload or script with its config, as requested for the version under test.
        reference: the A/B reference whose version of the request ran; None for the version under test.
        run_dir: the launch's run folder, which no two launches share.
        result: the result of the launch.
    """

    request: LaunchRequest
    reference: AnyReference | None
    run_dir: Path
    result: WorkloadResult


class DistributedWorld:
    """The devices that a test has leased, and launches on them.

    Attributes:
        size: number of ranks, one per device.
        device: the kind of device, ``cuda`` or ``cpu``.
        backend: the backend of the process group.
        platform: the platform's name, which is part of the key of baselines.
        timeout_s: time limit of one launch, in seconds.
        base: the version that :meth:`launch` and :meth:`launch_script` run; None for the code under test.
        check_markers: raises an error if the test's markers have changed since this world was made; called before each
            launch and comparison. It does nothing without a test.
        lack_devices: ends a test whose world of all GPUs is too small for a workload, given the reason.
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
        line: StateLine | None = None,
    ) -> None:
        self.base: AnyReference | None = None
        self.check_markers: Callable[[], None] = lambda: None
        self.lack_devices: Callable[[str], NoReturn] = _raise_unavailable
        self._line = line
        self._leased = leased
        self._references = references
        self._launches: list[LaunchRecord] = []
        self._launcher = launcher
        self._options = options
        self._run_base = run_base
        self._record = record
        wanted = options.launcher if spec.world.warm is None else WARM[spec.world.warm]
        # A fork server can start ranks on its own host only.
        self._kind_of_launcher = wanted if world.nodes == 1 else LauncherKind.TORCHRUN
        self._num_nodes = world.nodes
        self._takes_all_gpus = world.device == DeviceKind.CUDA and spec.world.size == ALL_DEVICES
        self.size = world.size
        self.device = world.device
        self.backend = world.backend
        self.platform = world.platform
        self.timeout_s = spec.timeout_s or options.timeout_s

    def __repr__(self) -> str:
        """Return the name and the platform, which pytest shows above a failure."""
        return f"<distributed world on {self.platform}>"

    @in_test
    def launch(self, name: str, /, **config: Any) -> WorkloadResult:
        """Launch a workload once and return its validated result, even if the workload's own checks failed.

        Raises:
            SpecError: The workload or a config key is unknown, or a value is not allowed; nothing was started.
            DevicesUnavailable: The test asks for all GPUs of the run, and the workload needs more ranks than these; in
                pytest, the test is skipped, or fails under ``--aorta-require-gpus``.
            LeaseError: The devices can't be leased, e.g. because other processes hold them; nothing was started.
            LaunchError: A rank failed; the message names the rank that failed first.
            ResultError: The ranks left no valid result.
        """
        spec = find_workload(name, self._options.workload_dirs)
        if self._takes_all_gpus and self.size < spec.min_world_size:
            self.lack_devices(f"workload {name!r} needs at least {spec.min_world_size} GPUs, {self.size} given")
        return self._launch(LaunchRequest(name, spec, resolve_config(spec, config), None, ()), self.base)

    @in_test
    def launch_script(
        self,
        script: str | Path,
        args: tuple[str, ...] | list[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> WorkloadResult:
        """Launch a script (a path ending in ``.py``, or a dotted module) that measures through the recorder.

        Return its validated result, even if its own checks failed.

        Args:
            script: the path, relative to pytest's root folder, or the module's name.
            args: command line arguments of the script.
            environment: environment variables of the ranks.

        Raises:
            SpecError: The script does not exist, ``args`` is not a list or tuple, ``environment`` is not a mapping, or
                an environment variable is not allowed; nothing was started.
            LeaseError, LaunchError, ResultError: As in :meth:`launch`.
        """
        target = str(script)
        if target.endswith(".py"):
            path = self._options.rootdir / target
            if not path.is_file():
                raise SpecError(f"script {target!r}: there is no file {path}")
            target = str(path)
        elif not all(part.isidentifier() for part in target.split(".")):
            raise SpecError(f"script {target!r}: allowed is a path ending in .py or a dotted module name")
        words = _words(str(script), args)
        config: dict[str, Any] = {"args": list(words)}
        if environment:
            check_environment(f"script {target!r}", environment)
            config[ENVIRONMENT_KEY] = dict(environment)
        return self._launch(LaunchRequest(Path(script).name, None, config, target, words), self.base)

    @in_test
    def again(self, result: WorkloadResult, *, reference: bool | AnyReference = False, **config: Any) -> WorkloadResult:
        """Repeat the launch that ``result`` came from, or launch its A/B reference, and return the new result.

        If ``result`` came from an A/B reference, the launch runs that reference's version again.

        Args:
            result: a result of this world.
            reference: whether to launch the A/B reference that ``--aorta-ab`` names; or the reference itself.
            config: config keys to change.

        Raises:
            SpecError: ``result`` is not a result of this world, ``config`` is not allowed (a script has none), or there
                is no A/B reference; nothing was started.
            LaunchError, ResultError: As in :meth:`launch`.
        """
        check_result("again", result)
        if not isinstance(reference, bool | AnyReference):
            raise SpecError(f"again: reference is {reference!r}, allowed is True or False")
        record = self.launch_of(result)
        if record is None:
            raise SpecError(
                f"result of {result.workload!r}: not launched by this test, so the launch can't be repeated"
            )
        request = record.request
        if config:
            if request.spec is None:
                raise SpecError(f"script {request.name!r} has no config keys; can't change {sorted(config)}")
            request = replace(request, config=resolve_config(request.spec, request.config | config))
        if reference is True:
            reference = self._references.open()
        return self._launch(request, reference or record.reference)

    def config_keys(self, result: WorkloadResult) -> set[str]:
        """Return the config keys that :meth:`again` can change; none for a script or a result of another world."""
        record = self.launch_of(result)
        return set(record.request.spec.properties) if record and record.request.spec else set()

    def defaults(self, result: WorkloadResult) -> dict[str, Any]:
        """Return the default of every config key, given the config of ``result``'s launch.

        Empty for a script or a result of another world.
        """
        record = self.launch_of(result)
        return default_config(record.request.spec, record.request.config) if record and record.request.spec else {}

    def folder(self, result: WorkloadResult) -> Path | None:
        """Return the run folder of ``result``'s launch; None for a result of another world."""
        record = self.launch_of(result)
        return record.run_dir if record else None

    def has_launched_before(self, result: WorkloadResult, other: WorkloadResult) -> bool:
        """Return whether ``result`` was launched before ``other``; False unless both were launched in this world."""
        first, second = self.launch_of(result), self.launch_of(other)
        return first is not None and second is not None and self._launches.index(first) < self._launches.index(second)

    def launch_of(self, result: WorkloadResult) -> LaunchRecord | None:
        """Return the launch of a result of this world; None for a result of another world, a copy, or an edited one."""
        return next((launch for launch in self._launches if launch.result is result), None)

    def _launch(self, request: LaunchRequest, reference: AnyReference | None = None) -> WorkloadResult:
        self.check_markers()
        if reference is not None and self._num_nodes > 1:
            raise SpecError(
                f"--aorta-ab={reference.name}: the A/B reference exists on this node only; use it with nodes=1"
            )
        if self._options.profiler in WRAPPERS and self._num_nodes > 1:
            raise SpecError(
                f"--aorta-profiler={self._options.profiler}: wraps the ranks of this node only; use it with nodes=1"
            )
        launched = at_reference(request, reference) if reference else request
        self._record.num_launches += 1
        plan = LaunchPlan(
            **asdict(launched),
            world=self._leased.world(),
            timeout_s=self.timeout_s,
            run_dir=_new_run_folder(self._run_base, request.name),
            cwd=reference.root if reference else self._options.rootdir,
            launcher=self._kind_of_launcher,
            lease_fds=self._leased.fds,
            reference=reference,
            profiler=self._options.profiler,
            profiler_schedule=self._options.profiler_schedule,
            limits=limits_under(self._options.profiler),
            node_launcher=self._options.node_launcher if self._num_nodes > 1 else (),
            command=self._options.command,
        )
        try:
            return self._result(plan, request)
        except BaseException:  # pytest-timeout, too, ends a launch by an exception
            self._record.num_failed_launches += 1
            raise

    def _result(self, plan: LaunchPlan, request: LaunchRequest) -> WorkloadResult:
        with LaunchWatch(plan, self._line) as watch, _named_in_errors(plan):
            outcome = self._launcher(plan)
        times = LaunchTimes(self._record.num_launches, outcome.launcher, launch_times_s(outcome))
        self._record.launch_times.append(times)
        self._leased.note(outcome)
        if plan.profiler is not None:
            self._record.traces.append(traces_note(plan.profiler, plan.run_dir, on_device=plan.world.device != "cpu"))
        if failure := launch_failure(plan, outcome):
            raise LaunchError(failure.text, failure.kind, failure.rank)
        result = collect_result(plan, outcome, watch.platform_facts)
        if plan.profiler == TORCH and (merged := merge_run(plan.run_dir)):
            self._record.traces.append(f"all ranks' traces on one clock: {', '.join(map(str, merged))}")
        self._launches.append(LaunchRecord(request, plan.reference, plan.run_dir, result))
        return result


def check_result(method: str, given: object) -> None:
    """Raise SpecError, which names ``method``, unless ``given`` is a result."""
    if not isinstance(given, WorkloadResult):
        raise SpecError(f"{method}: got {brief(repr(given))}, allowed is a result that run() or run_script() returned")


def _words(script: str, args: object) -> tuple[str, ...]:
    """Return the arguments of a script as texts; a text in place of the list would be split into characters."""
    if isinstance(args, list | tuple):
        return tuple(map(str, args))
    example = f", such as {os.fsdecode(args).split()!r}" if isinstance(args, str | bytes) else ""
    raise SpecError(f"script {script!r}: args are {args!r}, allowed is a list with one text per argument{example}")


@contextmanager
def _named_in_errors(plan: LaunchPlan) -> Iterator[None]:
    """Add the launch to an error that other code raises during it, such as the time limit of pytest-timeout."""
    try:
        yield
    except AortaError:
        raise
    except BaseException as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _unwritable(plan.run_dir, error) from None
        error.add_note(
            f"launch of {plan.name!r} ended before its own time limit of {plan.timeout_s:g} s; see {plan.run_dir}"
        )
        raise


def _new_run_folder(base: Path, name: str) -> Path:
    """Create the folder of the next launch of the workload ``name`` in a test's results folder."""
    try:
        return create_numbered_folder(base, slug(name, max_length=40))
    except OSError as error:
        raise _unwritable(base, error) from None


def _unwritable(folder: Path, error: OSError) -> LaunchError:
    return LaunchError(f"results folder {folder} can't be written: {error.strerror or error}")
