"""The program of a rank, ``python -m pytest_aorta.launch.process.rank RUN_DIR``, before it imports torch.

The program redirects the rank's output to a log, dies with the torchrun agent, writes stacks on SIGUSR1, and writes
into ``ranks/<rank>/``: ``pid``, ``output.log``, ``stacks.txt``, ``marks``, then ``result.json`` or ``error.json``.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

from pytest_aorta.common import variables
from pytest_aorta.common.files import write_text
from pytest_aorta.launch.process.guard import die_with
from pytest_aorta.launch.process.imports import without_collection
from pytest_aorta.launch.process.last_words import leave_last_words
from pytest_aorta.launch.process.rank_error import write_error
from pytest_aorta.plan.profiler import WRAPPERS
from pytest_aorta.result.folder import OUTPUT_LOG, PID_FILE, PROGRESS_FILE, STACKS_FILE, rank_folder
from pytest_aorta.result.outcome import STARTED, leave_mark

# The error that ended the rank, kept until the process exits: the frames of its traceback hold process groups, and
# destroying a process group can deadlock.
_kept: list[BaseException] = []


def main(run_dir: Path) -> None:
    """Run this rank's part of the plan and exit at once, without the interpreter's slow teardown."""
    folder = rank_folder(run_dir, os.environ["RANK"])
    prepare(folder)
    pid = os.getpid()
    exit_code = 0
    try:
        with without_collection():
            from pytest_aorta.worker.lifecycle import run_rank

        run_rank(run_dir, folder)
    except BaseException as error:  # noqa: BLE001 - every error has to be reported
        _kept.append(error)
        exit_code = _exit_code(error)
        if exit_code:
            write_error(folder if os.getpid() == pid else None, error)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the script may have closed or replaced the stream
            stream.flush()
    if os.environ.get(variables.PROFILER) in WRAPPERS:
        sys.exit(exit_code)  # these profilers write their traces when the process exits normally
    # Threads of NCCL and gloo would outlive main; such threads have aborted processes that had succeeded.
    os._exit(exit_code)


def _exit_code(error: BaseException) -> int:
    """Return the code with which the interpreter would exit."""
    code = error.code if isinstance(error, SystemExit) else 1
    return code if isinstance(code, int) else int(code is not None)


def prepare(folder: Path) -> None:
    """Redirect output, register the signal handlers, and write the process id."""
    # The guard and the agent may have died while Python was starting: then no other process would end this rank.
    die_with(int(os.environ.pop(variables.AGENT_PID, os.getppid())))
    output = os.open(folder / OUTPUT_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(output, stream)
    stacks = (folder / STACKS_FILE).open("w", encoding="utf-8")
    # The step timer counts steps in this file, so that a hang shows each rank's progress.
    os.environ[variables.PROGRESS_FILE] = str(folder / PROGRESS_FILE)
    # The worker writes traces and telemetry into this folder.
    os.environ[variables.RANK_FOLDER] = str(folder)
    faulthandler.enable(stacks)
    # A fatal signal of a forked child, e.g. of a DataLoader's worker, is not the rank's: its stack goes to the log.
    os.register_at_fork(after_in_child=partial(faulthandler.enable, 2))
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    leave_last_words(folder, stacks)
    write_text(folder / PID_FILE, str(os.getpid()), durable=False)
    leave_mark(folder, STARTED)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
