"""A process beside pytest's own that imports torch once and runs checks of rank code on request."""

from __future__ import annotations

import ast
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
# The longest check takes 17 s on an idle machine.
LIMIT_S = 300.0


def checks_of(pattern: str) -> list[Any]:
    """Return a pytest parameter, ``file::function``, for each test function of this folder's files like ``pattern``.

    Functions with the marker ``extended`` keep it. A marker of a single case has no effect.
    """
    return list(_checks(pattern))


def _checks(pattern: str) -> Iterator[Any]:
    for path in sorted(FOLDER.glob(pattern)):
        for node in ast.parse(path.read_bytes()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                is_extended = "pytest.mark.extended" in map(ast.unparse, node.decorator_list)
                yield pytest.param(f"{path.stem}::{node.name}", marks=[pytest.mark.extended] if is_extended else [])


class CheckProcess:
    """A pytest process that runs one check function at a time and reports its outcome.

    The process starts with the first check. A check that ends the process, or does not end by itself, fails, and the
    next check starts a new process.
    """

    def __init__(self, log: Path, environ: Mapping[str, str] | None = None) -> None:
        self.log = log
        # torchrun gives ranks this value; beside other workers, more threads than cores would wait for each other.
        self.environ = {"OMP_NUM_THREADS": "1"} | os.environ | (environ or {})
        self.process: subprocess.Popen[bytes] | None = None

    def check(self, name: str) -> None:
        """Run ``file::function`` with all its parameters; fail or skip as it does."""
        reports = self._ask(name)
        if failed := [report["text"] for report in reports if report["outcome"] == "failed"]:
            pytest.fail("\n\n".join(failed), pytrace=False)
        skipped = [report["text"] for report in reports if report["outcome"] == "skipped"]
        num_passed = sum(report["outcome"] == "passed" and report["when"] == "call" for report in reports)
        if skipped and not num_passed:
            pytest.skip(skipped[0])
        assert not skipped, f"{name}: {num_passed} of its cases passed, others were skipped: {skipped}"
        assert num_passed, f"{name}: the process ran no case of it"

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.channel.close()
            self.process.kill()
            self.process.wait()
            self.process = None

    def _ask(self, name: str) -> list[dict[str, Any]]:
        if self.process is None:
            self._start()
        try:
            self.channel.sendall(f"{name}\n".encode())
            answer = self.answers.readline()
        except OSError as error:
            answer = f"{type(error).__name__}: {error}"
        if not answer.startswith("["):
            self.close()
            pytest.fail(
                f"{name}: the process gave no result in {LIMIT_S:g} s: {answer}\n{self.log.read_text()[-8000:]}"
            )
        reports: list[dict[str, Any]] = json.loads(answer)
        return reports

    def _start(self) -> None:
        self.channel, theirs = socket.socketpair()
        self.channel.settimeout(LIMIT_S)
        self.answers = self.channel.makefile()
        command = [sys.executable, "-m", "pytest", "-p", "tests.rank.server", f"--checks-fd={theirs.fileno()}"]
        with self.log.open("wb") as log, theirs:
            self.process = subprocess.Popen(
                [*command, "-m", "", "-p", "no:cacheprovider", "-p", "no:xdist", str(FOLDER)],
                cwd=ROOT,
                env={name: value for name, value in self.environ.items() if not name.startswith("PYTEST_")},
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
            )
