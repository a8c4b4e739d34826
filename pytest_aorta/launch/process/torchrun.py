"""torchrun's agent, with the exit code of every rank that failed on its own kept in ``agent.json``.

torchrun itself reports exit codes only in its log. Run as
``python -m pytest_aorta.launch.process.torchrun RUN_DIR ARGS...``.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from pathlib import Path

from pytest_aorta.common import variables
from pytest_aorta.result.folder import AGENT_FILE


def main(argv: list[str]) -> int:
    """Run torchrun with ``argv[1:]``; returns its exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    from pytest_aorta.common.files import write_json

    store = serve_rendezvous()
    os.environ[variables.AGENT_PID] = str(os.getpid())
    try:
        run(parse_args(argv[1:]))
    except ChildFailedError as error:
        # Next to ranks that ended by themselves, ranks that the agent has stopped may be in it, with SIGTERM.
        failures = [
            {"rank": rank, "pid": failure.pid, "exit_code": failure.exitcode}
            for rank, failure in sorted(error.failures.items())
        ]
        write_json(Path(argv[0]) / AGENT_FILE, {"failures": failures})
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    finally:
        del store  # it serves for as long as it lives
    return 0


def die_with_guard(guard_pid: int) -> None:
    """Where a profiler has been started in between, end when the guard does: ranks die with this process.

    The guard's own child has asked the kernel for that. Of another process, it would tell of its parent, and a
    profiler's launcher may go before the ranks do.
    """
    if guard_pid == os.getppid():
        return
    guard = os.pidfd_open(guard_pid)

    def wait() -> None:
        select.select([guard], [], [])
        os._exit(1)

    threading.Thread(target=wait, name="aorta-guard", daemon=True).start()


def serve_rendezvous() -> object:
    """On node 0 of several, serve the nodes' rendezvous at the socket that was inherited."""
    fd = os.environ.pop(variables.STORE_FD, None)
    if fd is None:
        return None
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # A socket that has listened since the other nodes were told its port: nobody else can have taken it.
    with socket.socket(fileno=os.dup(int(fd))) as listening:
        host, port = listening.getsockname()[:2]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=int(fd))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Another version of the guard may not tell.
    die_with_guard(int(os.environ.pop(variables.GUARD_PID, os.getppid())))
    sys.exit(main(sys.argv[1:]))
