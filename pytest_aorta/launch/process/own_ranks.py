"""Ranks of a command that starts them by itself, such as ``accelerate launch`` or a script with ``mp.spawn``.

Each Python program of the command calls :func:`install` when it starts. A process becomes a rank when its environment
names one, as that of torchrun's and DeepSpeed's children does, or when it calls ``init_process_group``. In a world of
one rank, it is the process that makes the first optimizer. The rank then leaves the same files as other ranks.
"""

import inspect
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from pytest_aorta.common import variables
from pytest_aorta.launch.process import rank as rank_program
from pytest_aorta.plan.launch_plan import read_plan
from pytest_aorta.result.folder import ERROR_FILE, PLAN_FILE, STOPPING_FILE, rank_folder

# A file that the process of a rank creates, so that a child that inherits the rank's variables is no rank.
_CLAIM = "claimed"


class _Rank:
    """The rank that this process is; a process that it forks is not a rank."""

    def __init__(self) -> None:
        self.pid = 0
        self.folder = Path()
        self.is_recorded = False

    @property
    def is_here(self) -> bool:
        """Return whether this process is a rank."""
        return self.pid == os.getpid()

    def become(self, number: int) -> None:
        """Make this process the rank ``number``, unless it is one or that rank has a process.

        Raises:
            SystemExit: The test's world has no such rank.
        """
        if self.is_here:
            return
        folder = rank_folder(Path(os.environ[variables.RUN_DIR]), number)
        if not folder.is_dir():
            sys.exit(
                f"pytest-aorta: the command has started a rank {number}, which the world of the test does not have; "
                f"mark the test with world(size=N), with the number of ranks that the command starts"
            )
        claim = folder / _CLAIM
        try:
            with claim.open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            # A program that replaces itself by exec, such as one that binds the rank to a core, is the same process.
            if claim.read_text() != str(os.getpid()):
                return
        self.pid, self.folder = os.getpid(), folder
        os.environ["RANK"] = str(number)
        rank_program.prepare(folder)
        _report_uncaught()

    def record(self) -> None:
        """Record the steps of this process from now on, if it is a rank; torch has been imported."""
        if not self.is_here or self.is_recorded:
            return
        self.is_recorded = True
        os.environ.setdefault("WORLD_SIZE", str(_world_size()))
        from pytest_aorta.worker.lifecycle import observe_rank

        write_result = observe_rank(self.folder.parent.parent, self.folder)
        # multiprocessing calls this at the end of its children, and by atexit in other programs: after threads and
        # child processes have ended.
        end = Finalize(None, partial(self._end, write_result), exitpriority=-100)
        exit_now = os._exit

        def leave(status: int) -> NoReturn:
            if status == 0 and self.is_here and threading.current_thread() is threading.main_thread():
                end()  # which does nothing more than once
            exit_now(status)

        os._exit = leave

    def _end(self, write_result: Callable[[], None]) -> None:
        # A process of mp.spawn whose parent is ended by the guard ends as if its function had returned.
        is_stopped = (self.folder.parent.parent / STOPPING_FILE).exists()
        if self.is_here and not is_stopped and not (self.folder / ERROR_FILE).exists():
            try:
                write_result()
            except Exception as error:  # noqa: BLE001 - every error has to be reported
                self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Report the error that ends this process, if it is a rank."""
        if self.is_here and rank_program.exit_code(error):
            rank_program.write_error(self.folder, error)


_own = _Rank()


def install() -> None:
    """Prepare this process to become a rank."""
    if variables.RUN_DIR not in os.environ:
        return
    sys.meta_path.insert(0, _AfterImport())
    run = BaseProcess.run

    def reporting(process: BaseProcess) -> None:
        try:
            run(process)
        except BaseException as error:
            # torch.multiprocessing sends the error to the parent, and exits.
            _own.fail(rank_program.cause_of_exit(error) or error)
            raise

    BaseProcess.run = reporting  # type: ignore[assignment, method-assign]
    if (number := os.environ.get("RANK", "")).isdecimal() and "WORLD_SIZE" in os.environ:
        _own.become(int(number))


@cache
def _world_size() -> int:
    return read_plan(Path(os.environ[variables.RUN_DIR]) / PLAN_FILE).world.size


def _report_uncaught() -> None:
    """Report an error that nobody catches; the interpreter calls the hook, except in children of multiprocessing."""
    shown = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        _own.fail(error)
        if shown is not sys.__excepthook__:  # the report has printed the traceback
            shown(kind, error, frames)

    sys.excepthook = report


def _follow_groups(c10d: ModuleType) -> None:
    """Have a process become a rank when it joins the process group."""
    join: Callable[..., Any] = c10d.init_process_group

    @wraps(join)
    def init_process_group(*args: Any, **keywords: Any) -> Any:
        from pytest_aorta.worker.groups import keep_groups

        keep_groups()
        number = inspect.signature(join).bind(*args, **keywords).arguments.get("rank", -1)
        # A rank that waits for its peers has to be known. Some backends number the ranks only when they have met.
        if number >= 0 or os.environ.get("RANK", "").isdecimal():
            _own.become(number if number >= 0 else int(os.environ["RANK"]))
        found = join(*args, **keywords)
        _own.become(c10d.get_rank())
        _own.record()
        return found

    c10d.init_process_group = init_process_group  # type: ignore[attr-defined]


def _follow_optimizers(module: ModuleType) -> None:
    """Have a process record its steps when it makes an optimizer; alone in its world, it becomes the rank then."""
    make: Callable[..., None] = module.Optimizer.__init__

    @wraps(make)
    def __init__(self: object, *args: Any, **keywords: Any) -> None:
        if _world_size() == 1:
            _own.become(0)
        _own.record()
        make(self, *args, **keywords)

    module.Optimizer.__init__ = __init__


# Module of torch -> what is done when it has been imported.
_FOLLOWED = {"torch.distributed.distributed_c10d": _follow_groups, "torch.optim.optimizer": _follow_optimizers}


class _AfterImport(MetaPathFinder):
    """Finder that changes modules of torch after their import, and finds no other module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec, with a loader that changes the module."""
        follow = _FOLLOWED.get(fullname)
        spec = PathFinder.find_spec(fullname, path, target) if follow else None
        if follow is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            follow(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
