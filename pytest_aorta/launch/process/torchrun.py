"""The torchrun agent, ``python -m pytest_aorta.launch.process.torchrun RUN_DIR ARGS...``.

The program runs torchrun, and writes the exit code of every rank that failed on its own to ``agent.json``: torchrun
reports exit codes only in its log.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path

from pytest_aorta.common import variables
from pytest_aorta.launch.process.rank import without_collection
from pytest_aorta.launch.readiness import is_readable
from pytest_aorta.plan.profiler import WRAPPERS
from pytest_aorta.result.folder import AGENT_FILE, rank_pids

# The logger that names the ranks that torchrun stops.
STOPPING_LOGGER = "torch.distributed.elastic.multiprocessing.api"
LOOPBACK = "127.0.0.1"


class StoppedRanks(logging.Filter):
    """The last signal that torchrun sent to each rank that it stopped, by process id, read from torchrun's log."""

    def __init__(self) -> None:
        super().__init__()
        self.signals: dict[object, signal.Signals] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep the process id that a message names; every message stays in the log."""
        text = str(record.msg)
        if isinstance(record.args, tuple) and record.args:
            if text.startswith("Sending process"):
                self.signals[record.args[0]] = signal.SIGTERM
            elif text.startswith("Unable to shutdown process"):
                self.signals[record.args[0]] = signal.SIGKILL
        return True

    def ranks(self, run_dir: Path) -> list[int]:
        """Return the ranks that torchrun stopped."""
        return sorted(rank for rank, pid in rank_pids(run_dir).items() if pid in self.signals)


def main(argv: list[str]) -> int:
    """Run torchrun with ``argv[1:]`` and return its exit code."""
    with without_collection():
        from torch.distributed import TCPStore  # type: ignore[attr-defined]
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import parse_args, run

    from pytest_aorta.common.files import write_json

    stopped = StoppedRanks()
    logging.getLogger(STOPPING_LOGGER).addFilter(stopped)
    store = serve_rendezvous()
    arguments = parse_args(argv[1:])
    if arguments.nnodes == "1":
        # torchrun's c10d rendezvous unpickles what anyone writes into its store. Its static rendezvous uses this store,
        # which listens from now on, on the loopback address.
        listener = socket.create_server((LOOPBACK, 0), backlog=2048)
        arguments.master_addr, arguments.master_port = listener.getsockname()
        store = TCPStore(
            LOOPBACK,
            arguments.master_port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )
    os.environ[variables.AGENT_PID] = str(os.getpid())
    try:
        run(arguments)
    except ChildFailedError as error:
        # Besides ranks that failed, the error contains ranks that torchrun has stopped.
        failures = [
            {"rank": rank, "pid": failure.pid, "exit_code": failure.exitcode}
            for rank, failure in sorted(error.failures.items())
            if failure.exitcode != -stopped.signals.get(failure.pid, 0)
        ]
        run_dir = Path(argv[0])
        write_json(run_dir / AGENT_FILE, {"failures": failures, "running": stopped.ranks(run_dir)})
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    finally:
        del store  # the store serves as long as the object lives
    return 0


def die_with_guard(guard_pid: int) -> None:
    """End this process when the guard ends, even if a profiler runs between the two; ranks die with this process.

    Without a profiler this process is the guard's child, and the kernel kills it with its parent. With a profiler the
    parent is the profiler's launcher, which may end before the ranks do.
    """
    if guard_pid == os.getppid():
        return
    guard = os.pidfd_open(guard_pid)

    def wait() -> None:
        is_readable(guard, None)
        os._exit(1)

    threading.Thread(target=wait, name="aorta-guard", daemon=True).start()


def serve_rendezvous() -> object:
    """Serve the nodes' rendezvous at the inherited socket and return the store; None unless on node 0 of several."""
    fd = os.environ.pop(variables.STORE_FD, None)
    if fd is None:
        return None
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # The socket has been listening since the other nodes received its port, so no other program can take the port.
    with socket.socket(fileno=os.dup(int(fd))) as listening:
        host, port = listening.getsockname()[:2]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=int(fd))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The guard of another version may not set the variable.
    die_with_guard(int(os.environ.pop(variables.GUARD_PID, os.getppid())))
    exit_code = main(sys.argv[1:])
    if os.environ.get(variables.PROFILER) in WRAPPERS:
        sys.exit(exit_code)  # these profilers write their traces when the process exits normally
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Python would take a third of a second to free the objects of torch, and the guard waits for the agent's end.
    os._exit(exit_code)
