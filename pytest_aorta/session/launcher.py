"""Launches requests on the devices that a test has leased, for pytest and for ``aorta run``."""

from __future__ import annotations

import dataclasses
import errno
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import asdict, replace

from pytest_aorta.common.errors import AortaError, LaunchError, ResultError, SpecError
from pytest_aorta.common.files import create_numbered_folder, raised_as, slug
from pytest_aorta.launch.leases import LeasedWorld
from pytest_aorta.launch.watch import LaunchWatch
from pytest_aorta.launch.work_folder import copy_folder
from pytest_aorta.plan.device_kind import DeviceKind
from pytest_aorta.plan.launch_plan import LaunchPlan, LaunchRequest, Limits, at_reference
from pytest_aorta.plan.options import LauncherKind
from pytest_aorta.plan.reference import Reference
from pytest_aorta.plan.world import ALL_DEVICES, World
from pytest_aorta.result.diagnosis import launch_failure
from pytest_aorta.result.folder import AGENT_LOG, COPY_FOLDER, VALUE_FILE, rank_folders
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.result.outcome import LaunchOutcome
from pytest_aorta.result.reading import collect_result
from pytest_aorta.result.sensors import PlatformFacts
from pytest_aorta.result.trace.kept import traces_note
from pytest_aorta.result.values import read_value
from pytest_aorta.session.record import LaunchNote, RunningTest

if TYPE_CHECKING:
    from pytest_aorta.session.session import Session, TestSpec


T = TypeVar("T")
_WARM = {True: LauncherKind.FORKSERVER, False: LauncherKind.TORCHRUN}


@dataclass(frozen=True)
class Launch:
    """A launch that left a valid result.

    Attributes:
        request: The workload or script with its config, as requested for the code under test.
        plan: The plan, for the version that ran.
        outcome: The end of the processes.
        result: The result.
    """

    request: LaunchRequest
    plan: LaunchPlan
    outcome: LaunchOutcome
    result: WorkloadResult

    @property
    def defaults(self) -> dict[str, Any]:
        """The default of every config key, given the config of this launch; empty for a script."""
        return self.request.spec.default_config(self.request.config) if self.request.spec else {}


@dataclass
class Launcher:
    """Launches requests on the devices that a test has leased.

    Attributes:
        session, world, spec, test: What the launches belong to.
        launches: The launches that left a valid result, in order.
    """

    session: Session
    world: World
    spec: TestSpec
    test: RunningTest
    _leased: LeasedWorld
    _run_base: Path
    launches: list[Launch] = field(default_factory=list)
    # The copy of the working folder that launches share, if any.
    _shared_copy: list[Path] = field(default_factory=list)

    @contextmanager
    def one_copy(self) -> Iterator[None]:
        """Have launches that ask for a copy of the working folder share one, to read what earlier ones have written."""
        with tempfile.TemporaryDirectory(dir=self.shared_folder(), ignore_cleanup_errors=True) as folder:
            self._shared_copy.append(Path(folder).resolve() / COPY_FOLDER)
            try:
                yield
            finally:
                self._shared_copy.pop()

    @property
    def timeout_s(self) -> float:
        """Return the time limit of one launch, in seconds."""
        return self.spec.timeout_s or self.session.options.timeout

    def first(self, size: int, timeout_s: float | None = None) -> Launcher:
        """Return a launcher of the first ranks of this world, whose launches are those of this test too."""
        part = copy(self)
        part.world = self.world.first(size)
        part.spec = dataclasses.replace(self.spec, timeout_s=timeout_s or self.spec.timeout_s)
        return part

    def shared_folder(self) -> Path:
        """Return the folder of this test's launches, which all nodes share.

        Raises:
            LaunchError: It can't be made.
        """
        with raised_as(LaunchError, _unwritable(self._run_base)):
            self._run_base.mkdir(parents=True, exist_ok=True)
        return self._run_base.absolute()

    def find(self, result: WorkloadResult) -> Launch | None:
        """Return the launch of a result; None for a result of another test, or a copy."""
        return next((launch for launch in self.launches if launch.result is result), None)

    def launch_of(self, result: WorkloadResult) -> Launch:
        """Return the launch of a result.

        Raises:
            SpecError: The test has not launched it.
        """
        if (launch := self.find(result)) is None:
            raise SpecError(f"result of {result.workload!r}: not launched by this test, so it can't be repeated")
        return launch

    def folder_of(self, result: WorkloadResult) -> Path | None:
        """Return the run folder of a result; None for a result of another test, or a copy."""
        launch = self.find(result)
        return launch.plan.run_dir if launch else None

    def is_before(self, result: WorkloadResult, other: WorkloadResult) -> bool:
        """Return whether ``result`` was launched before ``other``; False unless both were launched by this test."""
        first, second = self.find(result), self.find(other)
        return first is not None and second is not None and self.launches.index(first) < self.launches.index(second)

    def require_ranks(self, workload: str, least: int) -> None:
        """End a test that asks for all GPUs of the run if a workload needs more ranks than these.

        Raises:
            SpecError: The test asks for fewer ranks than the workload needs.
        """
        if self.world.size >= least:
            return
        if self.world.device != DeviceKind.CPU and self.spec.world.size == ALL_DEVICES:
            self.test.lacks(f"workload {workload!r} needs at least {least} GPUs, {self.world.size} given")
        raise SpecError(
            f"workload {workload!r} needs at least {least} ranks, and this world has {self.world.size}: fewer have "
            f"nothing to shard or to communicate; ask for more, by world(size={least}) or --nproc {least}"
        )

    def launch(self, request: LaunchRequest, version: Reference | None = None) -> Launch:
        """Launch a request once, in the code under test or in another version.

        Raises:
            SpecError: The request is not allowed, a marker has changed, or ``version`` lacks the workload.
            LeaseError: The devices can't be leased; nothing was started.
            LaunchError: A rank failed; the message names the rank that failed first.
            ResultError: The ranks left no valid result.
        """
        self.launches.append(Launch(request, *self._started(request, version, collect_result)))
        return self.launches[-1]

    def call(self, request: LaunchRequest) -> list[Any]:
        """Launch the function of a request, and return the value of each rank.

        Raises:
            LeaseError, LaunchError, ResultError: As in :meth:`launch`.
        """
        return self._started(request, None, _values)[-1]

    def _started(
        self,
        request: LaunchRequest,
        version: Reference | None,
        collect: Callable[[LaunchPlan, LaunchOutcome, PlatformFacts | None], T],
    ) -> tuple[LaunchPlan, LaunchOutcome, T]:
        """Launch a request, and return what ``collect`` reads of a launch whose ranks have succeeded."""
        self.test.check()
        self._refuse_several_nodes(version, request.fresh)
        launched = at_reference(request, version) if version else request
        note, plan = LaunchNote(measures=request.function is None), None
        try:
            plan = self._plan(launched, version)
            if plan.copy is not None and not plan.copy.exists():
                self._copy(plan, plan.copy)
            self.test.planned(plan)
            if self.launches:
                number, taken_s = len(self.launches), self.launches[-1].outcome.wall_s
                following = f"launch {number + 1}{f' of {version.name}' if version else ''}"
                self.session.say(
                    f"{self.test.record.nodeid}: launch {number} took {taken_s:.1f} s; {following} follows"
                )
            with LaunchWatch(plan, self.session.line) as watch, _named_in_errors(plan):
                outcome = self.session.launchers.launch(plan)
            on_device = plan.world.device != DeviceKind.CPU
            traces = traces_note(plan.run_dir, on_device=on_device) if plan.profiler else ()
            note = note.replace(
                wall_s=outcome.wall_s,
                traces=traces,
                folder=str(plan.run_dir),
                failure=(failure := launch_failure(plan, outcome)),
            )
            if failure:
                step = failure.not_finite.step if failure.not_finite else None
                raise LaunchError(failure.text, failure.kind, failure.rank, plan.run_dir, step)
            result = collect(plan, outcome, watch.platform_facts)
            if plan.profiler is not None and not traces and isinstance(result, WorkloadResult):
                raise ResultError(
                    f"profiler {plan.profiler} left no trace in {plan.run_dir}: "
                    + (result.facts.description.overlap_problem or f"read {AGENT_LOG} there, or call capture_overlap()")
                )
            note = note.replace(has_result=True)
        finally:  # pytest-timeout, too, ends a launch by an exception
            self.test.launched(note)
            if plan is not None and plan.copy is not None and plan.copy not in self._shared_copy:
                shutil.rmtree(plan.copy, ignore_errors=True)
        return plan, outcome, result

    def repeat(self, launch: Launch, *, reference: bool | str = False, **changes: Any) -> Launch:
        """Repeat a launch, or launch the A/B reference or the side that a text spells, with changes of the request.

        Raises:
            SpecError: There is no A/B reference, or as in :meth:`launch`.
            LeaseError, LaunchError, ResultError: As in :meth:`launch`.
        """
        version = launch.plan.reference
        if reference:
            version = self.session.references.open(reference if isinstance(reference, str) else None)
        return self.launch(replace(launch.request, **changes), version)

    def _copy(self, plan: LaunchPlan, copy: Path) -> None:
        """Copy the working folder of a launch, without results and without what other launches have written.

        Raises:
            SpecError: As in :func:`~pytest_aorta.launch.work_folder.copy_folder`.
            LaunchError: A file can't be copied.
        """
        folders = {self._run_base.resolve(), (self.session.options.results or self._run_base).resolve()}
        results = [str(kept.relative_to(plan.cwd)) for kept in folders if kept.is_relative_to(plan.cwd)]
        try:
            copy_folder(plan.cwd, copy, [*results, *(plan.fresh or ())])
        except OSError as error:
            raise LaunchError(f"{plan.cwd} can't be copied: {error.filename}: {error.strerror or error}") from None

    def _refuse_several_nodes(self, version: Reference | None, fresh: Sequence[str] | None) -> None:
        if fresh is not None and self.world.nodes > 1:
            raise SpecError("fresh: the copy of the working folder exists on this node only; use it with nodes=1")
        if version is not None and self.world.nodes > 1:
            raise SpecError(f"{version.name}: this side exists on this node only; use nodes=1")

    def _plan(self, request: LaunchRequest, version: Reference | None) -> LaunchPlan:
        options, warm = self.session.options, self.spec.world.warm
        with raised_as(LaunchError, _unwritable(self._run_base)):
            run_dir = create_numbered_folder(self._run_base, slug(request.name, max_length=40))
        # A fork server can start ranks on its own host only.
        is_local = self.world.nodes == 1
        # A function takes milliseconds, so it is started from the fork server unless the test declines.
        preferred = options.launcher if warm is None and not request.function else _WARM[warm is not False]
        if request.starts_ranks:
            preferred = LauncherKind.TORCHRUN
        return LaunchPlan(
            **asdict(request),
            world=self._leased.world().first(self.world.size),
            timeout_s=self.timeout_s,
            run_dir=run_dir,
            cwd=version.root if version else options.rootdir,
            copy=next(iter(self._shared_copy), run_dir.resolve() / COPY_FOLDER) if request.fresh is not None else None,
            launcher=preferred if is_local else LauncherKind.NODES,
            lease_fds=self._leased.fds,
            reference=version,
            profiler=options.profiler,
            limits=Limits(straggler_s=max(60.0, self.timeout_s / 2)),
            node_launcher=() if is_local else options.node_launcher,
            command=options.command,
        )


def _values(plan: LaunchPlan, _outcome: object, _facts: object) -> list[Any]:
    return [read_value(folder / VALUE_FILE) for folder in rank_folders(plan.run_dir, plan.world.ranks)]


@contextmanager
def _named_in_errors(plan: LaunchPlan) -> Iterator[None]:
    """Add the launch to an error that other code raises during it, such as the time limit of pytest-timeout."""
    try:
        yield
    except AortaError:
        raise
    except BaseException as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise LaunchError(f"{_unwritable(plan.run_dir)}{error.strerror or error}") from None
        error.add_note(f"launch of {plan.name!r} ended before its limit of {plan.timeout_s:g} s; see {plan.run_dir}")
        raise


def _unwritable(folder: Path) -> str:
    return f"results folder {folder} can't be written: "
