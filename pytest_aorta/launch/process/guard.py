"""The guard: the process between pytest and torchrun that stops a launch and proves that none of its processes is left.

Cold launches run the guard as a file, ``python -I -S guard.py SPEC``, with the standard library only, so that it starts
in 0.02 s. In a warm launch the fork server forks the guard, and warm_agent.py takes torchrun's place. The guard is the
sub-reaper of every process that it starts: a daemonized grandchild becomes the guard's child when its parent dies. The
guard watches the agent, a lifeline pipe whose other end closes with pytest (a byte in the pipe asks for a stop), and
files that ranks write into the run folder. Its verdict goes to pytest over a pipe, which also works on a full disk.
"""

import ctypes
import json
import os
import select
import signal
import stat
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

# A copy of result.folder.STOPPING_FILE: this program runs without the package. A test compares the two.
STOPPING_FILE = "stopping"
# The states of a process that has ended and that its parent has not waited for.
ENDED = ("Z", "X")
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TICK_S = 0.05
STACKS_S = 0.5
TERM_S = 2.0
KILL_S = 10.0
# Within this time torchrun reports ranks that failed. Nothing but the guard notices a rank that exited with code 0.
GONE_S = 5.0
LOOK_S = 0.5
LOG_BYTES = 1 << 16
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The agent: an object of subprocess that is freed waits for its process, whose exit code would then be lost.
_kept: list[object] = []


class Guard:
    """One guarded launch; ``guarded.guard_spec`` builds ``spec``.

    ``start_agent`` starts the torchrun agent and returns its process id. The guard's child is a keeper, which is the
    agent's parent (:func:`_start_keeper`).
    """

    def __init__(self, spec: dict[str, Any], start_agent: Callable[[], int]) -> None:
        self.spec = spec
        self.start_agent = start_agent
        self.ranks = Path(spec["run_dir"]) / "ranks"
        self.agent_log = Path(spec["run_dir"]) / "agent.log"
        self.rank_folders: list[Path] = []
        self.keeper_pid = self.ended_fd = 0
        self.agent_status: int | None = None
        self.first_error_s: float | None = None
        self.first_result_s: float | None = None
        self.first_gone_s: float | None = None
        self.looked_s = 0.0

    def run(self) -> dict[str, Any]:
        """Start the agent, wait for a reason to stop, end every process, and return the verdict."""
        began_s = time.monotonic()
        # The keeper stands for the agent: it takes the agent's signals, and tells how the agent has ended.
        self.keeper_pid, self.ended_fd = _start_keeper(self.start_agent)
        reason = self.watch(began_s + self.spec["time_limit_s"])
        leftover = sorted(_living() - {self.keeper_pid})
        if reason not in ("exit", "parent_gone"):
            self.dump_stacks()
        survivors = self.stop()
        return {
            "reason": reason,
            "agent_status": self.agent_status,
            "stopped": leftover,
            "survivors": survivors,
            "wall_s": time.monotonic() - began_s,
        }

    def watch(self, deadline_s: float) -> str:
        """Wait until the launch has ended or has to be ended, and return the reason."""
        lifeline_fd = self.spec["lifeline_fd"]
        events = select.poll()
        for fd in (lifeline_fd, self.ended_fd, os.pidfd_open(self.keeper_pid)):
            events.register(fd, select.POLLIN)
        while True:
            if lifeline_fd in dict(events.poll(TICK_S * 1000)):
                return "stopped" if os.read(lifeline_fd, 1) else "parent_gone"
            self.reap()
            if self.agent_status is not None:
                return "exit"
            now_s = time.monotonic()
            if now_s > deadline_s:
                return "time_limit"
            if reason := self.marks(now_s):
                return reason

    def marks(self, now_s: float) -> str | None:
        """Return a reason to stop that the ranks' files show, or None."""
        if self.spec["leave_s"] and (self.ranks.parent / STOPPING_FILE).exists():
            return "rank_error"  # of an agent of another node
        size = _size(self.agent_log)
        for folder in self.started():
            size += _size(folder / "output.log")
            if self.first_error_s is None and (folder / "error.json").exists():
                self.first_error_s = now_s
            if self.first_result_s is None and (folder / "result.json").exists():
                self.first_result_s = now_s
        if size > self.spec["output_cap_bytes"]:
            return "output_cap"
        if self.first_error_s is not None and now_s - self.first_error_s > self.spec["error_grace_s"]:
            return "rank_error"
        if self.first_result_s is not None and now_s - self.first_result_s > self.spec["straggler_s"]:
            return "straggler"
        if now_s - self.looked_s > LOOK_S:
            self.looked_s = now_s
            states = {folder: state_of(folder) for folder in self.started()}
            gone = any(_is_gone(folder, state) for folder, state in states.items()) and not self.is_stopping()
            self.first_gone_s = (self.first_gone_s or now_s) if gone else None
        if self.first_gone_s is not None and now_s - self.first_gone_s > GONE_S:
            return "rank_gone"
        return None

    def is_stopping(self) -> bool:
        """Return whether torchrun has noticed a failed rank and is stopping the others, which takes up to 30 s."""
        with suppress(OSError):
            return "closing signal" in _tail(self.agent_log)
        return False

    def started(self) -> list[Path]:
        """Return folders of ranks that have started on this node, whose numbers are not known in advance."""
        if len(self.rank_folders) < self.spec["num_local_ranks"]:
            self.rank_folders = list({mark.parent for mark in self.ranks.glob("*/*")})
        return self.rank_folders

    def reap(self) -> None:
        """Reap dead children, including adopted processes, and keep the agent's exit code."""
        keeper_status = None
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == self.keeper_pid:
                    keeper_status = os.waitstatus_to_exitcode(found[1])
        if self.agent_status is None:
            # A keeper that is killed tells nothing. Read last: a keeper tells before it ends.
            self.agent_status = keeper_status
            with suppress(BlockingIOError, ValueError):
                self.agent_status = int(os.read(self.ended_fd, 16))

    def dump_stacks(self) -> None:
        """Have every rank write its Python stacks; faulthandler does so even while the GIL is held."""
        with suppress(OSError):
            (self.ranks.parent / STOPPING_FILE).touch()
        alive = _descendants()
        for folder in self.started():
            with suppress(ValueError, OSError):
                pid = int(_tail(folder / "pid"))
                if pid in alive:
                    os.kill(pid, signal.SIGUSR1)
        self.wait_for_none(STACKS_S)

    def stop(self) -> list[int]:
        """End every descendant and return those that could not be killed."""
        if self.spec["leave_s"] and self.agent_status != 0:
            with suppress(OSError):
                (self.ranks.parent / STOPPING_FILE).touch()
            # Agents on other nodes end their ranks, and the launcher of the agents then ends by itself.
            self.wait_for_none(self.spec["leave_s"])
        if self.agent_status is None:
            with suppress(ProcessLookupError):
                os.kill(self.keeper_pid, signal.SIGTERM)
            self.wait_for_none(TERM_S)
        return _kill_descendants(self.reap)

    def wait_for_none(self, limit_s: float) -> None:
        """Wait until no descendant is left, at most ``limit_s`` seconds."""
        deadline_s = time.monotonic() + limit_s
        while _has_children() and time.monotonic() < deadline_s:
            time.sleep(0.02)
            self.reap()


def _has_children() -> bool:
    """Return whether this process has a child, including zombies; a process without a child has no descendant."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _descendants() -> dict[int, str]:
    """Return the state of each descendant by process id; one that has ended counts until it is reaped."""
    # Reading the processes of a host with many cores, each with its kernel threads, takes a tenth of a second.
    if not _has_children():
        return {}
    children: dict[int, dict[int, str]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 - pathlib is slower, and this runs in a loop
        if entry.isdigit():
            with suppress(OSError, ValueError):
                state, parent, *_ = _fields_of(int(entry))
                children.setdefault(int(parent), {})[int(entry)] = state
    found: dict[int, str] = {}
    waiting = [os.getpid()]
    while waiting:
        new = children.pop(waiting.pop(), {})
        found |= new
        waiting += new
    return found


def _living() -> set[int]:
    """Return the process ids of all descendants that have not ended."""
    return {pid for pid, state in _descendants().items() if state not in ENDED}


def _kill_descendants(reap: Callable[[], None]) -> list[int]:
    """Kill every descendant of this process, and return those that are left after ``KILL_S`` seconds."""
    deadline_s = time.monotonic() + KILL_S
    while time.monotonic() < deadline_s:
        alive = _descendants()
        if not alive:
            return []
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
        reap()
    return sorted(_descendants())


def _start_keeper(start_agent: Callable[[], int]) -> tuple[int, int]:
    """Fork the keeper of a launch, a sub-reaper between the guard and the agent.

    Return its process id, and the end of a pipe from which the agent's exit code can be read when the agent has ended.

    When the guard is killed, no mark is left on a process with an empty environment and output of its own. The keeper
    is then the parent of such orphans and ends them. It passes SIGTERM on to the agent, and ends as soon as nothing is
    left that the agent has started. The keeper keeps the pipe of the verdict open, so pytest waits until the keeper has
    ended.
    """
    ended_fd, tells_fd = os.pipe()
    os.set_blocking(ended_fd, False)
    keeper_pid = fork(partial(_keep, os.getpid(), start_agent, tells_fd))
    os.close(tells_fd)
    return keeper_pid, ended_fd


def fork(work: Callable[[], int]) -> int:
    """Run ``work`` in a child and return the child's process id.

    The child exits with the code that ``work`` returns, and never returns into the parent's code.
    """
    if pid := os.fork():
        return pid
    exit_code = 1
    try:
        exit_code = work()
    except BaseException:  # noqa: BLE001 - every error has to be in the log
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stderr.flush()
        os._exit(exit_code)


def _keep(guard_pid: int, start_agent: Callable[[], int], tells_fd: int) -> int:
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    guard = os.pidfd_open(guard_pid)
    agent_pid = start_agent()
    signal.signal(signal.SIGTERM, lambda *_: os.kill(agent_pid, signal.SIGTERM))
    agent = os.pidfd_open(agent_pid)
    events = select.poll()
    for fd in (guard, agent):
        events.register(fd, select.POLLIN)
    ready: set[int] = set()
    while not ready and os.getppid() == guard_pid:
        # An orphan that ends has no other parent to wait for it.
        ready = {fd for fd, _ in events.poll(1000)}
        if agent not in ready:
            reap_children(agent_pid)
    if agent in ready:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        code = os.waitstatus_to_exitcode(os.waitpid(agent_pid, 0)[1])
        events.unregister(agent)
        with suppress(BrokenPipeError):
            os.write(tells_fd, str(code).encode())
        # The guard ends what the agent has left, unless the guard is killed.
        while _living() and os.getppid() == guard_pid:
            events.poll(TICK_S * 1000)
    if os.getppid() != guard_pid:
        _kill_descendants(reap_children)
    return 0


def reap_children(kept_pid: int = 0) -> None:
    """Wait for children that have ended, except one."""
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != kept_pid:
            os.waitpid(ended.si_pid, 0)


def _prctl(option: int, value: int) -> None:
    """Set an attribute of this process, with a system call that the standard library does not wrap."""
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies; exit at once if the parent is dead already."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent died before prctl was called
        os._exit(1)


def prepare_agent(guard_pid: int) -> None:
    """Make the agent's process die with the guard and end on signals; runs before the agent's program."""
    die_with(guard_pid)
    # Ignored signals stay ignored in a new program, and the agent has to end on SIGTERM from its first moment.
    for ignored in IGNORED:
        signal.signal(ignored, signal.SIG_DFL)


def state_of(folder: Path) -> str | None:
    """Return the state of a folder's rank, as in proc_pid_stat(5); X if it is gone; None without its id."""
    try:
        pid = int(_tail(folder / "pid"))
    except (OSError, ValueError):
        return None
    try:
        return _fields_of(pid)[0]
    except OSError:
        return ENDED[-1]


def _is_gone(folder: Path, state: str | None) -> bool:
    """Return whether a folder's rank, which is in ``state``, has ended without a result and without an error."""
    # Look for these files last: a rank writes them before it ends.
    return state in ENDED and not (folder / "result.json").exists() and not (folder / "error.json").exists()


def _fields_of(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat``, from the third field, the process's state, on.

    Raises:
        OSError: There is no such process.
    """
    text = Path("/proc", str(pid), "stat").read_bytes()
    # The command's name can contain spaces and parentheses: count fields from the last parenthesis.
    return text[text.rindex(b")") + 2 :].decode("ascii", "replace").split()


def _tail(path: Path) -> str:
    """Return the end of a regular file, opened as in common.regular, which this program can't import."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return ""
        return os.pread(fd, LOG_BYTES, max(0, status.st_size - LOG_BYTES)).decode("utf-8", "replace")
    finally:
        os.close(fd)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def guard_launch(spec: dict[str, Any], start_agent: Callable[[], int]) -> None:
    """Guard the launch of ``spec``, which no terminal's signal ends, and write the verdict to the spec's pipe."""
    for ignored in IGNORED:
        signal.signal(ignored, signal.SIG_IGN)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    for inherited in (spec["lifeline_fd"], spec["verdict_fd"]):
        os.set_inheritable(inherited, False)
    verdict = Guard(spec, start_agent).run()
    with suppress(BrokenPipeError):
        os.write(spec["verdict_fd"], json.dumps(verdict).encode())


def _start_torchrun(argv: list[str]) -> int:
    """Start the agent's program and return its process id."""
    prepare = partial(prepare_agent, os.getpid())
    agent = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=prepare)
    _kept.append(agent)
    return agent.pid


def main() -> None:
    """Guard the launch described by the first argument."""
    spec = json.loads(sys.argv[1])
    guard_launch(spec, lambda: _start_torchrun(spec["argv"]))


if __name__ == "__main__":
    main()
