"""A process with torch imported, from which warm launches are forked: ``python -u -m ... CHANNEL_FD PARENT_PID``.

The fork server never initializes CUDA, starts no thread, and imports none of the user's code. For each launch it forks
a guard, the guard forks an agent in torchrun's place, and the agent forks the ranks. The server ends with pytest;
running launches have their own lifelines.
"""

import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from pytest_aorta.common import variables
from pytest_aorta.common.files import without_collection
from pytest_aorta.launch.process import rank as rank_program
from pytest_aorta.launch.process.channel import close_all, receive, send
from pytest_aorta.launch.process.guard import die_with, fork, guard_launch, prepare_agent, reap_children
from pytest_aorta.launch.watch import is_readable

TERM_S = 2.0
# Only ranks of this host find each other through this address.
HOST = "127.0.0.1"
CUDA_PROOF_S = 60.0
# Importing from a cold network disk takes minutes.
IMPORT_S = 200.0
# The constructor of AdamW imports torch._dynamo.
PRELOADED = ("torch", "torch._dynamo", "torch.distributed.fsdp", "pytest_aorta.worker.lifecycle")


class _Stopped(BaseException):
    """Raised on SIGTERM, with which the guard ends the launch."""


class _WarmAgent:
    """Agent that starts and watches the ranks of one launch, as torchrun's agent does."""

    def __init__(self, run_dir: Path, world_size: int) -> None:
        self.run_dir = run_dir
        self.world_size = world_size
        self.running: dict[int, int] = {}
        # Number, process id and exit code of each rank that failed on its own.
        self.failures: list[tuple[int, int, int]] = []
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
        rank_program.leave_failures(self.run_dir, self.failures, self.running.values())
        self.stop()
        return 1

    def start(self) -> None:
        """Fork the ranks, then serve their rendezvous as long as this object lives."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        # The port is taken before the fork, and the store's thread starts after it: a fork keeps only one thread.
        listener = socket.create_server((HOST, 0), backlog=2048)
        port = listener.getsockname()[1]
        os.environ[variables.STORE] = rank_program.make_store()
        for rank in range(self.world_size):
            self.running[fork_apart(partial(self.run_rank, rank, listener))] = rank
        self.store = TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())

    def run_rank(self, rank: int, listener: socket.socket) -> NoReturn:
        """Run the rank's program in the state in which torchrun would start it; runs in the rank's process."""
        import numpy as np
        import torch

        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        port = listener.getsockname()[1]
        listener.close()
        os.environ.update(_rank_environment(rank, self.world_size, port, self.run_dir.name))
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
            self.failures.append((rank, pid, code))

    def stop(self) -> None:
        """End the ranks that still run, by SIGTERM, then by SIGKILL."""
        # The guard may send SIGTERM again.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        rank_program.ask_for_evidence(self.run_dir)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in self.running:
                # SIGTERM may have arrived after this process had waited for a rank, and before it recorded the end.
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            deadline_s = time.monotonic() + TERM_S
            while self.running and time.monotonic() < deadline_s:
                try:
                    pid, _ = os.waitpid(-1, os.WNOHANG)
                except ChildProcessError:  # no rank is left
                    return
                self.running.pop(pid, None)
                time.sleep(0.005)


def _rank_environment(rank: int, world_size: int, port: int, run_id: str) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank of a single host."""
    return {
        **rank_program.rank_variables(rank, world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": run_id,
        # Every rank connects to the agent's store; rank 0 starts none of its own.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def fork_apart(work: Callable[[], int], *, outlives_parent: bool = False) -> int:
    """Run ``work`` in a child with a session of its own, which by default dies with this process; return its id."""
    parent_pid = os.getpid()

    def child() -> int:
        if not outlives_parent:
            die_with(parent_pid)
        os.setsid()
        return work()

    return fork(child)


def _raise_stopped(*_: object) -> NoReturn:
    raise _Stopped


class ForkServer:
    """Server that answers pytest's requests one after the other, until the channel closes."""

    def __init__(self, channel: socket.socket, num_threads_allowed: int) -> None:
        self.channel = channel
        self.num_threads_allowed = num_threads_allowed
        self.kept_out: list[str] = []
        self.tried: set[str] = set()
        self.is_proven = False

    def serve(self) -> None:
        """Answer requests until pytest has closed the channel."""
        with suppress(EOFError, ConnectionError):
            while True:
                message, fds = receive(self.channel)
                # Guards that have ended.
                reap_children()
                try:
                    if message["request"] == "launch":
                        self.launch(message, fds)
                    else:
                        send(self.channel, {"problem": self.prepare(message["modules"], message["environ"])})
                finally:
                    close_all(fds)

    def prepare(self, modules: list[str], environ: dict[str, str] | None) -> str | None:
        """Import modules, and prove once that a child can use CUDA; return why the server can't be forked, or None.

        Args:
            modules: Modules that a workload's ranks need.
            environ: Environment of ranks that use CUDA; None on CPU ranks.
        """
        if problem := self.preload([name for name in modules if name not in self.tried]) or self.problem():
            return problem
        if environ is not None and not self.is_proven:
            # torch.cuda.is_initialized misses some reasons why a forked child can't use the devices.
            if (answer := _answer_of_child(partial(_allocate, environ), CUDA_PROOF_S)).error:
                return f"a forked child can't allocate on the device: {answer.error}"
            self.is_proven = True
        return None

    def problem(self) -> str | None:
        """Return the reason why this process must not be forked; None if it may be forked."""
        import torch

        if (count := num_threads()) > self.num_threads_allowed:
            return f"it has {count} threads and a fork would lose all but one"
        return "it has initialized CUDA" if torch.cuda.is_initialized() else None

    def preload(self, modules: list[str]) -> str | None:
        """Import modules that a workload's ranks need; return the reason why a module can't be imported, or None.

        A forked child tries each import first. A module that starts a thread or a process, as Inductor does on some
        machines, is left for the ranks to import: a fork would lose the thread. The launch's log names such modules.
        """
        for name in modules:
            answer = _answer_of_child(partial(_import_one, name), IMPORT_S)
            if answer.error:
                return f"it can't import {name}: {answer.error}"
            if answer.effect:
                self.kept_out.append(f"each rank imports {name}, because it {answer.effect} when it is imported")
            else:
                with without_collection():
                    importlib.import_module(name)
            self.tried.add(name)
        if modules:
            _freeze()
        return None

    def launch(self, message: dict[str, Any], fds: list[int]) -> None:
        """Fork the guard of a launch and send its pidfd; ``fds`` are lifeline, verdict, log and leases."""
        pid = fork_apart(lambda: self.guard(message, fds), outlives_parent=True)
        # The process id can't have been reused: only a later request reaps the guard.
        pidfd = os.pidfd_open(pid)
        try:
            send(self.channel, {}, [pidfd])
        finally:
            os.close(pidfd)

    def guard(self, message: dict[str, Any], fds: list[int]) -> int:
        """Guard the launch to its end; runs in the guard's process."""
        # pytest notices the server's death only when no other process holds the server's end of the channel.
        self.channel.close()
        lifeline_fd, verdict_fd, log_fd = fds[:3]
        for stream in (1, 2):
            os.dup2(log_fd, stream)
        os.close(log_fd)
        for note in self.kept_out:
            print(f"fork server: {note}", flush=True)
        os.environ.clear()
        os.environ.update(message["environ"])
        os.chdir(message["folder"])
        spec = message["spec"] | {"lifeline_fd": lifeline_fd, "verdict_fd": verdict_fd}

        def run_agent() -> int:
            prepare_agent(os.getppid())
            # pytest reads the end of the verdict pipe as the guard's exit.
            close_all([lifeline_fd, verdict_fd])
            return _WarmAgent(Path(spec["run_dir"]), spec["num_ranks"]).main()

        guard_launch(spec, lambda: fork_apart(run_agent))
        return 0


def preload() -> int:
    """Import modules that ranks need, and return how many threads a forkable server may have.

    Raises:
        RuntimeError: An import has started a process.
    """
    with without_collection():
        importlib.import_module("numpy")
        # OpenBLAS ends its own threads before a fork.
        num_threads_allowed = num_threads()
        for name in PRELOADED:
            importlib.import_module(name)
    if children():
        raise RuntimeError("importing torch has started a process, which forked ranks would share")
    _freeze()
    return num_threads_allowed


def _freeze() -> None:
    """Exclude existing objects from garbage collection, so that ranks neither scan nor copy them."""
    gc.collect()
    gc.freeze()


def children() -> set[str]:
    """Return the process ids of this process's children."""
    found = set[str]()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended since
            found.update((task / "children").read_text().split())
    return found


class _Answer(NamedTuple):
    """The findings of a forked child: what its task does that a fork would lose, or why the task has failed."""

    effect: str = ""
    error: str = ""


def _answer_of_child(task: Callable[[], str], limit_s: float) -> _Answer:
    """Return what ``task`` returns in a forked child, or the reason why it failed."""

    def answer() -> int:
        try:
            found = _Answer(effect=task())
        except Exception as error:  # noqa: BLE001 - every error has to be reported
            found = _Answer(error=f"{type(error).__name__}: {error}"[:2000])
        os.write(write_fd, json.dumps(found).encode())
        return 0

    read_fd, write_fd = os.pipe()
    pid = fork_apart(answer)
    os.close(write_fd)
    found = _Answer(error=f"no answer within {limit_s:g} s")
    if is_readable(read_fd, limit_s):
        text = os.read(read_fd, 1 << 16)
        found = _Answer(*json.loads(text)) if text else _Answer(error="the child died")
    os.close(read_fd)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return found


def num_threads() -> int:
    """Return the number of this process's threads, including threads of libraries."""
    return len(list(Path("/proc/self/task").iterdir()))


def _allocate(environ: dict[str, str]) -> str:
    import torch

    os.environ.clear()
    os.environ.update(environ)
    torch.zeros(1, device=environ[variables.DEVICE]).item()
    return ""


def _import_one(name: str) -> str:
    import torch

    before = num_threads()
    with without_collection():
        importlib.import_module(name)
    if num_threads() > before:
        return "starts a thread"
    if children():
        return "starts a process"
    return "initializes CUDA" if torch.cuda.is_initialized() else ""


def main(argv: list[str]) -> None:
    """Serve the channel ``argv[0]`` as long as the process ``argv[1]`` lives."""
    channel = socket.socket(fileno=int(argv[0]))
    channel.set_inheritable(False)
    die_with(int(argv[1]))
    server = ForkServer(channel, preload())
    send(channel, {"ready": True})
    server.serve()
    # Python would take half a second to free the objects of torch, and pytest waits for the server's end.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
