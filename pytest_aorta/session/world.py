"""The ``distributed_world`` fixture's object, and the ways to launch that it shares with ``workload``."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from pytest_aorta.common import renamed
from pytest_aorta.common.errors import LaunchError, SpecError
from pytest_aorta.common.files import create_numbered_folder, raised_as
from pytest_aorta.common.model import to_json
from pytest_aorta.common.text import brief
from pytest_aorta.launch.guarded import find_program
from pytest_aorta.plan.device_kind import Backend, DeviceKind
from pytest_aorta.plan.launch_plan import FunctionCall, LaunchRequest, Words, script_settings
from pytest_aorta.plan.workloads import ENVIRONMENT_KEY, WorkloadSpec, check_environment, find_workload, resolve_config
from pytest_aorta.result.folder import VALUE_FILE
from pytest_aorta.result.measurements import WorkloadResult
from pytest_aorta.result.values import write_value
from pytest_aorta.session.launcher import Launcher
from pytest_aorta.session.locating import locate_not_finite


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
        self.size: int = launcher.world.size
        self.device: DeviceKind = launcher.world.device
        self.backend: Backend = launcher.world.backend
        self.platform: str = launcher.world.platform
        self.timeout_s: float = launcher.timeout_s

    def __repr__(self) -> str:
        """Return the name and the platform, which pytest shows above a failure."""
        return f"<{type(self).__name__} on {self.platform}>"

    if not TYPE_CHECKING:  # a type checker would let every name pass

        def __getattr__(self, name: str) -> Any:
            """Return a method by its name of version 0.1, with a warning."""
            if name not in renamed.METHODS:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            now = renamed.METHODS[name]
            warnings.warn(f"{name}() is {now}() since version 0.2", DeprecationWarning, stacklevel=2)
            return getattr(self, now)

    def run(self, name: str, /, **config: Any) -> WorkloadResult:
        """Launch a workload with these config keys, and return its validated result.

        ``distributed_world`` returns the result even if the workload's own checks failed; ``workload`` raises
        :class:`~pytest_aorta.WorkloadFailed`.

        Raises:
            SpecError: The workload or a config key is unknown, or a value is not allowed; nothing was started.
            DevicesUnavailable: The test asks for all GPUs of the run, and the workload needs more ranks than these; in
                pytest, the test is skipped, or fails under ``--aorta-without-gpus=fail``.
            LeaseError: The devices can't be leased, e.g. because other processes hold them; nothing was started.
            LaunchError: A rank failed; the message names the rank that failed first.
            ResultError: The ranks left no valid result.
            WorkloadFailed: By ``workload`` only: the workload's own checks found wrong values; the message locates
                them.
        """
        return self._run_spec(find_workload(name, self._options.workloads), config)

    def run_script(
        self,
        script: str | Path,
        args: Words = (),
        *,
        environment: Mapping[str, str] | None = None,
        record: Mapping[str, Any] | None = None,
        fresh: Words | None = None,
    ) -> WorkloadResult:
        """Launch your own training script, and return its result as :meth:`run` does.

        Args:
            script: a path ending in ``.py``, relative to pytest's root folder, or a dotted module.
            args: command line arguments of the script.
            environment: environment variables of the ranks.
            record: how the steps of a script that does not mention pytest-aorta are recorded, as fields of
                :class:`~pytest_aorta.plan.launch_plan.StepRecording`, such as ``{"hash_weights": True}``. None: the
                script measures through the recorder.
            fresh: paths below pytest's root folder, such as those of checkpoints, that a launch starts without, in a
                copy of the root folder; None: no copy.

        Raises:
            SpecError: The script does not exist, or an argument is not allowed; nothing was started.
            LeaseError, LaunchError, ResultError, WorkloadFailed: As in :meth:`run`.
        """
        return self._run_words(
            Path(script).name, self._script(script, args), environment, {"record": record, "fresh": fresh}
        )

    def run_command(
        self,
        command: Words,
        *,
        environment: Mapping[str, str] | None = None,
        record: Mapping[str, Any] | None = None,
        fresh: Words | None = None,
    ) -> WorkloadResult:
        """Launch a command that starts its own ranks, such as ``["accelerate", "launch", "train.py"]``.

        Each rank of this world has to report: the ranks that torchrun, DeepSpeed or ``init_process_group`` number.

        Args:
            command: the program, which is looked for beside this Python and then on the path, and its arguments.
            environment: environment variables of the command.
            record: as in :meth:`run_script`. The steps are recorded without it, too.
            fresh: as in :meth:`run_script`.

        Raises:
            SpecError: The program does not exist, the world has several nodes or is simulated, or an argument is not
                allowed; nothing was started.
            LeaseError, LaunchError, ResultError, WorkloadFailed: As in :meth:`run`.
        """
        words = _words("command", command)
        if not words or find_program(words[0], sys.executable) is None:
            raise SpecError(
                f"command {list(words)!r}: {''.join(words[:1])!r} is not beside {sys.executable} or on PATH"
            )
        if self.launcher.world.nodes > 1 or self.launcher.world.simulated:
            raise SpecError(f"command {list(words)!r}: starts its ranks on one node, and does not simulate any")
        name = next((Path(word).name for word in words if word.endswith(".py")), Path(words[0]).name)
        settings = {"record": record or {}, "fresh": fresh}
        return self._run_words(name, words, environment, settings, starts_ranks=True)

    def run_function(
        self,
        function: Callable[..., Any],
        /,
        *args: Any,
        size: int | None = None,
        timeout_s: float | None = None,
        init: bool = True,
    ) -> list[Any]:
        """Call a function of the test file in each rank, and return what the ranks return, in order.

        Ranks are new processes, from the fork server unless the test's ``world`` marker has ``warm=False``. They import
        the function by its name. Arguments and returned values are JSON values and tensors, which arrive on the CPU;
        tuples arrive as lists.

        Args:
            function: A function that is defined at the level of a module or in a class.
            args: Its arguments.
            size: Number of ranks, the first ones of the test's world; all by default.
            timeout_s: Time limit in seconds, in place of the test's.
            init: Whether ranks join the default process group before, and take their device.

        Raises:
            SpecError: The function can't be found by its name, or an argument is not allowed; nothing was started.
            LaunchError: A rank has raised an error; the message has the first one, with its traceback, and the others.
            LeaseError, ResultError: As in :meth:`run`.
        """
        name, world = getattr(function, "__qualname__", repr(function)), self.launcher.world
        module = sys.modules.get(getattr(function, "__module__", None) or "")
        try:
            found = attrgetter(name)(module)
        except AttributeError:
            found = None
        if found is not function or not (file := getattr(module, "__file__", None)):
            raise SpecError(
                f"run_function: {name} is not found by this name in its module, from which ranks import it; define it "
                f"by def at the level of the module or in a class, and pass what it needs as arguments"
            )
        size = world.size if size is None else size
        if not 0 < size <= world.size or (size < world.size and world.nodes > 1):
            raise SpecError(
                f"run_function: size is {size!r}, allowed is 1 to {world.size}, and all ranks of several nodes"
            )
        if timeout_s is not None and not timeout_s > 0:
            raise SpecError(f"run_function: timeout_s is {timeout_s!r}, allowed are seconds above 0")
        if world.simulated:
            self.launcher.test.lacks(f"function {name}: simulated ranks exchange nothing")
        arguments = create_numbered_folder(self.launcher.shared_folder(), "arguments") / VALUE_FILE
        with raised_as(SpecError, f"run_function: {name}: ", TypeError):
            write_value(arguments, args, "args")
        call = FunctionCall(
            function.__module__, name, arguments, tuple(str(Path(entry).absolute()) for entry in sys.path), init
        )
        request = LaunchRequest(name, None, {}, str(file), (), function=call)
        return self.launcher.first(size, timeout_s).call(request)

    def again(self, result: WorkloadResult, *, reference: bool | str = False, **config: Any) -> WorkloadResult:
        """Repeat the launch that ``result`` came from, or launch it at a side, and return the new result.

        If ``result`` came from an A/B reference, the launch runs that reference's version again.

        Args:
            result: a result of this world.
            reference: a side, in the words of ``--aorta-ab``; True: the one that the option names.
            config: config keys to change.

        Raises:
            SpecError: ``result`` is not a result of this world, ``config`` is not allowed (a script has none), or there
                is no A/B reference; nothing was started.
            LaunchError, ResultError, WorkloadFailed: As in :meth:`run`.
        """
        check_result("again", result)
        if not isinstance(reference, bool | str) or reference == "":
            raise SpecError(f"again: reference is {reference!r}, allowed is True, False or the words of a side")
        launch = self.launcher.launch_of(result)
        request, changed = launch.request, {}
        if config:
            if request.spec is None:
                raise SpecError(f"script {request.name!r} has no config keys; can't change {sorted(config)}")
            changed = {"config": resolve_config(request.spec, request.config | config)}
        return self._returned(self.launcher.repeat(launch, reference=reference, **changed).result)

    def _returned(self, result: WorkloadResult) -> WorkloadResult:
        """Return the result of a launch to the test, or raise an error in its place."""
        return result

    def _script(self, script: str | Path, args: object) -> tuple[str, ...]:
        """Return the path or module of a script, which has to exist, and its arguments."""
        target, path = str(script), self._options.rootdir / script
        if target.endswith(".py"):
            if not path.is_file():
                raise SpecError(f"script {target!r}: there is no file {path}")
            target = str(path)
        elif path.is_file() or not all(part.isidentifier() for part in target.split(".")):
            raise SpecError(f"script {target!r}: allowed is a path ending in .py or a dotted module name")
        return (target, *_words(str(script), args))

    def _run_spec(self, spec: WorkloadSpec, config: Mapping[str, Any], *, first_step: int = 0) -> WorkloadResult:
        self.launcher.require_ranks(spec.name, spec.min_world_size)
        resolved = resolve_config(spec, config)
        return self._launch(LaunchRequest(spec.name, spec, resolved, None, (), first_step=first_step))

    def _run_words(
        self,
        name: str,
        words: tuple[str, ...],
        environment: Mapping[str, str] | None,
        settings: Mapping[str, Any],
        *,
        starts_ranks: bool = False,
    ) -> WorkloadResult:
        where, (script, *args) = f"{'command' if starts_ranks else 'script'} {name!r}", words
        given = script_settings(where, settings)
        if absent := [path for path in given.fresh or () if Path(script).is_relative_to(self._options.rootdir / path)]:
            raise SpecError(f"{where}: fresh: {absent} hold the script, which a launch can't do without")
        # Settings are part of the config, since a launch with other settings can't be compared.
        config: dict[str, Any] = {"args": [*words] if starts_ranks else args, **json.loads(to_json(given))}
        if environment:
            check_environment(where, environment)
            config[ENVIRONMENT_KEY] = dict(environment)
        request = LaunchRequest(name, None, config, script, tuple(args), **asdict(given), starts_ranks=starts_ranks)
        return self._launch(request)

    def _launch(self, request: LaunchRequest) -> WorkloadResult:
        bisection = self.launcher.session.bisection
        version = bisection.good() if bisection else None
        try:
            return self._returned(self.launcher.launch(request, version).result)
        except LaunchError as error:
            lines = locate_not_finite(self.launcher, request, version, error) if not self._options.no_locate else []
            if not lines:
                raise
            text = "\n".join([str(error), *lines])
            raise LaunchError(text, error.kind, error.rank, error.run_dir, error.not_finite_step) from None


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
