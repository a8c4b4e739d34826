"""Captures a few steps with torch's profiler, after the timed ones, to see what ran beside what.

What the profiler records on the host slows the host down: kernels then reach the device late, and what a timed step
hides is exposed. So the device is captured alone, and what only the host's side tells is learned from one more step.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Not torch.profiler, whose start imports inductor: seconds, where this takes milliseconds.
from torch.autograd.profiler import profile, record_function

from pytest_aorta.common import variables
from pytest_aorta.common.files import write_bytes
from pytest_aorta.plan.profiler import TORCH, TRACE_FILE, WRAPPERS
from pytest_aorta.result.measurements import RankResult
from pytest_aorta.result.trace.kineto import (
    BOUNDARY,
    learn_step,
    overlap_of_device,
    overlap_of_trace,
    read_trace,
    steps_alone,
)
from pytest_aorta.result.trace.overlap import OverlapCapture

# Where the config asks for none.
TRACED_STEPS = 3


def capture_overlap(
    step: Callable[[], object], num_steps: int, device: torch.device, *, trace_path: Path | None = None
) -> OverlapCapture:
    """Run ``step`` under the profiler and see where the time of ``num_steps`` of them went on this rank; collective.

    ``step`` is run once more before those, since the first profiled one pays for the profiler's own start; on a device
    once again, so that the host is ahead when they begin. Ranks enter together. At its end the current stream has to
    wait for all that ``step`` enqueued.

    A Chrome trace of ``num_steps`` steps with the host's operators is kept at ``trace_path``, gzipped, or in the rank's
    folder where the launch asks for traces. On a device it takes that many steps again, after the others: with
    operators recorded they are slower.

    Raises:
        ValueError: ``num_steps`` is below 1, or the trace shows no steps or no device.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps is {num_steps!r}, allowed is an integer from 1")
    kept = trace_path or _asked_trace_path()
    on_device = device.type == "cuda"
    first = _profile(step, 1, device)
    if on_device:
        learned = learn_step(_trace_of(first))
        alone = _profile(step, num_steps, device, host=False)
        capture = overlap_of_device(_trace_of(alone), learned, num_steps)
        if kept is not None:
            _keep(steps_alone(_trace_of(_profile(step, num_steps, device)), on_device=True), kept)
        return capture
    trace = _trace_of(_profile(step, num_steps, device))
    if kept is not None:
        _keep(steps_alone(trace, on_device=False), kept)
    return overlap_of_trace(trace, on_device=False)


def _asked_trace_path() -> Path | None:
    folder = os.environ.get(variables.RANK_FOLDER)
    return Path(folder) / TRACE_FILE if folder and os.environ.get(variables.PROFILER) == TORCH else None


def profiled(result: RankResult, step: Callable[[], object], num_steps: int, device: torch.device) -> RankResult:
    """The result of the timed steps, with what :func:`capture_overlap` shows of ``num_steps`` more; 0 is none.

    Call it last: ``step`` goes on training. A launch that asks for traces has them of some steps in any case, and its
    result stays as comparable as it was. Under a profiler around the ranks nothing is captured: a device serves one.
    """
    if os.environ.get(variables.PROFILER) in WRAPPERS:
        return result
    if num_steps:
        return capture_overlap(step, num_steps, device).added_to(result)
    if _asked_trace_path() is not None:
        capture_overlap(step, TRACED_STEPS, device)
    return result


def _profile(step: Callable[[], object], num_steps: int, device: torch.device, *, host: bool = True) -> profile:
    """``host=False`` records the device alone; a step then goes before the first boundary."""
    on_device = device.type == "cuda"
    mark = _new_mark(device)
    profiler = profile(use_cpu=host, use_kineto=True, use_device="cuda" if on_device else None)
    if on_device:
        # What made the mark may be the boundary's kernel too.
        torch.cuda.synchronize(device)
    with profiler:
        if dist.is_initialized():
            dist.barrier()
        if not host:
            step()
        for _ in range(num_steps):
            _leave_boundary(mark)
            step()
        _leave_boundary(mark)
        if on_device:
            torch.cuda.synchronize(device)
    return profiler


def _trace_of(profiler: profile) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="aorta-trace-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(path)


def _new_mark(device: torch.device) -> torch.Tensor:
    """On a device of a dtype that nobody fills, so that the kernel is known by its name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        return torch.zeros(1, dtype=torch.complex32 if device.type == "cuda" else None, device=device)


def _leave_boundary(mark: torch.Tensor) -> None:
    """Between two steps: on a device a kernel, behind everything that the training stream was given so far."""
    with record_function(BOUNDARY):
        mark.fill_(0)


def _keep(trace: dict[str, Any], path: Path) -> None:
    if dist.is_initialized():
        # As torch.profiler has it: tools that read several ranks' traces tell them apart by this.
        who = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "backend": dist.get_backend()}
        trace = trace | {"distributedInfo": who}
    write_bytes(path, gzip.compress(json.dumps(trace).encode(), compresslevel=4))
