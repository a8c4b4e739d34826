"""The life of a rank: load the plan's workload or script, run it, write the result, leave with all other ranks."""

import importlib
import importlib.util
import math
import os
import random
import runpy
import site
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from msgspec import Meta

from pytest_aorta.common import variables
from pytest_aorta.common.files import PACKAGE_ROOT, is_source_of, raised_as
from pytest_aorta.common.model import Count, Milliseconds, Model, Name, convert, to_builtins, write_json_rows
from pytest_aorta.plan.launch_plan import FunctionCall, LaunchPlan, StepRecording, read_plan
from pytest_aorta.plan.plants import Planted
from pytest_aorta.plan.reference import Reference
from pytest_aorta.plan.workloads import WorkloadSpec
from pytest_aorta.result.facts import PYTHON_TRACER
from pytest_aorta.result.folder import PLAN_FILE, RESULT_FILE, RETURNED_FILE, VALUE_FILE
from pytest_aorta.result.measurements import RankResult
from pytest_aorta.result.values import write_value
from pytest_aorta.worker.accelerator import has_graphs
from pytest_aorta.worker.environment import python_tracer
from pytest_aorta.worker.finite import refuse_non_finite, refuse_parameters
from pytest_aorta.worker.first_step import FirstStep
from pytest_aorta.worker.functions import call_function
from pytest_aorta.worker.groups import keep_groups
from pytest_aorta.worker.layout import NamedTensor
from pytest_aorta.worker.plants import plant
from pytest_aorta.worker.recorder import recording
from pytest_aorta.worker.simulation import is_simulated, restore_data, simulate_world, without_values
from pytest_aorta.worker.workload import RankEnv, Workload

# Objects that stay alive until the rank's process exits, as a script's globals do.
_kept: list[object] = []
# What is kept of the first step, if the plan asks for it.
_first_steps: list[FirstStep] = []


def run_rank(run_dir: Path, folder: Path, leave: Callable[[], None] = lambda: None) -> None:
    """Run this rank's part of ``run_dir/plan.json`` and write ``folder/result.json``.

    ``leave`` waits for the script's threads and runs its handlers of ``atexit``. Both may use process groups, so it is
    called before any collective of the harness.
    """
    plan = _begin(run_dir)
    if plan.function:
        _run_function(plan, plan.function, folder, leave)
    elif plan.program:
        _run_program(plan, plan.program, folder, leave)
    else:
        assert plan.spec is not None  # since the plan has no program
        (_run_aorta_workload if plan.spec.is_of_aorta else _run_workload)(plan, plan.spec, folder)


def _run_program(plan: LaunchPlan, program: str, folder: Path, leave: Callable[[], None]) -> None:
    """Run a script or a module, which may record its steps itself."""
    pid = os.getpid()
    _record_script(plan.record or StepRecording())
    given = dict(os.environ)
    has_left = _run_script(program, list(plan.args))
    # A script may clear its environment.
    os.environ.update({name: given[name] for name in given.keys() - os.environ.keys()})
    if os.getpid() != pid:  # a process that the script has forked, and that has ended by sys.exit(0)
        return
    # A handler of atexit ends the tracer.
    tracer = python_tracer()
    _leave_returned(folder)
    if not has_left:
        leave()
    _finish(folder, _recorded(plan), tracer)
    if has_left:
        os._exit(0)
    if recording.steps.end_together:
        _leave_process_groups()


def _run_function(plan: LaunchPlan, call: FunctionCall, folder: Path, leave: Callable[[], None]) -> None:
    """Call a function of a test file and write the value that it returns, which is the rank's result."""
    value = call_function(call, Path(plan.program or ""))
    _leave_returned(folder)
    write_value(folder / VALUE_FILE, value, f"{call.name}()")
    leave()
    (folder / RESULT_FILE).touch()
    if dist.is_initialized():
        dist.barrier()


def _recorded(plan: LaunchPlan) -> RankResult:
    """Return the checked result of a script that has ended."""
    _refuse_leaks(plan.reference)
    result = recording.result()
    recording.refuse_non_finite()
    return _checked(result, recording.named_parameters(), "at the end of the script")


def _run_workload(plan: LaunchPlan, spec: WorkloadSpec, folder: Path) -> None:
    if spec.min_world_size > 1:
        RankEnv.read().require(spec.name, spec.min_world_size)
    workload = _set_up(plan, spec)
    result: object = workload.run()
    restore_data()
    source = f"{spec.class_name}.run()"
    if not isinstance(result, RankResult):
        raise TypeError(f"{source} returned {result!r}; it has to return a RankResult")
    # A number that is not finite is named below, with its rank and step.
    if not _non_finite(document := to_builtins(result)):
        with raised_as(TypeError):
            convert(document, RankResult, f"the result of {source}")
    _leave_returned(folder)
    _refuse_leaks(plan.reference)
    _finish(folder, _checked(result, workload.named_parameters(), "at the end of the run"), python_tracer())
    workload.cleanup()


def _run_aorta_workload(plan: LaunchPlan, spec: WorkloadSpec, folder: Path) -> None:
    """Run a class with AORTA's contract, which knows nothing of this package, and measure it as an unedited script."""
    observer = recording.observe(StepRecording(), is_asked=False)
    workload = _set_up(plan, spec)
    with observer.counted_whole(plan.own_config.get("steps")):
        given: object = workload.run()
    _leave_returned(folder)
    _refuse_leaks(plan.reference)
    recorded = observer.result(recording.values, has_own_steps=True)
    result = _with_result_of(given, f"{spec.class_name}.run()", recorded)
    recording.refuse_non_finite()
    _finish(folder, _checked(result, recording.named_parameters(), "at the end of the run"), python_tracer())
    workload.cleanup()


def _set_up(plan: LaunchPlan, spec: WorkloadSpec) -> Any:
    """Return the workload, imported and set up."""
    workload_class = _load_workload(spec)
    workload = workload_class(plan.own_config)
    _kept.append(workload)
    workload.setup()
    return workload


class _ResultOfAorta(Model, frozen=True):
    passed: bool
    failure_count: Count
    step_times_ms: Annotated[list[Milliseconds], Meta(min_length=1)]
    total_iterations: Count
    metrics: dict[Name, float]


def _with_result_of(given: Any, source: str, recorded: RankResult) -> RankResult:
    """Return what was recorded, with the steps, checks and metrics of the result that AORTA's contract describes.

    Raises:
        TypeError: The result lacks one of its fields, or a field has another type.
    """
    names = ("passed", "failure_count", "step_times_ms", "total_iterations")
    if absent := [name for name in names if not hasattr(given, name)]:
        raise TypeError(
            f"{source} returned {given!r} on rank {os.environ['RANK']}, which has no {absent}; it has to return a "
            f"result with {', '.join(names)} on every rank"
        )
    fields = {name: _plain_numbers(getattr(given, name)) for name in names}
    metrics = _plain_numbers(getattr(given, "metrics", None) or {})
    if isinstance(metrics, dict):
        metrics = {name: value for name, value in metrics.items() if _is_number(value)}
    with raised_as(TypeError):
        own = convert(fields | {"metrics": metrics}, _ResultOfAorta, f"the result of {source}")
    num_steps = len(own.step_times_ms)
    return recorded.replace(
        passed=own.passed and not own.failure_count,
        failure_count=own.failure_count or int(not own.passed),
        configured_iterations=num_steps,
        total_iterations=num_steps,
        step_times_ms=own.step_times_ms,
        # The iterations may include a warm-up without times.
        metrics=recorded.metrics | {"total_iterations": own.total_iterations} | own.metrics,
        loss=[],
        grad_norm=[],
        collective_ms=recorded.collective_ms[-num_steps:],
    )


def _plain_numbers(value: Any) -> Any:
    """Return a value with NumPy's and torch's numbers in it as Python's."""
    if isinstance(value, Mapping):
        return {key: _plain_numbers(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_numbers(each) for each in value]
    return value.tolist() if isinstance(value, np.generic | np.ndarray | torch.Tensor) else value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def observe_rank(run_dir: Path, folder: Path) -> Callable[[], None]:
    """Record the steps of a rank that a command has started by itself; return the function that writes its result.

    Neither waits for other ranks: the command decides when each of them ends.
    """
    plan = _begin(run_dir)
    _record_script(plan.record or StepRecording())

    def write_result() -> None:
        _leave_returned(folder)
        _write_result(folder, _recorded(plan))

    return write_result


def _begin(run_dir: Path) -> LaunchPlan:
    """Return the plan, after everything that has to precede the rank's own code."""
    plan = read_plan(run_dir / PLAN_FILE)
    keep_groups()
    if is_simulated():
        simulate_world()
    if planted := Planted.read(os.environ):
        plant(planted)
    if plan.first_step:
        _first_steps.append(FirstStep(plan.first_step))
    _put_first([*filter(None, os.environ.pop(variables.FIRST_PATH, "").split(":"))])
    # If the A/B reference is another environment, packages of that environment come first.
    sys.path += filter(None, os.environ.pop(variables.LATE_PATH, "").split(":"))
    sys.path[:] = [str(plan.counterpart(Path(entry))) if entry else entry for entry in sys.path]
    return plan


def _put_first(folders: Sequence[str]) -> None:
    """Put folders of packages first on the search path.

    Raises:
        ImportError: A module of them was imported before, from another folder.
    """
    names = {entry.name.partition(".")[0]: folder for folder in folders for entry in Path(folder).iterdir()}
    if loaded := sorted(names.keys() & sys.modules.keys()):
        raise ImportError(f"{loaded[0]} was imported before {names[loaded[0]]} was put on the search path")
    before = len(sys.path)
    for folder in folders:
        site.addsitedir(folder)
    sys.path[:] = [*sys.path[before:], *sys.path[:before]]


def _checked(result: RankResult, named: Iterable[NamedTensor], when: str) -> RankResult:
    """Return a result whose numbers and parameters are finite; without its numbers if nothing was exchanged.

    Raises:
        NotFinite: A number is NaN or infinite.
    """
    if is_simulated():
        return without_values(result, named)
    refuse_non_finite(result)
    refuse_parameters(named, when)
    return result


def _load_workload(spec: WorkloadSpec) -> Any:
    """Import the workload's class, by module name or from its folder.

    Raises:
        FileNotFoundError: The workload's folder has no ``__init__.py``.
        TypeError: The class that the yaml names is not a :class:`Workload`, or one of AORTA's is no class.
    """
    where = spec.module.partition(":")[0] if spec.module else str(spec.folder)
    module = importlib.import_module(where) if spec.module else _load_folder(spec.name, where)
    found = getattr(module, spec.class_name, None)
    kind = object if spec.is_of_aorta else Workload
    if not (isinstance(found, type) and issubclass(found, kind)):
        allowed = "a class" if spec.is_of_aorta else "a subclass of pytest_aorta.worker.Workload"
        raise TypeError(
            f"{where}: {spec.class_name} has to be {allowed}, found {found!r}; export it from the folder's __init__.py"
        )
    return found


def _record_script(record: StepRecording) -> None:
    """Record the steps of the script that runs next in this process; set seeds and deterministic algorithms if asked.

    Each rank has a seed of its own, so that ranks that draw their data draw different data.
    """
    if record.deterministic:
        seed = int(os.environ["RANK"])
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        torch.use_deterministic_algorithms(True)
    # A script that uses the recorder records its steps itself.
    recording.observe(record, is_asked=False)


def _run_script(script: str, args: list[str]) -> bool:
    """Run a file or a dotted module as ``__main__`` with ``args``, and keep its globals alive.

    A module is looked for in ``src`` too, where a package that is not installed has its own folder.

    Returns:
        Whether the script has ended this process by ``os._exit(0)``, so that nothing else of it may run.

    Raises:
        SystemExit: The script exited with a code other than 0.
    """
    sys.argv = [script, *args]
    exit_now, pid = os._exit, os.getpid()

    def leave(status: int) -> NoReturn:
        is_own = os.getpid() == pid and threading.current_thread() is threading.main_thread()
        # Other ranks do not wait for a rank whose steps are observed.
        if status == 0 and is_own and not recording.steps.end_together:
            raise _ExitNow(status)
        exit_now(status)

    os._exit = leave
    try:
        if script.endswith(".py"):
            sys.path.insert(0, str(Path(script).resolve().parent))
            _kept.append(runpy.run_path(script, run_name="__main__"))
        else:
            if (Path("src") / script.partition(".")[0]).exists():
                sys.path.insert(0, str(Path("src").resolve()))
            _kept.append(runpy.run_module(script, run_name="__main__", alter_sys=True))
    except SystemExit as error:
        # The frames of the traceback hold the script's globals.
        _kept.append(error)
        if error.code not in (None, 0):
            raise
        return isinstance(error, _ExitNow)
    finally:
        os._exit = exit_now
    return False


class _ExitNow(SystemExit):
    """A script's call of ``os._exit(0)`` on its main thread."""


def _leave_process_groups() -> None:
    """Destroy the process groups of a script, unless a CUDA graph exists.

    NCCL does not return from the call while a graph contains collectives of the group
    (https://github.com/pytorch/pytorch/issues/115388), and the script's graphs live as long as its globals.
    """
    if dist.is_initialized() and not has_graphs():
        dist.destroy_process_group()


def _refuse_leaks(reference: Reference | None) -> None:
    """Check that the launch of a reference ran in its environment, and imported no code under test at a commit.

    Raises:
        ImportError: The interpreter is another one, or a module was imported from the code under test, e.g. through an
            editable install.
    """
    if reference is None:
        return
    if reference.prefix not in (None, Path(sys.prefix)):
        raise ImportError(
            f"the launch of {reference.name} ran in {sys.prefix} instead of {reference.prefix}; start ranks by "
            f"python -m, not by a program of another environment"
        )
    if reference.worktree is None:
        return
    # All ranks run this package on purpose, which in this project's own checkout is also the code under test.
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__")
        if not file or Path(file).resolve().is_relative_to(PACKAGE_ROOT):
            continue
        if is_source_of(reference.worktree.checkout, Path(file)):
            raise ImportError(
                f"the launch of {reference.name} has imported {name} from the code under test: {file}; "
                f"allowed are packages in pytest's root folder, in its src/, and those on PYTHONPATH"
            )


def _leave_returned(folder: Path) -> None:
    """Note that the script, or ``run()``, has returned; a full disk is reported where the rank writes its result."""
    with suppress(OSError):
        (folder / RETURNED_FILE).touch()


def _finish(folder: Path, result: RankResult, tracer: str | None) -> None:
    """Write the result, then wait for all ranks: a rank that exits early closes its peers' connections.

    This rank's process groups stay alive after the rank leaves them; the process exits without destroying them.
    """
    if tracer:
        result = result.replace(environment=result.environment | {PYTHON_TRACER: tracer})
    _write_result(folder, result)
    # Ranks of an unedited script may end at any time, and some may have left the group.
    if dist.is_initialized() and recording.steps.end_together:
        dist.barrier()


def _write_result(folder: Path, result: RankResult) -> None:
    for first_step in _first_steps:
        first_step.write(folder)
    write_json_rows(folder / RESULT_FILE, _plain(result), durable=False)


def _plain(result: RankResult) -> dict[str, Any]:
    """Return a result as the values of its file; raise ValueError for a number that is not finite."""
    document: dict[str, Any] = to_builtins(result)
    if field := _non_finite(document):
        raise ValueError(f"the result of rank {os.environ['RANK']} contains a number that is not finite: {field}")
    return document


def _load_folder(name: str, folder: str) -> ModuleType:
    # The name has a prefix, since the user's folder may have the name of an installed package.
    full_name = f"aorta_own_workloads_{name}"
    path = Path(folder) / "__init__.py"
    spec = importlib.util.spec_from_file_location(full_name, path, submodule_search_locations=[folder])
    if spec is None or spec.loader is None or not path.exists():
        raise FileNotFoundError(f"workload {name!r}: {path} does not exist; it has to export the workload's class")
    module = importlib.util.module_from_spec(spec)
    sys.modules[full_name] = module
    spec.loader.exec_module(module)
    return module


def _non_finite(value: Any, path: str = "") -> str | None:
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{path} = {value}"
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return next((found for key, item in items if (found := _non_finite(item, f"{path}.{key}".lstrip(".")))), None)
