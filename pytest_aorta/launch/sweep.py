"""Finding and ending the processes of launches whose guard is gone.

A guard ends the processes of its launch by their ancestry, which is lost when the guard is killed. Two marks remain:

- The variable ``AORTA_LAUNCH_ID`` in ``/proc/PID/environ``. Programs inherit the variable. ``/proc`` shows the
  environment with which a program was started, but a warm launch is forked and starts no program. So the guard of a
  warm launch overwrites the value in place, in the memory that ``/proc`` shows (:func:`mark_this_process`), and forks
  inherit that memory. A launch inside a launch has the ids of both.
- Standard output or standard error that is the log of a rank or of the torchrun agent. This mark finds programs that
  were started with an empty environment. A program that only reads a log, such as ``tail -f``, has the log open under
  another descriptor.

A process without a mark is found if it descends from one that has a mark. A guard that is killed leaves such processes
to its keeper (``process/guard.py``), which ends them.
"""

import ctypes
import hashlib
import os
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from pytest_aorta.common import variables
from pytest_aorta.launch.watch import is_readable
from pytest_aorta.result.folder import AGENT_LOG, RANKS_FOLDER

FORK_SERVER = "pytest_aorta.launch.process.forkserver"
KILL_S = 10.0
TICK_S = 0.01
# A process that is just starting a program shows no environment for a moment, so several passes have to find nothing.
_EMPTY_PASSES = 2


def launch_id(run_dir: Path) -> str:
    """Return the id of the launch that writes into ``run_dir``; no other launch has the same folder."""
    return hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:32]


def launch_ids(run_dir: Path, environ: Mapping[str, str]) -> str:
    """Return a launch's value of AORTA_LAUNCH_ID: the ids of the launches around it, then its own."""
    own, outer = launch_id(run_dir), environ.get(variables.LAUNCH_ID, "")
    # The coordinator starts the node agent of node 0, so the coordinator's launch is around the agent's own.
    return f"{outer}:{own}" if outer else own


def unmarked(ids: str) -> str:
    """Return a value of the same length that belongs to no launch, which a forked guard can overwrite."""
    return "-" * len(ids)


def mark_this_process(ids: str) -> None:
    """Overwrite AORTA_LAUNCH_ID in the memory that ``/proc/PID/environ`` shows, if it exists there with this length.

    Call this before the variable is set or deleted: either makes ``getenv`` return another address.
    """
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_void_p
    address, value = getenv(variables.LAUNCH_ID.encode()), ids.encode()
    if address and len(ctypes.string_at(address)) == len(value):
        ctypes.memmove(address, value, len(value))


def processes_of(run_dirs: Iterable[Path]) -> list[int]:
    """Return ids of living processes of the launches in ``run_dirs``, except this process and its ancestors."""
    ids, logs = _marks(run_dirs)
    if not ids:
        return []
    own = _line(os.getpid())
    pids = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())  # noqa: PTH208 - pathlib is slower
    found = [pid for pid in pids if pid not in own and _belongs(pid, ids, logs)]
    # Descendants first: with its parent, a process would lose what it is found by.
    return sorted(found, key=lambda pid: len(_line(pid)), reverse=True)


def end_processes(run_dirs: Iterable[Path]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Kill the processes of the launches that write into ``run_dirs``, and wait until they are gone.

    Returns:
        The ids of processes that are gone, and of processes that could not be ended within ``KILL_S`` seconds.
    """
    folders = list(run_dirs)
    pidfds: dict[int, int] = {}
    deadline_s = time.monotonic() + KILL_S
    empty_passes = 0
    try:
        while True:
            found = processes_of(folders)
            for pid in found:
                _kill(pid, folders, pidfds)
            # Wait for the pidfds: a process's memory is gone before its open files, and an open device is not free yet.
            alive = {pid for pid, pidfd in pidfds.items() if not is_readable(pidfd, 0)}
            left = alive.union(found).difference(pidfds.keys() - alive)
            empty_passes = 0 if left else empty_passes + 1
            if empty_passes == _EMPTY_PASSES or time.monotonic() >= deadline_s:
                return tuple(sorted(pidfds.keys() - left)), tuple(sorted(left))
            time.sleep(TICK_S)
    finally:
        for pidfd in pidfds.values():
            os.close(pidfd)


def end_orphaned_servers() -> None:
    """Kill fork servers that a signal, such as SIGSTOP, stopped as they started, and whose pytest is dead.

    A server asks the kernel to die with its parent, whose id is the last word of its command line, when it has started.
    What it forks has its command line too, and the id of a launch.
    """
    for process in Path("/proc").glob("[1-9]*"):
        with suppress(OSError):  # the process of another user, or one that has ended
            words = (process / "cmdline").read_text(errors="replace").split("\0")
            if words[-4:-3] == [FORK_SERVER] and (process / "ns" / "pid").samefile("/proc/self/ns/pid"):
                pid, own = int(process.name), f"\0{variables.LAUNCH_ID}=-".encode()
                is_server = own in b"\0" + (process / "environ").read_bytes()
                if is_server and is_stopped(pid) and _stat(pid)[1] != words[-2]:
                    os.kill(pid, signal.SIGKILL)


def is_stopped(pid: int) -> bool:
    """Return whether a signal such as SIGSTOP has stopped the process."""
    return _stat(pid)[:1] == ["T"]


def pid_namespace() -> int:
    """Return the inode of this process's PID namespace; 0 if ``/proc`` shows the process ids of another namespace."""
    # After `unshare --pid` without `--mount-proc`, /proc is that of the outer namespace.
    is_shown = os.readlink("/proc/self") == str(os.getpid())  # noqa: PTH115 - the text, not a path
    return Path("/proc/self/ns/pid").stat().st_ino if is_shown else 0


def _kill(pid: int, folders: list[Path], pidfds: dict[int, int]) -> None:
    with suppress(OSError):
        if pid not in pidfds:
            pidfds[pid] = os.pidfd_open(pid)
            # With the pidfd open, the process id can't be reused any more.
            if not _belongs(pid, *_marks(folders)):
                os.close(pidfds.pop(pid))
                return
        signal.pidfd_send_signal(pidfds[pid], signal.SIGKILL)


def _marks(run_dirs: Iterable[Path]) -> tuple[list[bytes], tuple[str, ...]]:
    """Return the launches' ids, and the beginnings of the paths of their logs."""
    folders = list(run_dirs)
    logs = [prefix for folder in folders for prefix in (f"{folder / RANKS_FOLDER}/", str(folder / AGENT_LOG))]
    return [launch_id(folder).encode() for folder in folders], tuple(logs)


def _belongs(pid: int, ids: list[bytes], logs: tuple[str, ...]) -> bool:
    """Return whether a process, or an ancestor that is none of this process, has a mark."""
    return any(_is_marked(each, ids, logs) for each in _line(pid) - _line(os.getpid()))


def _is_marked(pid: int, ids: list[bytes], logs: tuple[str, ...]) -> bool:
    process = f"/proc/{pid}"
    # Processes of other users can't be read, and processes that have ended have no environment.
    with suppress(OSError):
        environ = Path(process, "environ").read_bytes()
        if environ and any(mark in environ for mark in ids):
            return True
    with suppress(OSError):
        return any(os.readlink(f"{process}/fd/{stream}").startswith(logs) for stream in (1, 2))  # noqa: PTH115
    return False  # also without standard output


def _line(pid: int) -> set[int]:
    """Return the ids of a process and of its ancestors."""
    found: set[int] = set()
    while pid and pid not in found:
        found.add(pid)
        fields = _stat(pid)
        pid = int(fields[1]) if fields else 0
    return found


def _stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the state on; empty if the process does not exist."""
    with suppress(OSError):
        # The program's name can contain spaces and parentheses: count fields from the last parenthesis.
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return []
