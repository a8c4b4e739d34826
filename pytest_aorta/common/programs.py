"""Programs run to their end, within a time limit."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping, Sequence

from pytest_aorta.common.errors import SpecError


def run_program(argv: Sequence[str], environ: Mapping[str, str], limit_s: float) -> tuple[int, str, str]:
    """Exit code, output and error output of a program.

    Raises:
        SpecError: it can't be started, or takes too long.
    """
    # Not pipes: something that it leaves running would hold them open.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as complaint:
        try:
            ended = subprocess.run(
                argv,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=complaint,
                timeout=limit_s,
                check=False,
            )
        except OSError as error:
            raise SpecError(f"{argv[0]} can't be run: {error.strerror or error}") from None
        except subprocess.TimeoutExpired:
            raise SpecError(f"{argv[0]} took longer than {limit_s:g} s") from None
        texts = []
        for file in (output, complaint):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
    return ended.returncode, texts[0], texts[1]
