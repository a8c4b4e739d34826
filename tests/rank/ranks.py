"""Two real ranks, for checks of what ranks exchange."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

import torch.multiprocessing as mp


def run_two_ranks(run: Callable[..., None], *arguments: object) -> None:
    """Call ``run`` with the number of the rank and ``arguments`` in two processes that a server forks.

    The server imports torch once in a session; each process that is spawned would import it again.
    """
    multiprocessing.set_forkserver_preload(["pytest", "torch.distributed", "pytest_aorta.worker"])
    mp.start_processes(run, arguments, nprocs=2, start_method="forkserver")
