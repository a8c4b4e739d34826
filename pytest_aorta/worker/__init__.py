"""API for code that runs on ranks: workloads and training scripts import it.

This package needs torch, so the pytest process never imports it.
"""

from pytest_aorta.result.measurements import FailureDetail, RankResult, TensorHashes
from pytest_aorta.worker.accelerator import Delay
from pytest_aorta.worker.environment import environment_facts
from pytest_aorta.worker.operators import OperatorCapture
from pytest_aorta.worker.overlap import capture_overlap, profiled
from pytest_aorta.worker.recorder import Recorder, record_optimizer_steps, recorder
from pytest_aorta.worker.simulation import drop_data, is_simulated, peak_memory, without_data
from pytest_aorta.worker.steps import StepTimer, measure
from pytest_aorta.worker.training import TrainingNotes
from pytest_aorta.worker.weight_hash import (
    LocalShard,
    WeightHash,
    hash_local,
    hash_parameters,
    hash_shards,
)
from pytest_aorta.worker.workload import RankEnv, Workload

__all__ = [
    "Delay",
    "FailureDetail",
    "LocalShard",
    "OperatorCapture",
    "RankEnv",
    "RankResult",
    "Recorder",
    "StepTimer",
    "TensorHashes",
    "TrainingNotes",
    "WeightHash",
    "Workload",
    "capture_overlap",
    "drop_data",
    "environment_facts",
    "hash_local",
    "hash_parameters",
    "hash_shards",
    "is_simulated",
    "measure",
    "peak_memory",
    "profiled",
    "record_optimizer_steps",
    "recorder",
    "without_data",
]
