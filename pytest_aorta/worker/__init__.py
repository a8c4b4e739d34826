"""The rank side: what a workload or a training script imports. Needs torch; the pytest process never imports it."""

from __future__ import annotations

from pytest_aorta.overlap import OverlapCapture
from pytest_aorta.result import FailureDetail, RankResult, TensorHashes
from pytest_aorta.worker.delay import Delay
from pytest_aorta.worker.environment import environment_facts
from pytest_aorta.worker.overlap import capture_overlap, profiled
from pytest_aorta.worker.rank_env import RankEnv
from pytest_aorta.worker.recorder import Recorder, recorder
from pytest_aorta.worker.stream_spans import StreamSpans
from pytest_aorta.worker.telemetry import Telemetry
from pytest_aorta.worker.timer import StepTimer
from pytest_aorta.worker.weight_hash import WeightHash, hash_local, hash_optimizer, hash_parameters
from pytest_aorta.worker.workload import Workload

__all__ = [
    "Delay",
    "FailureDetail",
    "OverlapCapture",
    "RankEnv",
    "RankResult",
    "Recorder",
    "StepTimer",
    "StreamSpans",
    "Telemetry",
    "TensorHashes",
    "WeightHash",
    "Workload",
    "capture_overlap",
    "environment_facts",
    "hash_local",
    "hash_optimizer",
    "hash_parameters",
    "profiled",
    "recorder",
]
