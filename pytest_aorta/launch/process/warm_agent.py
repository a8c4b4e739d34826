"""The agent of a warm launch, in torchrun's place: it forks the ranks, hosts their rendezvous, and stops them."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from pytest_aorta.common.files import write_json
from pytest_aorta.launch.process import rank as rank_program
from pytest_aorta.launch.process.guard import STACKS_S, die_with
from pytest_aorta.result.folder import AGENT_FILE

TERM_S = 2.0
# Only ranks of this host find each other through this address.
HOST = "127.0.0.1"


class _Stopped(BaseException):
    """Raised on SIGTERM, with which the guard ends the launch."""


class WarmAgent:
    """Agent that starts and watches the ranks of one launch, as torchrun's agent does."""

    def __init__(self, run_dir: Path, world_size: int) -> None:
        self.run_dir = run_dir
        self.world_size = world_size
        self.running: dict[int, int] = {}
        self.failures: dict[int, dict[str, int]] = {}
        self.store: object = None

    def main(self) -> int:
        """Run the ranks and return torchrun's exit code: 0, 1 if a rank failed, 143 if the guard stopped it."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _raise_stopped)
        try:
            self.start()
            self.wait()
        except _Stopped:
            self.stop()
            return 128 + signal.SIGTERM
        if not self.failures:
            return 0
        # The failures, in the format of torchrun.py, are only those of ranks that failed on their own.
        failures = [entry for _, entry in sorted(self.failures.items())]
        write_json(self.run_dir / AGENT_FILE, {"failures": failures, "running": sorted(self.running.values())})
        self.stop()
        return 1

    def start(self) -> None:
        """Fork the ranks, then serve their rendezvous as long as this object lives."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        # The port is taken before the fork, and the store's thread starts after it: a fork keeps only one thread.
        listener = socket.create_server((HOST, 0), backlog=2048)
        port = listener.getsockname()[1]
        for rank in range(self.world_size):
            self.running[fork(partial(self.run_rank, rank, listener))] = rank
        self.store = TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())

    def run_rank(self, rank: int, listener: socket.socket) -> NoReturn:
        """Run the rank's program in the state in which torchrun would start it; runs in the rank's process."""
        import numpy as np
        import torch

        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        port = listener.getsockname()[1]
        listener.close()
        os.environ.update(rank_environment(rank, self.world_size, port, self.run_dir.name))
        sys.argv = [str(rank_program.__file__), str(self.run_dir)]
        # Python reseeds `random` after a fork; without a new seed, these two would be equal in every rank.
        np.random.seed()
        torch.default_generator.seed()
        importlib.invalidate_caches()
        rank_program.main(self.run_dir)
        raise AssertionError("rank.main returned, and has to exit the process")

    def wait(self) -> None:
        """Wait until every rank has ended or a rank has failed; the guard limits the time."""
        while self.running and not self.failures:
            self.record_exit(*os.waitpid(-1, 0))
        while self.running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self.record_exit(pid, status)

    def record_exit(self, pid: int, status: int) -> None:
        """Record a rank's exit code."""
        rank, code = self.running.pop(pid), os.waitstatus_to_exitcode(status)
        if code:
            self.failures[rank] = {"rank": rank, "pid": pid, "exit_code": code}

    def stop(self) -> None:
        """End the ranks that still run, by SIGTERM, then by SIGKILL."""
        # The guard may send SIGTERM again.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # A rank whose main thread holds the GIL can't act on SIGTERM, but writes its stacks on SIGUSR1.
        for number, limit_s in ((signal.SIGTERM, TERM_S), (signal.SIGUSR1, STACKS_S), (signal.SIGKILL, TERM_S)):
            for pid in self.running:
                # SIGTERM may have arrived after this process had waited for a rank, and before it recorded the end.
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            deadline_s = time.monotonic() + limit_s
            while self.running and time.monotonic() < deadline_s:
                try:
                    pid, _ = os.waitpid(-1, os.WNOHANG)
                except ChildProcessError:  # no rank is left
                    return
                self.running.pop(pid, None)
                time.sleep(0.005)


def rank_environment(rank: int, world_size: int, port: int, run_id: str) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank of a single host."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": run_id,
        # Every rank connects to the agent's store; rank 0 starts none of its own.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def fork(work: Callable[[], int]) -> int:
    """Run ``work`` in a child with its own session that dies with this process, and return the child's id."""
    parent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with(parent_pid)
        run_and_exit(work)
    return pid


def run_and_exit(work: Callable[[], int]) -> NoReturn:
    """Run ``work`` in a session of its own and exit, never returning into the parent's code; runs in a forked child."""
    exit_code = 1
    try:
        os.setsid()
        exit_code = work()
    except BaseException:  # noqa: BLE001 - every error has to be in the log
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stderr.flush()
        os._exit(exit_code)


def _raise_stopped(*_: object) -> NoReturn:
    raise _Stopped
