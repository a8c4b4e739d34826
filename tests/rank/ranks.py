"""Process groups for checks: of this process alone, of simulated ranks, and two real ranks."""

import multiprocessing
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.builders import run_python

_ALONE = """
import os, pathlib, sys
from pytest_aorta.worker.lifecycle import run_rank

run_rank(*map(pathlib.Path, sys.argv[1:]), lambda: os.environ.get("COMES_TO_ITS_END") or os._exit(1))
"""


def run_rank_alone(run_dir: Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a rank in a process of its own: a fork of this process would wait for autograd's threads, which it lacks.

    Without ``COMES_TO_ITS_END`` in the environment, a script that does so fails.
    """
    return run_python("-c", _ALONE, str(run_dir), str(folder), env=os.environ | environment)


@contextmanager
def fake_group(size: int, rank: int = 0) -> Iterator[None]:
    """Make this process one of several ranks whose collectives do nothing, until the block ends."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    with left_at_the_end():
        yield


@contextmanager
def own_group(folder: Path, backend: str | None = "gloo") -> Iterator[None]:
    """Make this process the only rank of a group until the block ends; the group's store is in ``folder``."""
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
    with left_at_the_end():
        yield


@contextmanager
def left_at_the_end() -> Iterator[None]:
    """Leave the process group at the end of the block, if there is one by then."""
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        # DTensor keeps specs of operators, whose meshes have groups that are gone now.
        _clear_sharding_prop_cache()


class Requests(TorchDispatchMode):
    """Calls ``note`` with each collective of this process: its operator's name, its arguments, and if it is async."""

    def __init__(self, note: Callable[[str, Any, bool], object]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            # Without the default, True.
            self._note(func.overloadpacket.__name__, args, all(one is not False for one in args))
        return func(*args, **kwargs or {})


def doubling(name: str, args: Any, _is_async: bool) -> None:
    """Note of an all-reduce in a world of one: the sum over two ranks with equal values."""
    if name == "allreduce_":
        args[0][0].mul_(2)


def run_two_ranks(run: Callable[..., None], *arguments: object) -> None:
    """Call ``run`` with the number of the rank and ``arguments`` in two processes that a server forks.

    The server imports torch once in a session; each process that is spawned would import it again.
    """
    multiprocessing.set_forkserver_preload(["pytest", "torch.distributed", "pytest_aorta.worker"])
    mp.start_processes(run, arguments, nprocs=2, start_method="forkserver")
