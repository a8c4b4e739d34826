"""Recording from any training script: ``from pytest_aorta.worker import recorder``.

Three lines are enough::

    with recorder.step(tokens=inputs.numel()):  # around each training step
        ...
    recorder.loss(loss)                         # after it
    recorder.weights(model)                     # at the end

To record a script without a change to it, call ``record_optimizer_steps`` before the script runs.
"""

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from pytest_aorta.common.clock import time
from pytest_aorta.plan.launch_plan import StepRecording
from pytest_aorta.result.measurements import FailureDetail, RankResult, TensorHashes
from pytest_aorta.result.trace.profiled_steps import Costs, Profile
from pytest_aorta.worker.accelerator import memory_in_use, own_device
from pytest_aorta.worker.environment import environment_facts
from pytest_aorta.worker.finite import Optimizers, refuse_parameters, refuse_series, untraced
from pytest_aorta.worker.observing import STEPS_TO_COUNT, Observer
from pytest_aorta.worker.simulation import is_simulated, peak_memory
from pytest_aorta.worker.steps import StepCounter, StepTimer, run_canary
from pytest_aorta.worker.weight_hash import hash_parameters, logical_name

_NOT_COUNTED = (
    f"costs are counted in a warm-up step, and there are fewer than {STEPS_TO_COUNT}: call "
    f"recorder.start(warmup={STEPS_TO_COUNT}) before the first step, and run as many steps more"
)

_NO_STEP = "the script steps no optimizer, so it has no step whose costs could be counted"
# Steps of a loop without an optimizer, whose trace has to be read as a whole.
_MOST_COUNTED_WHOLE = 100
_NOT_COUNTED_WHOLE = (
    f"the steps are those of no optimizer, so run() is counted as a whole: give the config key steps, at most "
    f"{_MOST_COUNTED_WHOLE}"
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
        self._is_watching = False
        self._num_optimized = 0
        self._counter: StepCounter | None = None
        self._observer: Observer | None = None
        self._is_observer_asked = False

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
        self._leave_steps_to_script()
        self._device = device if device is not None else own_device()
        self._timer, self._warmup_left = StepTimer(self._device), warmup
        self.watch_optimizers()
        self._canary_before = run_canary(self._device)

    def watch_optimizers(self) -> None:
        """Check the parameters of the optimizers that step from now on; see :meth:`refuse_non_finite`.

        Until the first recorded step, the parameters are checked after steps 1, 2, 4, 8 and so on. Nothing is recorded
        where a log is read, so these checks cost little of the times in the log.
        """
        if not self._is_watching:
            register_optimizer_step_post_hook(untraced(self._note))
        self._is_watching = True

    def _note(self, optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
        if self._observer is not None:
            return
        self._optimizers.add(optimizer)
        self._num_optimized += 1
        if self._timer is None and self._num_optimized.bit_count() == 1:
            self._optimizers.look(self._num_optimized, f"step {self._num_optimized}")

    def observe(self, record: StepRecording, *, is_asked: bool = True) -> None:
        """Record the steps of an unedited script, as :func:`record_optimizer_steps` does.

        If it was not asked for, this ends without a word where the script records its steps itself.
        """
        self._observer = self._observer or Observer()
        self._observer.record = record
        self._is_observer_asked = is_asked
        self._observer.start()

    def _leave_steps_to_script(self) -> None:
        """End the observation, since the script records its steps itself.

        Raises:
            RuntimeError: Steps of an optimizer were recorded by :func:`record_optimizer_steps`.
        """
        if self._observer is None:
            return
        if self._is_observer_asked and self._observer.num_steps:
            raise RuntimeError(
                "recorder.step() was called under record_optimizer_steps(), which records all steps of optimizers: "
                "use one of the two"
            )
        self._observer.stop()
        self._observer = None

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
                "around micro-batches"
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
        num_steps = self._timer.num_steps
        self._optimizers.look(num_steps, f"measured step {num_steps}" if num_steps else "a warm-up step")
        if not self._is_warming_up:
            self._tokens += tokens

    def _watched(self) -> AbstractContextManager[None]:
        """Return the context of the step that begins: one warm-up step is counted, and the steps after it are timed."""
        assert self._timer is not None
        if not self._is_warming_up:
            return self._timer.step()
        # The last warm-up step follows the counted one, so that the timed steps begin without the profiler's end.
        if self._warmup_left != STEPS_TO_COUNT:
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
        steps = self._num_steps
        rank = int(os.environ.get("RANK", "0"))
        inner = getattr(model, "_orig_mod", model)
        model = inner.module if isinstance(inner, DistributedDataParallel) else model
        self._model = weakref.ref(model)
        if is_simulated():
            return
        self.refuse_non_finite()
        # Steps of an unedited script are counted as its user counts them.
        step = "step" if self._observer else "measured step"
        refuse_parameters(model.named_parameters(), rank, f"after {step} {steps}")
        self.hash_weights(steps, model.named_parameters())

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the parameters of the model that :meth:`weights` hashed last, or of the optimizers that have stepped.

        There are none if the script has dropped these objects.
        """
        model, optimizers = self._model(), self._observer.optimizers if self._observer else self._optimizers
        return optimizers.named() if model is None else model.named_parameters()

    @contextmanager
    def counted_whole(self, num_steps: object) -> Iterator[None]:
        """Count the body, a loop of steps by no optimizer, as one step; the trace of a long loop would be too large."""
        is_short = isinstance(num_steps, int) and num_steps <= _MOST_COUNTED_WHOLE
        if self._observer is None or self._observer.has_optimizer or not is_short:
            yield
            return
        self._counter = StepCounter(own_device())
        with self._counter.step():
            yield

    @property
    def _num_steps(self) -> int:
        return self._observer.num_steps if self._observer else self._timer.num_steps if self._timer else 0

    def refuse_non_finite(self) -> None:
        """Check the losses, the gradient norms, and the parameters after each step; not collective.

        In a simulated world, the values mean nothing and are not checked.

        Raises:
            NotFinite: A value of this rank is NaN or infinite; the message names the first step.
        """
        if is_simulated():
            return
        rank, steps = int(os.environ.get("RANK", "0")), self._num_steps
        series = {"loss": self._loss, "gradient norm": self._grad_norm}
        read = {name: [float(value) for value in values] for name, values in series.items()}
        refuse_series(read, rank, steps, self._optimizers)
        self._optimizers.refuse(rank)
        if self._observer is not None:
            self._observer.refuse(rank)

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
        names = [*found.per_tensor]
        shapes = {logical_name(name): list(parameter.shape) for name, parameter in parameters}
        known = self._tensor_hashes.get("weights", TensorHashes(names, [shapes[name] for name in names], {}))
        if len(known.steps) < _STEPS_BY_TENSOR and known.names == names:
            steps = known.steps | {str(step): [*found.per_tensor.values()]}
            self.tensor_hashes("weights", known.replace(steps=steps))

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
    def is_observing(self) -> bool:
        """Return whether the steps are those of an unedited script, whose ranks may not all arrive at its end."""
        return self._observer is not None

    @property
    def device(self) -> torch.device:
        """The device of the steps; the CPU before the first step."""
        return self._observer.device if self._observer else self._device

    def overlap(self, capture: Profile) -> None:
        """Record the capture of :func:`~pytest_aorta.worker.capture_overlap`, with its metrics."""
        self._capture = capture

    def failure(self, detail: FailureDetail) -> None:
        """Record a wrong value that the script's own checks found."""
        self._failures.append(detail)

    def result(self, *, has_own_steps: bool = False) -> RankResult:
        """Return everything recorded so far; ``has_own_steps`` is whether the caller knows the times of the steps.

        Raises:
            RuntimeError: The script has recorded no step; the message names the cause.
        """
        if self._observer is not None:
            return self._observed(self._observer, has_own_steps=has_own_steps)
        times = self._timer.step_times_ms() if self._timer else []
        if self._timer is None or not times:
            raise RuntimeError(
                "the script recorded no step: run more steps than the warm-up has, and record each of them in "
                "`with recorder.step():`"
            )
        costs = Costs(problem=_NOT_COUNTED) if self._counter is None else self._counter.costs()
        result = self._timed(self._timer, self._began_s, costs, self._loss, self._grad_norm)
        if self._tokens:
            result = result.replace(metrics={"tokens_per_s": 1000 * self._tokens / sum(times)} | result.metrics)
        return result if self._capture is None else result.with_profile(self._capture)

    def _observed(self, observer: Observer, *, has_own_steps: bool) -> RankResult:
        """Return everything recorded of an unedited script, whose times are those of its main optimizer."""
        observer.end()
        main = observer.main
        if has_own_steps and (main is None or self._counter is not None):
            problem = _NOT_COUNTED if observer.has_optimizer else _NOT_COUNTED_WHOLE
            whole = self._whole(observer, Costs(problem=problem))
            if self._counter is None:
                return whole
            return whole.replace(costs=self._counter.costs()).with_profile(self._counter.overlap())
        if main is None and observer.is_without_training:
            return self._whole(observer, Costs(problem=_NO_STEP))
        if main is None:
            raise RuntimeError(f"the script recorded no step: {observer.absence()}")
        # Values that the script itself records after each step are those of all steps.
        own = [
            [values[step - 1] for step in main.timed] if len(values) == main.num_steps else values
            for values in (self._loss, self._grad_norm)
        ]
        result = self._timed(main.timer, observer.began_s, observer.costs() or Costs(problem=_NOT_COUNTED), *own)
        return result.replace(series=observer.series()).with_profile(Profile() if is_simulated() else main.profile())

    def _whole(self, observer: Observer, costs: Costs) -> RankResult:
        """Return the measurements of a script that trains nothing, as one step: its wall time and its memory."""
        device, wall_s = own_device(), time.perf_counter() - observer.began_s
        return self._result_of([1000 * wall_s], wall_s, device, costs).replace(memory_bytes=[memory_in_use(device)])

    def _timed(
        self,
        timer: StepTimer,
        began_s: float,
        costs: Costs,
        loss: Sequence[float | torch.Tensor],
        grad_norm: Sequence[float | torch.Tensor],
    ) -> RankResult:
        """Return the measurements of the steps of a timer, and what the script recorded beside them."""
        times_ms = timer.step_times_ms()
        return self._result_of(times_ms, time.perf_counter() - began_s, timer.device, costs).replace(
            weight_hashes=self._weight_hashes,
            loss=[float(value) for value in loss],
            grad_norm=[float(value) for value in grad_norm],
            collective_ms=timer.collective_ms(),
            memory_bytes=timer.memory_bytes(),
            canary_before=self._canary_before,
            tensor_hashes=self._tensor_hashes,
        )

    def _result_of(self, times_ms: list[float], elapsed_s: float, device: torch.device, costs: Costs) -> RankResult:
        peak = peak_memory(device)
        return RankResult(
            passed=not self._failures,
            failure_count=len(self._failures),
            failures=self._failures,
            configured_iterations=len(times_ms),
            total_iterations=len(times_ms),
            step_times_ms=times_ms,
            elapsed_sec=elapsed_s,
            # There is a peak only where there is device memory.
            metrics=self._metrics if peak is None else {"peak_memory_bytes": peak} | self._metrics,
            environment=environment_facts(device),
            costs=costs,
        )


recorder = Recorder()


def record_optimizer_steps(*, warmup: int = 3, hash_weights: bool = False) -> None:
    """Record the steps of the script that runs next in this process; call this before the script makes its optimizer.

    A step lasts from one step of an optimizer to its next, so it includes loading a batch. Steps are counted from the
    optimizer's first one, whose time is not known; the time after the last one is not recorded. Each optimizer has
    times, losses, gradient norms and weights of its own. The loss of a step is the sum of the tensors whose
    ``backward()`` was called in it, its gradient norm is what ``torch.nn.utils.clip_grad_norm_`` returned. An iteration
    in which a ``GradScaler`` skips the optimizer is part of the next step. Nothing is collective.

    Args:
        warmup: Number of steps that are not timed, after the optimizer's first one.
        hash_weights: Whether to record the hash of each rank's parts of the parameters before the first step, after
            steps 1, 2, 4, 8 and so on, and after the last one, outside of the times. The script has to set its seeds.
    """
    recorder.observe(StepRecording(warmup, hash_weights))
