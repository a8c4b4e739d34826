"""Captures of a few steps with torch's profiler, after the timed steps, to measure overlap.

Recording host events delays kernel launches and exposes communication that unprofiled steps hide, so only device
activity is recorded. Facts that only host events contain are learned from one further step.
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

# torch.profiler imports inductor when it starts, which takes seconds; this takes milliseconds.
from torch.autograd.profiler import profile, record_function

from pytest_aorta.common import variables
from pytest_aorta.common.files import write_bytes
from pytest_aorta.plan.profiler import TORCH, WRAPPERS
from pytest_aorta.result.folder import TRACE_FILE
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

# Steps of a trace that the launch asks for if the config asks for none.
TRACED_STEPS = 3


def capture_overlap(
    step: Callable[[], object], num_steps: int, device: torch.device, *, trace_path: Path | None = None
) -> OverlapCapture:
    """Run ``step`` under the profiler and return the overlap of ``num_steps`` steps on this rank; collective.

    ``step`` runs once before the captured steps, since the first profiled step pays for the profiler's start, and on a
    device once more, so that the host is ahead of the device. Ranks enter together. At the end of ``step`` the current
    stream has to wait for everything that ``step`` enqueued.

    A Chrome trace of ``num_steps`` steps with the host's operators is kept at ``trace_path``, gzipped, or in the rank's
    folder if the launch asks for traces. On a device the trace takes ``num_steps`` further steps after the others,
    since steps with recorded operators are slower.

    Raises:
        ValueError: ``num_steps`` is below 1, or the trace contains no steps or no device.
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
    """Return ``result`` with the overlap of ``num_steps`` further steps from :func:`capture_overlap`; 0 captures none.

    Call this last, since ``step`` goes on training. A launch that asks for traces gets traces of some steps in any
    case, without a change to its result. Under a profiler around the ranks nothing is captured, since a device serves
    one profiler at a time.
    """
    if os.environ.get(variables.PROFILER) in WRAPPERS:
        return result
    if num_steps:
        return capture_overlap(step, num_steps, device).added_to(result)
    if _asked_trace_path() is not None:
        capture_overlap(step, TRACED_STEPS, device)
    return result


def _profile(step: Callable[[], object], num_steps: int, device: torch.device, *, host: bool = True) -> profile:
    """Profile steps; ``host=False`` records only the device and runs one step before the first boundary."""
    on_device = device.type == "cuda"
    mark = _new_mark(device)
    profiler = profile(use_cpu=host, use_kineto=True, use_device="cuda" if on_device else None)
    if on_device:
        # The kernel that made the mark may have the name of the boundary's kernel, so it ends before the profile.
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
    """Return the tensor that boundaries fill; on a device its rare dtype makes the kernel's name unique."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
        return torch.zeros(1, dtype=torch.complex32 if device.type == "cuda" else None, device=device)


def _leave_boundary(mark: torch.Tensor) -> None:
    """Mark the boundary between two steps; on a device by a kernel behind all work of the training stream so far."""
    with record_function(BOUNDARY):
        mark.fill_(0)


def _keep(trace: dict[str, Any], path: Path) -> None:
    if dist.is_initialized():
        # The key of torch.profiler, by which tools identify the ranks of several traces.
        who = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "backend": dist.get_backend()}
        trace = trace | {"distributedInfo": who}
    write_bytes(path, gzip.compress(json.dumps(trace).encode(), compresslevel=4))
