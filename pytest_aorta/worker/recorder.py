"""Recording from any training script: ``from pytest_aorta.worker import recorder``.

Three lines are enough::

    with recorder.step(tokens=inputs.numel()):  # around each training step
        ...
    recorder.loss(loss)                         # after it
    recorder.weights(model)                     # at the end

To record a script without a change to it, call ``record_optimizer_steps`` before the script runs.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from pytest_aorta.result.measurements import FailureDetail, RankResult, TensorHashes
from pytest_aorta.result.trace.costs import Costs
from pytest_aorta.result.trace.profiled_steps import Profile
from pytest_aorta.worker.accelerator import own_device
from pytest_aorta.worker.costs import StepCounter
from pytest_aorta.worker.environment import environment_facts
from pytest_aorta.worker.finite import Optimizers, refuse_parameters, refuse_series
from pytest_aorta.worker.simulation import is_simulated
from pytest_aorta.worker.timing import StepTimer, run_canary
from pytest_aorta.worker.weight_hash import hash_parameters, logical_name

# The warm-up steps that costs need: one that is counted, and one that settles after it.
_STEPS_TO_COUNT = 2
_NOT_COUNTED = (
    f"costs are counted in a warm-up step, and there are fewer than {_STEPS_TO_COUNT}: call "
    f"recorder.start(warmup={_STEPS_TO_COUNT}) before the first step, and run as many steps more"
)

# Hashes of each parameter show where launches differ; those of many steps would make a large result.
_STEPS_BY_TENSOR = 4


class Recorder:
    """Recorder of a script's measurements on this rank; pytest-aorta writes them to a file when the script ends.

    The first ``warmup`` steps (see :meth:`start`) run but are not recorded.
    """

    def __init__(self) -> None:
        self._timer: StepTimer | None = None
        self._device = torch.device("cpu")
        self._warmup_left = 0
        self._began_s = 0.0
        self._metrics: dict[str, float] = {}
        self._tokens = 0
        self._is_warming_up = False
        self._is_in_step = False
        self._weight_hashes: dict[str, str] = {}
        self._tensor_hashes: dict[str, TensorHashes] = {}
        # A weak reference: a model that the script drops must not stay in memory.
        self._model: Callable[[], torch.nn.Module | None] = lambda: None
        # Tensors stay tensors until the end: reading a number from the device would make the step wait.
        self._loss: list[float | torch.Tensor] = []
        self._grad_norm: list[float | torch.Tensor] = []
        self._failures: list[FailureDetail] = []
        self._canary_before: dict[str, float] = {}
        self._capture: Profile | None = None
        self._optimizers = Optimizers()
        self._counter: StepCounter | None = None

    def start(self, device: torch.device | None = None, *, warmup: int = 0) -> None:
        """Set the device of the steps and the number of warm-up steps; collective.

        If the script does not call this method, the first :meth:`step` calls it with the defaults.

        Args:
            device: Device of the steps; None: this rank's current accelerator, or the CPU on CPU ranks.
            warmup: Number of first steps that are not recorded.

        Raises:
            RuntimeError: The recorder has already started.
        """
        if self._timer is not None:
            raise RuntimeError("recorder.start() was called twice, or after the first recorder.step()")
        self._device = device if device is not None else own_device()
        self._timer, self._warmup_left = StepTimer(self._device), warmup
        self.watch_optimizers()
        self._canary_before = run_canary(self._device)

    def watch_optimizers(self) -> None:
        """Check the parameters of the optimizers that step from now on; see :meth:`refuse_non_finite`."""
        self._optimizers.follow(is_recorded=self._timer is not None)

    @contextmanager
    def step(self, *, tokens: int = 0) -> Iterator[None]:
        """Time the body as one training step over ``tokens`` tokens of this rank.

        If tokens are given, the result has the metric ``tokens_per_s``: the tokens of all recorded steps, divided by
        the sum of the steps' times.

        Raises:
            RuntimeError: The step is inside of another step.
        """
        if self._is_in_step:
            raise RuntimeError(
                "recorder.step() was called inside of another step, whose time would count twice: do not call it "
                "around micro-batches, nor under record_optimizer_steps(), which records all steps"
            )
        if self._timer is None:
            self.start()
        assert self._timer is not None
        self._is_warming_up = self._warmup_left > 0
        if not self._is_warming_up:
            self._began_s = self._began_s or time.perf_counter()
        self._is_in_step = True
        try:
            with self._watched():
                yield
        finally:
            self._is_in_step = False
            self._warmup_left -= self._is_warming_up
        self._optimizers.look()
        if not self._is_warming_up:
            self._tokens += tokens

    def _watched(self) -> AbstractContextManager[None]:
        """Return the context of the step that begins: one warm-up step is counted, and the steps after it are timed."""
        assert self._timer is not None
        if not self._is_warming_up:
            return self._timer.step()
        # The last warm-up step follows the counted one, so that the timed steps begin without the profiler's end.
        if self._warmup_left != _STEPS_TO_COUNT:
            return nullcontext()
        self._counter = StepCounter(self._device)
        return self._counter.step()

    def loss(self, value: float | torch.Tensor) -> None:
        """Record the loss of the last step; a tensor must have one element and is read only at the end.

        Every measured step has a loss, or none has. The loss has to be equal on every rank, so reduce it before. Losses
        of warm-up steps are left out.

        Raises:
            ValueError: A tensor has more or fewer elements than one.
        """
        self._series("loss", self._loss, value)

    def grad_norm(self, value: float | torch.Tensor) -> None:
        """Record the norm of the last step's gradients before clipping; handled as in :meth:`loss`."""
        self._series("grad_norm", self._grad_norm, value)

    def weights(self, model: torch.nn.Module) -> None:
        """Record the hash of a model's weights after the measured steps so far; collective; call it outside of steps.

        A model under DistributedDataParallel has the hash of the model itself.

        Raises:
            NotFinite: A loss, gradient norm or parameter of this rank is NaN or infinite.
            RuntimeError: As in :func:`~pytest_aorta.worker.hash_parameters`, or other weights have been recorded after
                the same step.
            TypeError: ``model`` is not a module.
            ValueError: As in :func:`~pytest_aorta.worker.hash_parameters`.
        """
        if not isinstance(model, torch.nn.Module):
            raise TypeError(
                f"recorder.weights: got a {type(model).__name__}, allowed is a torch.nn.Module, or several in a "
                f"torch.nn.ModuleList"
            )
        steps = len(self._timer.step_times_ms()) if self._timer else 0
        rank = int(os.environ.get("RANK", "0"))
        inner = getattr(model, "_orig_mod", model)
        model = inner.module if isinstance(inner, DistributedDataParallel) else model
        self._model = weakref.ref(model)
        if is_simulated():
            return
        self.refuse_non_finite()
        refuse_parameters(model.named_parameters(), rank, f"after measured step {steps}")
        self.hash_weights(steps, model.named_parameters())

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the parameters of the model that :meth:`weights` hashed last, or of the optimizers that have stepped.

        There are none if the script has dropped these objects.
        """
        model = self._model()
        return self._optimizers.named() if model is None else model.named_parameters()

    def refuse_non_finite(self) -> None:
        """Check the losses, the gradient norms, and the parameters after each step; not collective.

        In a simulated world, the values mean nothing and are not checked.

        Raises:
            NotFinite: A value of this rank is NaN or infinite; the message names the first step.
        """
        if is_simulated():
            return
        rank, steps = int(os.environ.get("RANK", "0")), len(self._timer.step_times_ms()) if self._timer else 0
        # A loss is NaN before the weights are, so the loss shows the first bad step.
        refuse_series("loss", [float(value) for value in self._loss], rank, steps)
        refuse_series("gradient norm", [float(value) for value in self._grad_norm], rank, steps)
        self._optimizers.refuse(rank, steps)

    def _series(self, name: str, series: list[float | torch.Tensor], value: float | torch.Tensor) -> None:
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise ValueError(
                f"recorder.{name}: got a tensor of shape {list(value.shape)}, allowed is a number or a tensor with one "
                f"element, e.g. its mean()"
            )
        if not self._is_warming_up:
            # A copy: the script may write the next step's value into the same memory.
            series.append(value.detach().clone() if isinstance(value, torch.Tensor) else float(value))

    def hash_weights(self, step: int, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Record the hash of named parameters after a measured step, and at first also those of each; collective."""
        parameters = list(named)
        found = hash_parameters(parameters)
        self.weight_hash(step, found.hex)
        known = self._tensor_hashes.get("weights", TensorHashes([*found.per_tensor], [], {}))
        if len(known.steps) < _STEPS_BY_TENSOR and known.names == [*found.per_tensor]:
            shapes = {logical_name(name): list(parameter.shape) for name, parameter in parameters}
            self.tensor_hashes(
                "weights",
                TensorHashes(
                    known.names,
                    [shapes[name] for name in known.names],
                    known.steps | {str(step): [*found.per_tensor.values()]},
                ),
            )

    def metric(self, name: str, value: float) -> None:
        """Record a metric of this rank; the name includes the unit, e.g. ``tokens_per_s``."""
        self._metrics[name] = float(value)

    def weight_hash(self, step: int, value: str) -> None:
        """Record ``value`` as the hash of the logical weights after measured step ``step``, counted from 1.

        Raises:
            RuntimeError: The step has another hash already.
        """
        # Before the first measured step, the weights of each warm-up step replace the earlier ones.
        if step > 0 and self._weight_hashes.get(str(step), value) != value:
            raise RuntimeError(
                f"two hashes of weights were recorded after measured step {step}: record all models in one call, such "
                f"as recorder.weights(torch.nn.ModuleList([one, other])), and weights once after a step"
            )
        self._weight_hashes[str(step)] = value

    def tensor_hashes(self, kind: str, hashes: TensorHashes) -> None:
        """Record hashes of single tensors in all steps; ``kind`` is ``weights``, ``gradients`` or ``optimizer``."""
        self._tensor_hashes[kind] = hashes

    @property
    def device(self) -> torch.device:
        """The device of the steps; the CPU before the first step."""
        return self._device

    def overlap(self, capture: Profile) -> None:
        """Record the capture of :func:`~pytest_aorta.worker.capture_overlap`, with its metrics."""
        self._capture = capture

    def failure(self, detail: FailureDetail) -> None:
        """Record a wrong value that the script's own checks found."""
        self._failures.append(detail)

    def result(self) -> RankResult:
        """Return everything recorded so far.

        Raises:
            RuntimeError: The script has recorded no step.
        """
        times = self._timer.step_times_ms() if self._timer else []
        if self._timer is None or not times:
            raise RuntimeError(
                "the script recorded no step: wrap each training step in `with recorder.step():`, or let an optimizer "
                "step after record_optimizer_steps(), as the script does that `aorta init SCRIPT` writes; and run more "
                "steps than the warm-up has"
            )
        throughput = {"tokens_per_s": 1000 * self._tokens / sum(times)} if self._tokens else {}
        result = RankResult(
            passed=not self._failures,
            failure_count=len(self._failures),
            failures=self._failures,
            configured_iterations=len(times),
            total_iterations=len(times),
            step_times_ms=times,
            elapsed_sec=time.perf_counter() - self._began_s,
            metrics=throughput | self._metrics,
            weight_hashes=self._weight_hashes,
            loss=self._of_steps(self._loss, len(times)),
            grad_norm=self._of_steps(self._grad_norm, len(times)),
            environment=environment_facts(self._device),
            collective_ms=self._timer.collective_ms(),
            memory_bytes=self._timer.memory_bytes(),
            canary_before=self._canary_before,
            tensor_hashes=self._tensor_hashes,
            costs=Costs(problem=_NOT_COUNTED) if self._counter is None else self._counter.costs(),
        )
        return result if self._capture is None else result.with_profile(self._capture)

    def _of_steps(self, series: list[float | torch.Tensor], num_steps: int) -> list[float]:
        values = [float(value) for value in series]
        # If steps end at an optimizer's step, a value recorded after it falls into the step that has begun. Then the
        # first value is that of the last warm-up step.
        return values[1:] if self._is_in_step and len(values) == num_steps + 1 else values


recorder = Recorder()


def record_optimizer_steps(*, warmup: int = 3, hash_weights: bool = False) -> None:
    """Record the steps of the script that runs next in this process; call this before the script makes its optimizer.

    A recorded step lasts from one step of the optimizer to the next, so it includes loading a batch. The time before
    the optimizer's first step and the time after its last step are not recorded. If a script has several optimizers,
    the recorder follows the optimizer that steps first. An iteration in which a ``GradScaler`` skips the optimizer is
    part of the next recorded step.

    Args:
        warmup: Number of steps that are not recorded, after the optimizer's first one.
        hash_weights: Whether to record the hash of the optimizer's parameters after the measured steps 1, 2, 4, 8 and
            so on, outside of the times; collective. The script has to set its seeds.
    """
    register_optimizer_step_post_hook(_Follower(recorder, warmup, hash_weights))


class _Follower:
    """Hook that records the steps of one optimizer; torch calls the hook after each step of any optimizer."""

    def __init__(self, recorder: Recorder, warmup: int, hash_weights: bool) -> None:
        self._recorder = recorder
        self._warmup = warmup
        self._hash_weights = hash_weights
        self._followed: torch.optim.Optimizer | None = None
        self._step: AbstractContextManager[None] | None = None
        self._num_steps = 0
        self._group: dist.ProcessGroup | None = None

    def __call__(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        """End a recorded step and begin the next, if ``optimizer`` is the followed optimizer."""
        if self._followed is None:
            self._followed = optimizer
        if optimizer is not self._followed:
            return
        if self._step is None:
            self._recorder.start(warmup=self._warmup)
            # Keep the group: gloo's destructor can deadlock, and would run when the script drops its last reference.
            self._group = dist.group.WORLD if dist.is_initialized() else None
        else:
            self._step.__exit__(None, None, None)
            self._num_steps += 1
            measured = self._num_steps - self._warmup
            # Hashes at powers of two cost little in a long run, and equal runs have hashes of the same steps.
            if self._hash_weights and not is_simulated() and measured > 0 and measured.bit_count() == 1:
                groups = enumerate(optimizer.param_groups)
                named = [
                    (f"{number}.{place}", part)
                    for number, group in groups
                    for place, part in enumerate(group["params"])
                ]
                self._recorder.refuse_non_finite()
                self._recorder.hash_weights(measured, named)
        # After the optimizer's last step, this step stays open, so that the end of the script is not measured.
        self._step = self._recorder.step()
        self._step.__enter__()
