"""Profilers of ranks: torch's own, started within each rank, or a program that starts torchrun."""

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
# Programs that start torchrun and slow all ranks down, from the first step to the last.
WRAPPERS = (NSYS, ROCPROFV3)
# A profiler writes its traces after the last rank has its result, which takes minutes.
WRAPPED_STRAGGLER_S = 600.0
_WHERE = {
    NSYS: "it is part of NVIDIA Nsight Systems",
    ROCPROFV3: "it is part of ROCm, in /opt/rocm/bin",
}


def wrapper_command(profiler: str | None, run_dir: Path) -> list[str]:
    """Return the words before torchrun's command line, none for ``torch``; traces go to the run folder."""
    if profiler == NSYS:
        return [
            NSYS,
            "profile",
            f"--output={run_dir / NSYS}",
            "--trace=cuda,nvtx,osrt",
            # Sampling of host code needs a privilege that containers lack.
            "--sample=none",
            "--cpuctxsw=none",
            "--capture-range=none",
            "--wait=all",
        ]
    if profiler == ROCPROFV3:
        traces = ["--kernel-trace", "--memory-copy-trace"]
        return [ROCPROFV3, *traces, "--output-format", "pftrace", "-d", str(run_dir / ROCPROFV3), "--"]
    return []


def check_profiler(profiler: str | None, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse a profiler that is not installed, before anything is launched.

    Raises:
        SpecError: The program is not on PATH; the message names the package that contains it.
    """
    if profiler in WRAPPERS and shutil.which(profiler, path=environ.get("PATH")) is None:
        raise SpecError(
            f"--aorta-profiler={profiler}: there is no program {profiler} on PATH; {_WHERE[profiler]}. "
            f"--aorta-profiler={TORCH} needs no program"
        )
