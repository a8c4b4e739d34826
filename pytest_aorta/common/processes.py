"""Signals that end this process as Ctrl-C does, and programs that it runs."""

import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

from pytest_aorta.common.errors import SpecError


class Terminated(KeyboardInterrupt):
    """Raised in the main thread when SIGTERM arrives."""


@contextmanager
def terminable() -> Iterator[None]:
    """Raise ``Terminated`` in the body on the first SIGTERM.

    Does nothing outside the main thread, or where another handler for SIGTERM is installed.
    """
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before not in (signal.SIG_DFL, _terminate):
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let SIGINT and SIGTERM take effect after the body, which creates or removes what an interruption would leave.

    The body has to be short, because the user waits. Does nothing outside the main thread, where Python runs no
    handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: dict[int, FrameType | None] = {}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    delayed = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in delayed:
        signal.signal(number, arrived.__setitem__)
    try:
        yield
    finally:
        for number, handler in delayed.items():
            signal.signal(number, handler)
        for came, frame in arrived.items():
            delayed[signal.Signals(came)](came, frame)


def _terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    # A second SIGTERM must not disturb the cleanup that the first one has started.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated


def start_apart(
    command: Sequence[str],
    output: IO[bytes] | None,
    environ: Mapping[str, str],
    cwd: Path | None = None,
    fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a program without input, whose output and error output go to ``output``, and which inherits ``fds``.

    The program has a session of its own: a Ctrl-C in the terminal must reach only this process, which then ends it.
    """
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        cwd=cwd,
        env=environ,
        pass_fds=fds,
        start_new_session=True,
    )


def run_program(
    argv: Sequence[str], environ: Mapping[str, str], limit_s: float, *, cwd: Path | None = None
) -> tuple[int, str, str]:
    """Run a program in ``cwd``, or in the current folder, and return its exit code, output and error output.

    The exit code is negative if a signal ended the program. ``environ`` is the program's whole environment. The program
    keeps the locks of this process.

    Raises:
        SpecError: The program can't be started, or takes longer than ``limit_s`` seconds.
    """
    # Files instead of pipes: a process that the program leaves behind would hold a pipe open.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as error_output:
        try:
            ended = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=error_output,
                cwd=cwd,
                env=environ,
                timeout=limit_s,
                check=False,
                close_fds=False,
            )
        except OSError as error:
            raise SpecError(f"{argv[0]} can't be run: {error.strerror or error}") from None
        except subprocess.TimeoutExpired:
            raise SpecError(f"{argv[0]} took longer than {limit_s:g} s") from None
        texts = []
        for file in (output, error_output):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
    return ended.returncode, texts[0], texts[1]
