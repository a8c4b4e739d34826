"""Programs that run to their end within a time limit."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_aorta.common.errors import SpecError


def run_program(
    argv: Sequence[str], environ: Mapping[str, str], limit_s: float, *, cwd: Path | None = None
) -> tuple[int, str, str]:
    """Run a program in ``cwd``, or in the current folder, and return its exit code, output and error output.

    The exit code is negative if a signal ended the program. ``environ`` is the program's whole environment.

    Raises:
        SpecError: The program can't be started, or takes longer than ``limit_s`` seconds.
    """
    # Files instead of pipes: a process that the program leaves behind would hold a pipe open.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as error_output:
        try:
            ended = subprocess.run(
                argv,
                env=environ,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=error_output,
                timeout=limit_s,
                check=False,
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
