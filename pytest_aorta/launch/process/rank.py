"""The program of a rank, ``python -m pytest_aorta.launch.process.rank RUN_DIR``, before it imports torch.

The program redirects the rank's output to a log, dies with the torchrun agent, writes stacks on SIGUSR1, and writes
into ``ranks/<rank>/``: ``pid``, ``output.log``, ``stacks.txt``, ``marks``, then ``result.json`` or ``error.json``. When
the rank is stopped, it also leaves its Python stacks and the last collectives that torch has recorded.
"""

import atexit
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, MutableMapping
from contextlib import suppress
from functools import partial
from itertools import dropwhile
from pathlib import Path
from typing import IO, Any

from pytest_aorta.common import variables
from pytest_aorta.common.clock import time
from pytest_aorta.common.files import without_collection, write_json, write_text
from pytest_aorta.common.model import to_builtins
from pytest_aorta.common.text import is_harness
from pytest_aorta.launch.process.guard import STACKS_S, die_with
from pytest_aorta.plan.launch_plan import read_plan
from pytest_aorta.plan.world import World
from pytest_aorta.result import folder as names
from pytest_aorta.result.trace.rank_files import flight_records

Handler = Callable[..., None]
# A byte of the pipe of signals that is no signal's number.
_END = 0
# Of each of the last collectives, which are those of a few steps.
_COLLECTIVES_KEPT = 1000
_KEPT = ("process_group", "collective_seq_id", "profiling_name", "input_sizes", "time_created_ns", "is_p2p", "retired")
_MAX_MESSAGE = 4000
# Below the time that the guard gives to ranks once one of them has its result.
LEAVE_S = 50.0
_MAX_TRACEBACK = 20_000
# The error of a value that is NaN or infinite, which a rank finds after its script, and the seconds in which its peers
# find theirs; less than the guard's grace.
_NOT_FINITE, _AWAIT_S = "NotFinite", 2.5
_LEFT_AT_THE_END = (names.ERROR_FILE, names.RESULT_FILE)
# The error that ended the rank, kept until the process exits: the frames of its traceback hold process groups, and
# destroying a process group can deadlock.
_kept: list[BaseException] = []


def main(run_dir: Path) -> None:
    """Run this rank's part of the plan, and leave as Python does up to the point at which it would free objects."""
    plan = read_plan(run_dir / names.PLAN_FILE)
    _take_simulated_rank(plan.world, os.environ)
    folder = names.rank_folder(run_dir, os.environ["RANK"])
    # The guard and the agent may have died while Python was starting: then no other process would end this rank.
    die_with(int(os.environ.pop(variables.AGENT_PID, os.getppid())))
    prepare(folder)
    pid = os.getpid()
    code = 0

    def run() -> None:
        with without_collection():
            from pytest_aorta.worker.lifecycle import run_rank

        run_rank(run_dir, folder, leave)

    def leave() -> None:
        _leave(folder if os.getpid() == pid else None)

    for part in (run, leave):
        try:
            part()
        except BaseException as error:  # noqa: BLE001 - every error has to be reported
            _kept.append(error)
            if (found := exit_code(error)) and not code:
                code = found
                write_error(folder if os.getpid() == pid else None, error)
                if type(error).__name__ == _NOT_FINITE:
                    _await_peers(run_dir)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the script may have closed or replaced the stream
            stream.flush()
    # Freeing objects would destroy process groups: gloo's destructor can deadlock, and threads of NCCL and gloo have
    # aborted processes that had succeeded.
    os._exit(code)


def _await_peers(run_dir: Path) -> None:
    """Wait until every rank of this host has looked for such an error: after one failure, the agent ends the others."""
    deadline_s = time.monotonic() + _AWAIT_S
    awaited = [names.rank_folder(run_dir, rank) for rank in names.rank_pids(run_dir)]
    while awaited and time.monotonic() < deadline_s:
        awaited = [one for one in awaited if not any((one / left).exists() for left in _LEFT_AT_THE_END)]
        time.sleep(0.02)


def _leave(folder: Path | None) -> None:
    """Wait for threads and run the handlers of ``atexit``, as the interpreter does before it frees objects.

    A second call finds nothing to do. After ``LEAVE_S`` seconds, the process ends with an error that names what has not
    ended. An exit code that a handler chooses by ``os._exit`` is that of the rank.
    """
    limit = threading.Timer(LEAVE_S, _give_up, (folder,))
    limit.daemon = True
    limit.start()
    # The interpreter calls these two functions, for which there is no public name.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    limit.cancel()


def _give_up(folder: Path | None) -> None:
    threads = [thread for thread in threading.enumerate() if not thread.daemon]
    # The main thread waits for the others, unless a handler keeps it.
    left = ", ".join(thread.name for thread in threads[1:] or threads)
    faulthandler.dump_traceback(2)
    text = f"thread {left} has not ended within {LEAVE_S:g} s after the script returned; the log has its stack"
    write_error(folder, TimeoutError(text))
    os._exit(1)


def _take_simulated_rank(world: World, environ: MutableMapping[str, str]) -> None:
    """Replace the number of this process, which its agent has set, by the rank of a simulated world; else do nothing.

    The simulated world is one host.
    """
    if world.simulated:
        environ.update(rank_variables(world.simulated[int(environ["RANK"])], world.size))


def rank_variables(rank: int, world_size: int) -> dict[str, str]:
    """Return the variables with the number of a rank of a single host, and the size of its world."""
    return {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(world_size)),
    }


def exit_code(error: BaseException) -> int:
    """Return the code with which the interpreter would exit."""
    code = error.code if isinstance(error, SystemExit) else 1
    return code if isinstance(code, int) else int(code is not None)


def prepare(folder: Path) -> None:
    """Redirect output, register the signal handlers, and write the process id."""
    output = os.open(folder / names.OUTPUT_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(output, stream)
    stacks = (folder / names.STACKS_FILE).open("w", encoding="utf-8")
    # The worker finds the plan above this folder, and writes progress and traces into it.
    os.environ[variables.RANK_FOLDER] = str(folder)
    faulthandler.enable(stacks)
    # A fatal signal of a forked child, e.g. of a DataLoader's worker, is not the rank's: its stack goes to the log.
    os.register_at_fork(after_in_child=partial(faulthandler.enable, 2))
    _leave_last_words(folder, stacks)
    # faulthandler writes stacks at once; then Python's own handler wakes the thread that writes the collectives.
    signal.signal(signal.SIGUSR1, _do_nothing)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True, chain=True)
    write_text(folder / names.PID_FILE, str(os.getpid()), durable=False)


def make_store() -> str:
    """Make the file through which the ranks of this process meet, and return its path, which only this user can open.

    Anyone on the host can connect to torch's TCPStore. A file in memory can be locked on any file system.
    """
    return f"/proc/{os.getpid()}/fd/{os.memfd_create('aorta-store')}"


def leave_failures(run_dir: Path, failures: Iterable[tuple[int, int, int]], running: Iterable[int]) -> None:
    """Write which ranks have failed on their own, and which ran then and were stopped, in an agent's process.

    Each failure has the agent's number of the rank, the process id and the exit code. In a simulated world, an agent's
    numbers are not those of ranks.
    """
    named = {pid: rank for rank, pid in names.rank_pids(run_dir).items()}
    known = [{"rank": named.get(pid, rank), "pid": pid, "exit_code": code} for rank, pid, code in sorted(failures)]
    write_json(run_dir / names.AGENT_FILE, {"failures": known, "running": sorted(running)})


def ask_for_evidence(run_dir: Path) -> None:
    """Have the ranks that run as children of this process leave their stacks and collectives, unless they have.

    Ask before the first signal that ends a rank: a script's handler of SIGTERM can start collectives, and the end of a
    rank changes what the others do.
    """
    # A rank needs milliseconds, unless its main thread holds the GIL.
    deadline_s = time.monotonic() + STACKS_S
    asked: set[int] = set()
    while (silent := _silent_children(run_dir)) and time.monotonic() < deadline_s:
        for pid in silent - asked:
            os.kill(pid, signal.SIGUSR1)
        asked |= silent
        time.sleep(0.005)


def _silent_children(run_dir: Path) -> set[int]:
    """Return the process ids of ranks that run as children of this process and have not left their collectives."""
    found = set()
    for rank, pid in names.rank_pids(run_dir).items():
        with suppress(ChildProcessError):
            has_ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if not has_ended and not (names.rank_folder(run_dir, rank) / names.IN_FLIGHT_FILE).exists():
                found.add(pid)
    return found


def _leave_last_words(folder: Path, stacks: IO[str]) -> None:
    """Install a SIGTERM handler that writes ``stacks`` and ``folder/collectives.json``, then ends the process.

    The C handler wakes a thread that writes both files, since the main thread may wait in a collective forever. After
    SIGUSR1, which the launch sends first, the files stay as they are. If the script has installed its own handler by
    then, the thread writes the stacks and leaves the process to that handler, which may call the handler that it has
    replaced. Forked children get SIGTERM's default action back, unless the script has its own handler.
    """
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)

    def end(*_: object) -> None:
        with suppress(BlockingIOError):  # a full pipe has kept the thread busy with signals
            os.write(write_fd, bytes([_END]))

    # First the pipe: without it, a SIGTERM that arrives after the next line would be lost.
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, end)
    os.register_at_fork(after_in_child=partial(_withdraw, end, write_fd))
    threading.Thread(target=_serve, args=(read_fd, end, folder, stacks), daemon=True, name="last words").start()


def _serve(read_fd: int, end: Handler, folder: Path, stacks: IO[str]) -> None:
    is_last = was_asked = False
    while not is_last:
        # Every signal with a Python handler writes its number into the pipe.
        number = os.read(read_fd, 1)[0]
        is_last = number == _END or (number == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is end)
        if was_asked or not (is_last or number in (signal.SIGTERM, signal.SIGUSR1)):
            continue
        was_asked = number == signal.SIGUSR1
        # On SIGUSR1, faulthandler has written the stacks, unless the script has replaced its handler.
        if not was_asked or signal.getsignal(signal.SIGUSR1) is not _do_nothing:
            with suppress(OSError):
                faulthandler.dump_traceback(stacks, all_threads=True)
        if was_asked or is_last:
            _write_collectives(folder)
    # signal.signal works only in the main thread.
    ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)
    os.kill(os.getpid(), signal.SIGTERM)


def _write_collectives(folder: Path) -> None:
    with suppress(Exception):  # neither a full disk nor an unknown form of torch's record may keep the rank from ending
        write_json(folder / names.IN_FLIGHT_FILE, {"entries": _last_collectives()}, durable=False)


def _last_collectives() -> list[dict[str, Any]] | None:
    """Return the last entries of torch's records of gloo's and NCCL's collectives; None without a record."""
    records = [flight_records(kind) or [] for kind in ("fr", "nccl")]
    entries = [entry for record in records for entry in record[-_COLLECTIVES_KEPT:]]
    return [{name: entry[name] for name in _KEPT if name in entry} for entry in entries] or None


def _do_nothing(*_: object) -> None:
    """Handle a signal that only has to wake the thread."""


def _withdraw(end: Handler, write_fd: int) -> None:
    """Remove the handler and the pipe from a forked child, whose signals would wake the parent's thread."""
    if (wakeup_fd := signal.set_wakeup_fd(-1)) != write_fd:
        signal.set_wakeup_fd(wakeup_fd)
    if signal.getsignal(signal.SIGTERM) is end:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def write_error(folder: Path | None, error: BaseException) -> None:
    """Write the error to standard error and to the rank's folder, with its time in nanoseconds.

    torchrun orders failures by whole seconds only. The frames that started the rank's code are left out, except in the
    file's ``full_traceback``. Without a folder the error is that of a process that the rank has forked.
    """
    time_ns = time.time_ns()
    cause = cause_of_exit(error)
    text = _shown_traceback(cause or error)
    with suppress(Exception):  # the script may have closed or replaced standard error
        sys.stderr.write(_exit_message(error) if isinstance(error, SystemExit) else text)
    if folder is None:
        return
    _write_collectives(folder)
    document: dict[str, Any] = {
        "time_ns": time_ns,
        "type": type(error).__name__,
        "message": _message(error)[:_MAX_MESSAGE],
        "not_finite": to_builtins(getattr(error, "first", None)) if type(error).__name__ == _NOT_FINITE else None,
        "after": f"{type(cause).__name__}: {_message(cause)}"[:_MAX_MESSAGE] if cause else "",
        "traceback": _ends(text),
        "full_traceback": _ends("".join(traceback.format_exception(error))),
    }
    with suppress(OSError):  # a full disk must not keep the rank from ending
        write_json(folder / names.ERROR_FILE, document)


def _exit_message(error: SystemExit) -> str:
    """Return the text that the interpreter writes when a script exits: none for an exit code, else the given text."""
    return "" if error.code is None or isinstance(error.code, int) else f"{error.code}\n"


def cause_of_exit(error: BaseException) -> BaseException | None:
    """Return the error that a script, such as Hydra's main, handled by exiting; None without one."""
    context = None if error.__suppress_context__ else error.__context__
    return error.__cause__ or context if isinstance(error, SystemExit) else None


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as problem:  # noqa: BLE001 - the text is computed by the script's own class
        return f"(no message: its __str__ raised {type(problem).__name__})"


def _ends(text: str) -> str:
    """Return a traceback, without its middle if it is long: frames are at its beginning, and its end is the message."""
    half = _MAX_TRACEBACK // 2
    return text if len(text) <= _MAX_TRACEBACK else f"{text[:half]}\n...\n{text[-half:]}"


def _shown_traceback(error: BaseException) -> str:
    """Return the traceback from the first frame outside of the harness on; without such a frame, only the message.

    The tracebacks of the errors that led to this error are shortened in the same way.
    """
    found = traceback.TracebackException.from_exception(error)
    _drop_harness(found)
    return "".join(found.format())


def _drop_harness(found: traceback.TracebackException) -> None:
    frames = list(dropwhile(lambda frame: is_harness(frame.filename), found.stack))
    # Without a stack, the heading of a traceback is left out too.
    found.stack = traceback.StackSummary.from_list(frames) if frames else None  # type: ignore[assignment]
    for other in (found.__cause__, found.__context__, *(found.exceptions or ())):
        if other is not None:
            _drop_harness(other)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
