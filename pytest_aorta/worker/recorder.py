"""Recording from any training script: ``from pytest_aorta.worker import recorder``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from pytest_aorta.overlap import OverlapCapture
from pytest_aorta.result import FailureDetail, RankResult, TensorHashes
from pytest_aorta.worker.canary import run_canary
from pytest_aorta.worker.environment import environment_facts
from pytest_aorta.worker.timer import StepTimer


class Recorder:
    """Collects what a script measures on this rank; the launcher writes it when the script ends.

    The first ``warmup`` steps (see :meth:`start`) are run but not recorded.
    """

    def __init__(self) -> None:
        self._timer: StepTimer | None = None
        self._device = torch.device("cpu")
        self._warmup_left = 0
        self._began_s = 0.0
        self._metrics: dict[str, float] = {}
        self._weight_hashes: dict[str, str] = {}
        self._tensor_hashes: dict[str, TensorHashes] = {}
        self._loss: list[float] = []
        self._grad_norm: list[float] = []
        self._failures: list[FailureDetail] = []
        self._canary_before: dict[str, float] = {}
        self._capture: OverlapCapture | None = None

    def start(self, device: torch.device, *, warmup: int = 0) -> None:
        """Say which device the steps run on, before the first :meth:`step`; collective once ranks have joined."""
        if self._timer is not None:
            raise RuntimeError("recorder.start() was called twice")
        self._timer, self._device, self._warmup_left = StepTimer(device), device, warmup
        self._canary_before = run_canary()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time the body as one training step."""
        if self._timer is None:
            raise RuntimeError("call recorder.start(device) before the first recorder.step()")
        if self._warmup_left:
            self._warmup_left -= 1
            yield
            return
        self._began_s = self._began_s or time.perf_counter()
        with self._timer.step():
            yield

    def loss(self, value: float) -> None:
        """Record the loss of the step just done."""
        self._loss.append(float(value))

    def grad_norm(self, value: float) -> None:
        """Record the norm of the gradients of the step just done, before clipping."""
        self._grad_norm.append(float(value))

    def metric(self, name: str, value: float) -> None:
        """Record a fact of this rank; the unit belongs in the name, e.g. ``tokens_per_s``."""
        self._metrics[name] = float(value)

    def weight_hash(self, step: int, value: str) -> None:
        """Record the hash of the logical weights after ``step``."""
        self._weight_hashes[str(step)] = value

    def tensor_hashes(self, kind: str, hashes: TensorHashes) -> None:
        """Record hashes of single tensors in all steps; ``kind`` is ``weights``, ``gradients`` or ``optimizer``."""
        self._tensor_hashes[kind] = hashes

    def overlap(self, capture: OverlapCapture) -> None:
        """Record what :func:`~pytest_aorta.worker.capture_overlap` saw, with its metrics."""
        self._capture = capture

    def failure(self, detail: FailureDetail) -> None:
        """Record a wrong value that the script's own checks found."""
        self._failures.append(detail)

    def result(self) -> RankResult:
        """Everything recorded so far.

        Raises:
            RuntimeError: the script never recorded a step.
        """
        times = self._timer.step_times_ms() if self._timer else []
        if self._timer is None or not times:
            raise RuntimeError(
                "the script recorded no step: wrap each training step in `with recorder.step():` "
                "after recorder.start(device)"
            )
        environment: Mapping[str, str | int | float | bool | None] = environment_facts(self._device)
        result = RankResult(
            passed=not self._failures,
            failure_count=len(self._failures),
            failures=self._failures,
            configured_iterations=len(times),
            total_iterations=len(times),
            step_times_ms=times,
            elapsed_sec=time.perf_counter() - self._began_s,
            metrics=self._metrics,
            weight_hashes=self._weight_hashes,
            loss=self._loss,
            grad_norm=self._grad_norm,
            environment=dict(environment),
            wait_ms=self._timer.wait_ms(),
            memory_bytes=self._timer.memory_bytes(),
            canary_before=self._canary_before,
            tensor_hashes=self._tensor_hashes,
        )
        return result if self._capture is None else self._capture.added_to(result)


recorder = Recorder()
