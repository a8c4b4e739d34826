"""Profilers that ranks run under: torch's own, asked for within each rank, or a program that torchrun is started by."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from pytest_aorta.common.errors import SpecError

TORCH = "torch"
NSYS = "nsys"
ROCPROFV3 = "rocprofv3"
PROFILERS = (TORCH, NSYS, ROCPROFV3)
# Programs around torchrun: all ranks run slower for them, from the first step to the last.
WRAPPERS = (NSYS, ROCPROFV3)
# Tells a rank which of them it is under.
# Of torch's profiler, in the folder of each rank.
TRACE_FILE = "trace.json.gz"
# What a profiler writes after the last rank has its result takes minutes.
WRAPPED_STRAGGLER_S = 600.0
_WHERE = {
    NSYS: "it is part of NVIDIA Nsight Systems",
    ROCPROFV3: "it is part of ROCm, in /opt/rocm/bin",
}


def wrapper_command(profiler: str | None, run_dir: Path) -> list[str]:
    """What comes before torchrun's command line; nothing but for a wrapper. Traces go to the run folder."""
    if profiler == NSYS:
        return [
            NSYS,
            "profile",
            f"--output={run_dir / NSYS}",
            "--trace=cuda,nvtx,osrt",
            # Needs a right that containers lack, and is of the host's code.
            "--sample=none",
            "--cpuctxsw=none",
            "--capture-range=none",
            "--wait=all",
        ]
    if profiler == ROCPROFV3:
        traces = ["--kernel-trace", "--memory-copy-trace"]
        return [ROCPROFV3, *traces, "--output-format", "pftrace", "-d", str(run_dir / ROCPROFV3), "--"]
    return []


def traces_note(profiler: str, run_dir: Path) -> str:
    """Where a launch's traces are, or that there are none."""
    pattern = {TORCH: f"ranks/*/{TRACE_FILE}", NSYS: f"{NSYS}.*", ROCPROFV3: f"{ROCPROFV3}/**/*.*"}[profiler]
    found = sorted(run_dir.glob(pattern))
    if not found:
        return f"{profiler} left no trace in {run_dir}"
    first = found[0].relative_to(run_dir)
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"traces of {profiler} in {run_dir}: {first}{more}"


def check_profiler(profiler: str | None, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse a wrapper that is not installed, before anything is launched.

    Raises:
        SpecError: naming the program and where it comes from.
    """
    if profiler in WRAPPERS and shutil.which(profiler, path=environ.get("PATH")) is None:
        raise SpecError(
            f"--aorta-profiler={profiler}: there is no program {profiler} on PATH; {_WHERE[profiler]}. "
            f"Allowed without it is --aorta-profiler={TORCH}"
        )
