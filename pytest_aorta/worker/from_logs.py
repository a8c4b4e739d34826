"""Conversion of the files that a script logs into a rank's result."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import torch

from pytest_aorta.common import variables
from pytest_aorta.plan.device_kind import DeviceKind
from pytest_aorta.plan.workload.adapter import FIRST, Adapter, adapted
from pytest_aorta.plan.workload.logs import read_records
from pytest_aorta.result.folder import OUTPUT_LOG
from pytest_aorta.result.measurements import RankResult
from pytest_aorta.worker.environment import environment_facts
from pytest_aorta.worker.timing.timer import Progress


def adapted_result(adapter: Adapter, rank_folder: Path) -> RankResult | None:
    """Return the result of this rank; None on ranks other than 0 if only rank 0 logs.

    Args:
        adapter: the adapter of this rank.
        rank_folder: the folder that contains this rank's ``output.log``.

    Raises:
        AdapterError: The script's log is missing or does not match the adapter.
    """
    if adapter.ranks == FIRST and int(os.environ["RANK"]) != 0:
        return None
    for handler in logging.getLogger().handlers:
        handler.flush()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    found = adapted(adapter, *read_records(adapter, rank_folder / OUTPUT_LOG))
    on_gpu = os.environ.get(variables.DEVICE) == DeviceKind.CUDA
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    steps = len(found.step_times_ms)
    # The script has no step timer. If this rank does not exit, the report shows this number of steps.
    Progress.of_this_rank().advance(steps)
    return RankResult(
        passed=True,
        failure_count=0,
        configured_iterations=steps,
        total_iterations=steps,
        step_times_ms=found.step_times_ms,
        elapsed_sec=sum(found.step_times_ms) / 1000,
        metrics=found.metrics,
        loss=found.loss,
        grad_norm=found.grad_norm,
        environment=environment_facts(device) | found.environment,
    )
