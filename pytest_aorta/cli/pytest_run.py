"""Runs of pytest that a subcommand starts, with a task that leaves what the tests found in a file."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from pytest_aorta.cli import ExitCode
from pytest_aorta.common.errors import AortaError, UsageError
from pytest_aorta.common.model import from_text, to_json
from pytest_aorta.common.processes import start_apart, terminable
from pytest_aorta.session.task import Findings, Task

PLUGIN = "pytest_aorta.plugin.task"
OUTPUT_FILE = "pytest.log"
FINDINGS_FILE = "findings.json"
_END_S = 60.0
_PYTEST_USAGE = 4
_MAX_OUTPUT_LINES = 30


def run_pytest(
    words: Sequence[str],
    folder: Path,
    *,
    environ: Mapping[str, str] = os.environ,
    shows_output: bool = False,
    **asked: Any,
) -> tuple[ExitCode, Findings]:
    """Run pytest to its end, and return its exit code with what its tests found.

    Args:
        words: Arguments of pytest.
        folder: An existing folder for what the run leaves, with the output unless ``shows_output``.
        environ: The environment of pytest.
        shows_output: Whether the terminal shows the output.
        asked: Fields of :class:`~pytest_aorta.session.task.Task`.

    Raises:
        UsageError: pytest refuses the words.
        AortaError: pytest did not run the tests.
    """
    log_fd = os.dup(2)  # what launches wait for is said, although the output is kept
    task = Task(str(folder / FINDINGS_FILE), log_fd=log_fd, parent=os.getpid(), **asked)
    command = [sys.executable, "-m", "pytest", "-p", PLUGIN, f"--aorta-task={to_json(task)}", *words]
    with nullcontext() if shows_output else (folder / OUTPUT_FILE).open("wb") as output, terminable():
        # Ctrl-C reaches pytest only once: as SIGTERM, when this process ends pytest.
        process = start_apart(command, output, environ, fds=(log_fd,))
        os.close(log_fd)
        try:
            status = process.wait()
        finally:
            _end(process)
    if status not in (ExitCode.OK, ExitCode.PROBLEM):
        kind = UsageError if status == _PYTEST_USAGE else AortaError
        raise unfinished(folder, f"pytest ended with exit code {status}", kind)
    return ExitCode(status), from_text((folder / FINDINGS_FILE).read_text(encoding="utf-8"), Findings)


def unfinished(folder: Path, what: str, kind: type[AortaError] = AortaError) -> AortaError:
    """Return an error about a run of pytest, with the end of the output that its folder has."""
    log = folder / OUTPUT_FILE
    if not log.exists():
        return kind(what)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_MAX_OUTPUT_LINES:]
    return kind("\n".join([f"{what}:", *lines]))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to pytest if it still runs, so that pytest removes its worktrees and ends its ranks."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
