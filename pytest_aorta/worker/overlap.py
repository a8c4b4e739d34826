"""Captures a few steps with torch's profiler, after the timed ones, to see what ran beside what."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Not torch.profiler, whose start imports inductor: seconds, where this takes milliseconds.
from torch.autograd.profiler import profile, record_function

from pytest_aorta.kineto import BOUNDARY, overlap_of_trace, read_trace, steps_alone
from pytest_aorta.overlap import OverlapCapture
from pytest_aorta.result import RankResult

# Set to 1, it asks ranks to keep their traces in their folders.
KEEP_TRACES_VARIABLE = "AORTA_KEEP_TRACES"
TRACE_FILE = "trace.json.gz"


def capture_overlap(
    step: Callable[[], object], num_steps: int, device: torch.device, *, trace_path: Path | None = None
) -> OverlapCapture:
    """Run ``step`` under the profiler and see where the time of ``num_steps`` of them went on this rank; collective.

    ``step`` is run once more before those, since the first profiled one pays for the profiler's own start. Ranks enter
    together. At its end the current stream has to wait for all that ``step`` enqueued. The Chrome trace of the steps is
    kept at ``trace_path``, gzipped, or in the rank's folder where the launch asks for traces; else it is not kept.

    Raises:
        ValueError: ``num_steps`` is below 1, or the trace shows no steps or no device.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps is {num_steps!r}, allowed is an integer from 1")
    kept = trace_path or _asked_trace_path()
    on_device = device.type == "cuda"
    with tempfile.TemporaryDirectory(prefix="aorta-trace-") as folder:
        _trace(step, 1, device, Path(folder) / "warm-up.json")
        path = Path(folder) / "trace.json"
        _trace(step, num_steps, device, path)
        trace = read_trace(path)
    if kept is not None:
        _keep(steps_alone(trace, on_device=on_device), kept)
    return overlap_of_trace(trace, on_device=on_device)


def _asked_trace_path() -> Path | None:
    folder = os.environ.get("AORTA_RANK_FOLDER")
    return Path(folder) / TRACE_FILE if folder and os.environ.get(KEEP_TRACES_VARIABLE) == "1" else None


def profiled(result: RankResult, step: Callable[[], object], num_steps: int, device: torch.device) -> RankResult:
    """The result of the timed steps, with what :func:`capture_overlap` shows of ``num_steps`` more; 0 is none.

    Call it last: ``step`` goes on training.
    """
    return capture_overlap(step, num_steps, device).added_to(result) if num_steps else result


def _trace(step: Callable[[], object], num_steps: int, device: torch.device, path: Path) -> None:
    on_device = device.type == "cuda"
    mark = torch.zeros(1, device=device)
    with profile(use_kineto=True, use_device="cuda" if on_device else None) as profiler:
        if on_device:
            torch.cuda.synchronize(device)
        if dist.is_initialized():
            dist.barrier()
        for _ in range(num_steps):
            _leave_boundary(mark)
            step()
        _leave_boundary(mark)
        if on_device:
            torch.cuda.synchronize(device)
    profiler.export_chrome_trace(str(path))


def _leave_boundary(mark: torch.Tensor) -> None:
    """Between two steps: on a device a kernel, behind everything that the training stream was given so far."""
    with record_function(BOUNDARY):
        mark.fill_(0)


def _keep(trace: dict[str, Any], path: Path) -> None:
    if dist.is_initialized():
        # As torch.profiler has it: tools that read several ranks' traces tell them apart by this.
        who = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "backend": dist.get_backend()}
        trace = trace | {"distributedInfo": who}
    scratch = path.with_name(f".{path.name}.tmp")
    scratch.write_bytes(gzip.compress(json.dumps(trace).encode(), compresslevel=4))
    scratch.replace(path)
