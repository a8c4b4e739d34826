"""The ``distributed_world`` fixture's object: launches workloads and scripts on the devices of a test."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from pytest_aorta.common.errors import SpecError
from pytest_aorta.common.text import brief
from pytest_aorta.plan.launch_plan import LaunchRequest
from pytest_aorta.plan.workloads import ENVIRONMENT_KEY, check_environment, find_workload, resolve_config
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.session.launcher import Launcher


class DistributedWorld:
    """The devices that a test has leased, and launches on them.

    Attributes:
        size: number of ranks, one per device.
        device: the kind of device, ``cuda`` or ``cpu``.
        backend: the backend of the process group.
        platform: the platform's name, which is part of the key of baselines.
        timeout_s: time limit of one launch, in seconds.
        launcher: launches requests; for this package.
    """

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self._options = launcher.session.options
        self.size = launcher.world.size
        self.device = launcher.world.device
        self.backend = launcher.world.backend
        self.platform = launcher.world.platform
        self.timeout_s = launcher.timeout_s

    def __repr__(self) -> str:
        """Return the name and the platform, which pytest shows above a failure."""
        return f"<distributed world on {self.platform}>"

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
        self.launcher.require_ranks(name, spec.min_world_size)
        return self._launch(LaunchRequest(name, spec, resolve_config(spec, config), None, ()))

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
        return self._launch(LaunchRequest(Path(script).name, None, config, target, words))

    def again(self, result: WorkloadResult, *, reference: bool = False, **config: Any) -> WorkloadResult:
        """Repeat the launch that ``result`` came from, or launch its A/B reference, and return the new result.

        If ``result`` came from an A/B reference, the launch runs that reference's version again.

        Args:
            result: a result of this world.
            reference: whether to launch the A/B reference that ``--aorta-ab`` names.
            config: config keys to change.

        Raises:
            SpecError: ``result`` is not a result of this world, ``config`` is not allowed (a script has none), or there
                is no A/B reference; nothing was started.
            LaunchError, ResultError: As in :meth:`launch`.
        """
        check_result("again", result)
        if not isinstance(reference, bool):
            raise SpecError(f"again: reference is {reference!r}, allowed is True or False")
        launch = self.launcher.find(result)
        if launch is None:
            raise SpecError(
                f"result of {result.workload!r}: not launched by this test, so the launch can't be repeated"
            )
        request = launch.request
        if config:
            if request.spec is None:
                raise SpecError(f"script {request.name!r} has no config keys; can't change {sorted(config)}")
            request = replace(request, config=resolve_config(request.spec, request.config | config))
        version = self.launcher.session.references.open() if reference else launch.plan.reference
        return self.launcher.launch(request, version).result

    def _launch(self, request: LaunchRequest) -> WorkloadResult:
        bisection = self.launcher.session.bisection
        return self.launcher.launch(request, bisection.end(0) if bisection else None).result


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
