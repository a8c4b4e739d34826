"""Torch's profiler of a rank: its options, its trace, and the profiles of a script's steps."""

import os
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar

import torch

# The classes of torch.profiler import inductor when they start, which takes seconds; these take milliseconds.
from torch.autograd.profiler import profile

from pytest_aorta.result.trace.kineto import TraceTooLarge, check_size, parse_trace
from pytest_aorta.worker.accelerator import on_accelerator
from pytest_aorta.worker.collectives import leave_collectives
from pytest_aorta.worker.torch_private import profiler_enabled


def profiler_of(device: torch.device, *, host: bool = True, shapes: bool = False, memory: bool = False) -> profile:
    """Return a profiler of a device's work, of the operators of the host, their shapes, and allocations."""
    kind = device.type if on_accelerator(device) else None
    return profile(use_cpu=host, use_kineto=True, use_device=kind, record_shapes=shapes, profile_memory=memory)


def end_profiler(profiler: profile) -> None:
    """End a profiler that runs."""
    leave_collectives()
    profiler.__exit__(None, None, None)


class Exported:
    """The trace of a profiler that has ended, written at once: the next profiler takes its device activity away."""

    def __init__(self, profiler: profile) -> None:
        with tempfile.TemporaryDirectory(prefix="aorta-trace-") as folder:
            self._path = Path(folder) / "trace.json"
            # torch writes the path that it is given into JSON as it is, with the quotation marks of TMPDIR.
            at = os.open(folder, os.O_PATH)
            profiler.export_chrome_trace(f"/proc/self/fd/{at}/{self._path.name}")
            os.close(at)
            try:
                check_size(self._path)
                self._text: bytes | TraceTooLarge = self._path.read_bytes()
            except TraceTooLarge as error:
                self._text = error
            except FileNotFoundError:
                self._text = b""
            # Torch raises no error if it can't write.
            if isinstance(self._text, bytes) and not self._text[-8:].rstrip().endswith(b"}"):
                advice = "make room there, raise the limit of `ulimit -f`, or set TMPDIR to another folder"
                raise OSError(f"{tempfile.gettempdir()}: torch's profiler could not write its trace; {advice}")

    def read(self) -> dict[str, Any]:
        """Return the document.

        Raises:
            TraceTooLarge: The trace is too large to be read.
        """
        if isinstance(self._text, TraceTooLarge):
            raise self._text
        return parse_trace(self._path, self._text)


class ScriptProfiler:
    """A profiler of some steps of a script, which gives way to a profiler of the script's own.

    Torch has one profiler per thread. It corrupts its memory if a ``record_function`` that was entered under one
    profiler is left under another one: so callers never start a profiler where they have ended one, as within a step of
    an optimizer, during which its hooks run.

    Attributes:
        problem: Why the steps are not profiled; empty if they are.
    """

    where: ClassVar[str]
    what: ClassVar[str]

    def __init__(self, device: torch.device, prepared: Collection[int] = ()) -> None:
        """Profile steps on ``device``, unless a profiler of the script is ``prepared``: torch would lose that one."""
        self.device = device
        self.problem = ""
        self._prepared = prepared
        self._running: profile | None = None

    @property
    def is_running(self) -> bool:
        """Return whether the step that has begun is profiled."""
        return self._running is not None

    def is_free(self) -> bool:
        """Return whether a profile may begin; else there is a problem."""
        if not self.problem and (self._prepared or profiler_enabled()):
            self.problem = f"the script runs torch.profiler {self.where}, and torch has one profiler per thread"
        return not self.problem

    def start(self, *, host: bool = True, shapes: bool = False) -> None:
        """Start the profiler."""
        self._running = profiler_of(self.device, host=host, shapes=shapes)
        self._running.__enter__()

    def stop(self) -> Exported | None:
        """Stop the profiler that runs; return its trace, or None if a profiler of the script has ended it."""
        running, self._running = self._running, None
        if not profiler_enabled():
            self.give_way()
        elif running is not None:
            end_profiler(running)
            return None if self.problem else Exported(running)
        return None

    def give_way(self) -> None:
        """Give the profile up for a profiler of the script."""
        self.problem = f"the script runs torch.profiler {self.where}, which ended the {self.what}"
