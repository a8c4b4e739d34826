"""Profilers of ranks: torch's own, started within each rank, or a program that starts torchrun."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_aorta.common.errors import SpecError

TORCH = "torch"
NSYS = "nsys"
ROCPROFV3 = "rocprofv3"
PROFILERS = (TORCH, NSYS, ROCPROFV3)
# Programs that start torchrun and slow all ranks down, from the first step to the last.
WRAPPERS = (NSYS, ROCPROFV3)
# A profiler takes minutes to write its traces after the last rank has its result.
WRAPPED_STRAGGLER_S = 600.0
_WHERE = {NSYS: "it is part of NVIDIA Nsight Systems", ROCPROFV3: "it is part of ROCm, in /opt/rocm/bin"}


@dataclass(frozen=True)
class ProfilerSchedule:
    """The steps that torch's profiler records into kept traces, and its optional records of these steps.

    Attributes:
        wait: Steps without the profiler before each trace.
        warmup: Steps under the profiler before each trace that the trace leaves out.
        active: Steps of each trace; None: the config's ``profile_steps``, or 3 if it is 0.
        repeat: Number of traces per rank.
        shapes: Record the shapes of operators' inputs.
        memory: Record allocations.
    """

    wait: int = 0
    warmup: int = 1
    active: int | None = None
    repeat: int = 1
    shapes: bool = False
    memory: bool = False

    @classmethod
    def parse(cls, text: str) -> ProfilerSchedule:
        """Return the schedule of words such as ``wait=1 warmup=1 active=3 repeat=2 shapes memory``.

        Raises:
            ValueError: The text has another word, a word twice, a number outside its limits, or no word.
        """
        values: dict[str, int | bool] = {}
        for word in text.split():
            name, equals, number = word.partition("=")
            if name in values:
                raise ValueError(f"{name} is given twice")
            values[name] = _number(name, number) if equals else _switch(name)
        if not values:
            raise ValueError("there is no word")
        return cls(**values)  # type: ignore[arg-type]

    def __str__(self) -> str:
        """Return the text from which :meth:`parse` makes an equal schedule."""
        numbers = {name: getattr(self, name) for name in _LIMITS}
        words = [f"{name}={number}" for name, number in numbers.items() if number is not None]
        return " ".join(words + [name for name in _SWITCHES if getattr(self, name)])


# Name -> smallest and largest number. Each trace is a file, and a trace of many steps can't be viewed.
_LIMITS = {"wait": (0, 100_000), "warmup": (0, 1000), "active": (1, 1000), "repeat": (1, 100)}
_SWITCHES = ("shapes", "memory")


def _number(name: str, text: str) -> int:
    if name not in _LIMITS:
        raise ValueError(f"{name}=... is unknown")
    least, most = _LIMITS[name]
    if not re.fullmatch("[0-9]{1,6}", text) or not least <= int(text) <= most:
        raise ValueError(f"{name} is an integer from {least} to {most}")
    return int(text)


def _switch(name: str) -> bool:
    if name not in _SWITCHES:
        raise ValueError(f"{name} is unknown or has no number")
    return True


def wrapper_command(profiler: str | None, run_dir: Path) -> list[str]:
    """Return the words that precede torchrun's command line, none for ``torch``; traces go to the run folder."""
    if profiler == NSYS:
        traces = [f"--output={run_dir / NSYS}", "--trace=cuda,nvtx,osrt", "--capture-range=none", "--wait=all"]
        # Sampling of host code needs a privilege that containers lack.
        return [NSYS, "profile", *traces, "--sample=none", "--cpuctxsw=none"]
    if profiler == ROCPROFV3:
        traces = ["--kernel-trace", "--memory-copy-trace"]
        return [ROCPROFV3, *traces, "--output-format", "pftrace", "-d", str(run_dir / ROCPROFV3), "--"]
    return []


def check_profiler(profiler: str | None, flag: str, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse a profiler that is not installed, before anything is launched; ``flag`` is the option that names it.

    Raises:
        SpecError: The program is not on PATH; the message names the package that contains it.
    """
    if profiler in WRAPPERS and shutil.which(profiler, path=environ.get("PATH")) is None:
        raise SpecError(
            f"{flag}={profiler}: there is no program {profiler} on PATH; {_WHERE[profiler]}. "
            f"{flag}={TORCH} needs no program"
        )
