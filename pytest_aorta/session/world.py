"""How a world launches: its devices leased, plans built and run, results kept. pytest and the command share it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeAlias, TypeVar

from pytest_aorta.common.errors import AortaError, LaunchError, SpecError
from pytest_aorta.common.files import slug
from pytest_aorta.launch.lease.world import LeasedWorld
from pytest_aorta.launch.nodes.handover import node_group
from pytest_aorta.launch.watch import LaunchWatch, StateLine
from pytest_aorta.plan.launch_plan import LaunchPlan, LaunchRequest, at_reference, limits_under
from pytest_aorta.plan.options import LauncherKind, Options
from pytest_aorta.plan.profiler import TORCH, WRAPPERS, traces_note
from pytest_aorta.plan.reference import Reference, References
from pytest_aorta.plan.workload.declaration import default_config, find_workload, resolve_config
from pytest_aorta.plan.workload.environment import ENVIRONMENT_KEY, check_environment
from pytest_aorta.plan.world import World
from pytest_aorta.result.diagnosis import launch_failure
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.result.outcome import LaunchOutcome, launch_times_s
from pytest_aorta.result.reading import collect_result
from pytest_aorta.result.trace.merged import merge_run
from pytest_aorta.session.record import LaunchTimes, TestRecord
from pytest_aorta.session.spec import TestSpec

P = ParamSpec("P")
T = TypeVar("T")
Launcher: TypeAlias = Callable[[LaunchPlan], LaunchOutcome]
WARM = {True: LauncherKind.FORKSERVER, False: LauncherKind.TORCHRUN}


def in_test(method: Callable[P, T]) -> Callable[P, T]:
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
        line: StateLine | None = None,
    ) -> None:
        self._line = line
        self._leased = leased
        self._references = references
        # By identity, with the result, whose id would be another's once it is gone.
        self._requests: dict[int, tuple[WorkloadResult, LaunchRequest, Reference | None]] = {}
        self._folders: dict[int, Path] = {}
        self._launcher = launcher
        self._options = options
        self._run_base = run_base
        self._record = record
        wanted = options.launcher if spec.world.warm is None else WARM[spec.world.warm]
        # A fork server is one host's.
        self._kind_of_launcher = wanted if world.nodes == 1 else LauncherKind.TORCHRUN
        self._num_nodes = world.nodes
        self.size = world.size
        self.device = world.device
        self.backend = world.backend
        self.platform = world.platform
        self.timeout_s = spec.timeout_s or options.timeout_s

    @in_test
    def launch(self, name: str, /, **config: Any) -> WorkloadResult:
        """Launch a workload once and return its validated result, whatever its own checks found.

        Raises:
            SpecError: no such workload, config key or value; nothing was started then.
            LaunchError: a rank failed; the message names the first one.
            ResultError: the ranks left no valid result.
        """
        spec = find_workload(name, self._options.workload_dirs)
        return self._launch(LaunchRequest(name, spec, resolve_config(spec, config), None, ()))

    @in_test
    def launch_script(
        self, script: str | Path, args: tuple[str, ...] = (), environment: Mapping[str, str] | None = None
    ) -> WorkloadResult:
        """Launch a script (a path ending in ``.py``, or a dotted module) that records through the recorder."""
        target = str(script)
        if target.endswith(".py"):
            path = self._options.rootdir / target
            if not path.is_file():
                raise SpecError(f"script {target!r}: there is no file {path}")
            target = str(path)
        elif not all(part.isidentifier() for part in target.split(".")):
            raise SpecError(f"script {target!r}: allowed is a path ending in .py or a dotted module name")
        config: dict[str, Any] = {"args": list(args)}
        if environment:
            check_environment(f"script {target!r}", environment)
            config[ENVIRONMENT_KEY] = dict(environment)
        return self._launch(LaunchRequest(Path(script).name, None, config, target, args))

    @in_test
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
        if reference is not None and self._num_nodes > 1:
            raise SpecError(f"{reference.name}: a reference version is on this node alone; it needs nodes=1")
        if self._options.profiler in WRAPPERS and self._num_nodes > 1:
            raise SpecError(
                f"--aorta-profiler={self._options.profiler} wraps ranks of this node alone; it needs nodes=1"
            )
        launched = at_reference(request, reference) if reference else request
        group = node_group(self._options, self._num_nodes)
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
            profiler=self._options.profiler,
            limits=limits_under(self._options.profiler),
            group=group,
        )
        with LaunchWatch(plan, self._line) as watch:
            outcome = self._launcher(plan)
        times = LaunchTimes(self._record.num_launches, outcome.launcher, launch_times_s(outcome))
        self._record.launch_times.append(times)
        self._leased.note(outcome)
        if plan.profiler is not None:
            self._record.notes.append(traces_note(plan.profiler, plan.run_dir))
        if failure := launch_failure(plan, outcome):
            raise LaunchError(failure.text, failure.kind, failure.rank)
        result = collect_result(plan, outcome, watch.platform_facts)
        if plan.profiler == TORCH and (merged := merge_run(plan.run_dir)):
            self._record.notes.append(f"all ranks' traces on one clock: {merged}")
        self._requests[id(result)] = (result, request, reference)
        self._folders[id(result)] = plan.run_dir
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
