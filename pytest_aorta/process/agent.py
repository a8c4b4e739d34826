"""torchrun's agent, with the exit code of every rank that failed on its own kept in ``agent.json``.

torchrun itself tells exit codes only in its log. Run as ``python -m pytest_aorta.process.agent RUN_DIR ARGS...``.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from pathlib import Path

from pytest_aorta.process.guard import AGENT_PID_VARIABLE, GUARD_PID_VARIABLE


def main(argv: list[str]) -> int:
    """Run torchrun with ``argv[1:]``; returns its exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    from pytest_aorta.files import write_json

    os.environ[AGENT_PID_VARIABLE] = str(os.getpid())
    try:
        run(parse_args(argv[1:]))
    except ChildFailedError as error:
        # Next to ranks that ended by themselves, ranks that the agent has stopped may be in it, with SIGTERM.
        failures = [
            {"rank": rank, "pid": failure.pid, "exit_code": failure.exitcode}
            for rank, failure in sorted(error.failures.items())
        ]
        write_json(Path(argv[0]) / "agent.json", {"failures": failures})
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
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


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Another version of the guard may not tell.
    die_with_guard(int(os.environ.pop(GUARD_PID_VARIABLE, os.getppid())))
    sys.exit(main(sys.argv[1:]))
