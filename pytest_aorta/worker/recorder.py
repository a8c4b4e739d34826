"""Recording from any training script: ``from pytest_aorta.worker import recorder``.

Three lines are enough::

    with recorder.step(tokens=inputs.numel()):  # around each training step
        ...
    recorder.loss(loss)                         # after it
    recorder.weights(model)                     # at the end

To record a script without a change to it, call ``record_optimizer_steps`` before the script runs.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from pytest_aorta.common.clock import time
from pytest_aorta.plan.launch_plan import StepRecording
from pytest_aorta.result.measurements import FailureDetail, RankResult, TensorHashes
from pytest_aorta.result.trace.profiled_steps import Costs, Profile
from pytest_aorta.worker.accelerator import own_device
from pytest_aorta.worker.costs import NOT_COUNTED, STEPS_TO_COUNT, StepCounter
from pytest_aorta.worker.finite import Optimizers, refuse_parameters, refuse_series, untraced
from pytest_aorta.worker.observing import Observer
from pytest_aorta.worker.recorded import Recorded, Steps
from pytest_aorta.worker.simulation import is_simulated
from pytest_aorta.worker.steps import StepTimer
from pytest_aorta.worker.torch_private import uncompiled
from pytest_aorta.worker.weight_hash import hash_parameters, logical_name

# Hashes of each parameter show where launches differ; those of many steps would make a large result.
_STEPS_BY_TENSOR = 4


class BracketedSteps:
    """The steps that a script brackets itself, by ``with recorder.step():``."""

    unit = "measured step"
    end_together = True

    def __init__(self) -> None:
        self.optimizers = Optimizers()
        self.device = torch.device("cpu")
        self.is_warming_up = False
        self._timer: StepTimer | None = None
        self._warmup_left = self._tokens = 0
        self._began_s = 0.0
        self._is_in_step = False
        self._counter: StepCounter | None = None

    @property
    def num_steps(self) -> int:
        """The number of measured steps that have ended."""
        return self._timer.num_steps if self._timer else 0

    @property
    def has_started(self) -> bool:
        """Return whether :meth:`start` was called."""
        return self._timer is not None

    def start(self, device: torch.device | None, warmup: int) -> None:
        """Set the device and the number of warm-up steps; collective. From now on, optimizers that step are checked."""
        self.device = device if device is not None else own_device()
        self._timer, self._warmup_left = StepTimer(self.device), warmup
        register_optimizer_step_post_hook(untraced(lambda optimizer, *_: self.optimizers.add(optimizer)))

    @contextmanager
    def step(self, tokens: int) -> Iterator[None]:
        """Time the body as one step, or warm up."""
        if self._is_in_step:
            raise RuntimeError(
                "recorder.step() was called inside of another step, whose time would count twice: do not call it "
                "around micro-batches"
            )
        self.is_warming_up = self._warmup_left > 0
        if not self.is_warming_up:
            self._began_s = self._began_s or time.perf_counter()
        self._is_in_step = True
        try:
            with self._watched():
                yield
        finally:
            self._is_in_step = False
            self._warmup_left -= self.is_warming_up
        number = self.num_steps
        self.optimizers.look(number, f"measured step {number}" if number else "a warm-up step")
        if not self.is_warming_up:
            self._tokens += tokens

    def _watched(self) -> AbstractContextManager[None]:
        """Return the context of the step that begins: one warm-up step is counted, and the steps after it are timed."""
        if not self.is_warming_up:
            assert self._timer is not None  # since the steps have started
            return self._timer.step()
        # The last warm-up step follows the counted one, so that the timed steps begin without the profiler's end.
        if self._warmup_left != STEPS_TO_COUNT:
            return nullcontext()
        self._counter = StepCounter(self.device)
        return self._counter.step()

    def refuse(self) -> None:
        """Check the parameters after each step."""
        self.optimizers.refuse()

    def result(self, recorded: Recorded) -> RankResult:
        """Return the result of the measured steps."""
        if self._timer is None or not self._timer.num_steps:
            raise RuntimeError(
                "the script recorded no step: run more steps than the warm-up has, and record each of them in "
                "`with recorder.step():`"
            )
        costs = self._counter.costs() if self._counter else Costs(problem=NOT_COUNTED)
        result = recorded.timed(self._timer, self._began_s, costs)
        if self._tokens:
            tokens_per_s = 1000 * self._tokens / sum(result.step_times_ms)
            result = result.replace(metrics={"tokens_per_s": tokens_per_s} | result.metrics)
        return result if recorded.capture is None else result.with_profile(recorded.capture)


class Recording:
    """The record of this rank: the harness begins and ends it, and a script adds to it through its :class:`Recorder`.

    Attributes:
        values: What the script has recorded itself.
        bracketed: The steps that the script brackets.
        steps: The steps that are recorded: those, or those of an :class:`Observer`.
    """

    def __init__(self) -> None:
        self.values = Recorded()
        self.steps: Steps
        self.steps = self.bracketed = BracketedSteps()
        # A weak reference: a model that the script drops must not stay in memory.
        self._model: Callable[[], torch.nn.Module | None] = lambda: None

    def observe(self, record: StepRecording, *, is_asked: bool = True) -> Observer:
        """Record the steps of an unedited script, as :func:`record_optimizer_steps` does.

        If it was not asked for, this ends without a word where the script records its steps itself.
        """
        if not isinstance(self.steps, Observer):
            self.steps = Observer()
        self.steps.record, self.steps.is_asked = record, is_asked
        return self.steps.start()

    def leave_steps_to_script(self) -> None:
        """End the observation, since the script records its steps itself; a restart is compared by the observation.

        Raises:
            RuntimeError: Steps of an optimizer were recorded by :func:`record_optimizer_steps`.
        """
        if not isinstance(self.steps, Observer) or self.steps.record.hash_state:
            return
        if self.steps.is_asked and self.steps.num_steps:
            raise RuntimeError(
                "recorder.step() was called under record_optimizer_steps(), which records all steps of optimizers: "
                "use one of the two"
            )
        self.steps.stop()
        self.steps = self.bracketed

    def follow(self, model: torch.nn.Module) -> None:
        """Have :meth:`named_parameters` return those of a model."""
        self._model = weakref.ref(model)

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the parameters of the model that was hashed last, or of the optimizers that have stepped.

        There are none if the script has dropped these objects.
        """
        model = self._model()
        return self.steps.optimizers.named() if model is None else model.named_parameters()

    def refuse_non_finite(self) -> None:
        """Check the losses, the gradient norms, and the parameters after each step; not collective.

        In a simulated world, the values mean nothing and are not checked.

        Raises:
            NotFinite: A value of this rank is NaN or infinite; the message names the first step.
        """
        if is_simulated():
            return
        series = {"loss": self.values.loss, "gradient norm": self.values.grad_norm}
        read = {name: [float(value) for value in values] for name, values in series.items()}
        refuse_series(read, self.steps.num_steps, self.steps.optimizers)
        self.steps.refuse()

    def result(self) -> RankResult:
        """Return everything recorded so far.

        Raises:
            RuntimeError: The script has recorded no step; the message names the cause.
        """
        return self.steps.result(self.values)


class Recorder:
    """Recorder of a script's measurements on this rank; pytest-aorta writes them to a file when the script ends.

    The first ``warmup`` steps (see :meth:`start`) run but are not recorded.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._values, self._steps = recording.values, recording.bracketed

    def start(self, device: torch.device | None = None, *, warmup: int = 0) -> None:
        """Set the device of the steps and the number of warm-up steps; collective.

        If the script does not call this method, the first :meth:`step` calls it with the defaults.

        Args:
            device: Device of the steps; None: this rank's current accelerator, or the CPU on CPU ranks.
            warmup: Number of first steps that are not recorded.

        Raises:
            RuntimeError: The recorder has already started.
        """
        if self._steps.has_started:
            raise RuntimeError("recorder.start() was called twice, or after the first recorder.step()")
        self._recording.leave_steps_to_script()
        self._steps.start(device, warmup)

    @contextmanager
    def step(self, *, tokens: int = 0) -> Iterator[None]:
        """Time the body as one training step over ``tokens`` tokens of this rank.

        If tokens are given, the result has the metric ``tokens_per_s``: the tokens of all recorded steps, divided by
        the sum of the steps' times.

        Raises:
            RuntimeError: The step is inside of another step.
        """
        if not self._steps.has_started:
            self.start()
        with self._steps.step(tokens):
            yield

    def loss(self, value: float | torch.Tensor) -> None:
        """Record the loss of the last step; a tensor must have one element and is read only at the end.

        Every measured step has a loss, or none has. The loss has to be equal on every rank, so reduce it before. Losses
        of warm-up steps are left out.

        Raises:
            ValueError: A tensor has more or fewer elements than one.
        """
        self._series("loss", self._values.loss, value)

    def grad_norm(self, value: float | torch.Tensor) -> None:
        """Record the norm of the last step's gradients before clipping; handled as in :meth:`loss`."""
        self._series("grad_norm", self._values.grad_norm, value)

    def _series(self, name: str, series: list[float | torch.Tensor], value: float | torch.Tensor) -> None:
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise ValueError(
                f"recorder.{name}: got a tensor of shape {list(value.shape)}, allowed is a number or a tensor with one "
                f"element, e.g. its mean()"
            )
        if not self._steps.is_warming_up:
            # A copy: the script may write the next step's value into the same memory.
            series.append(value.detach().clone() if isinstance(value, torch.Tensor) else float(value))

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
        inner = uncompiled(model)
        model = inner.module if isinstance(inner, DistributedDataParallel) else model
        self._recording.follow(model)
        if is_simulated():
            return
        self._recording.refuse_non_finite()
        steps, parameters = self._recording.steps, list(model.named_parameters())
        refuse_parameters(parameters, f"after {steps.unit} {steps.num_steps}")
        found = hash_parameters(parameters)
        self.weight_hash(steps.num_steps, found.hex)
        names = [*found.per_tensor]
        shapes = {logical_name(name): list(parameter.shape) for name, parameter in parameters}
        empty = TensorHashes(names, [shapes[name] for name in names], {})
        known = self._values.tensor_hashes.get("weights", empty)
        if len(known.steps) < _STEPS_BY_TENSOR and known.names == names:
            by_step = known.steps | {str(steps.num_steps): [*found.per_tensor.values()]}
            self.tensor_hashes("weights", known.replace(steps=by_step))

    def metric(self, name: str, value: float) -> None:
        """Record a metric of this rank; the name includes the unit, e.g. ``tokens_per_s``."""
        self._values.metrics[name] = float(value)

    def weight_hash(self, step: int, value: str) -> None:
        """Record ``value`` as the hash of the logical weights after measured step ``step``, counted from 1.

        Raises:
            RuntimeError: The step has another hash already.
        """
        hashes = self._values.weight_hashes
        # Before the first measured step, the weights of each warm-up step replace the earlier ones.
        if step > 0 and hashes.get(str(step), value) != value:
            raise RuntimeError(
                f"two hashes of weights were recorded after measured step {step}: record all models in one call, such "
                f"as recorder.weights(torch.nn.ModuleList([one, other])), and weights once after a step"
            )
        hashes[str(step)] = value

    def tensor_hashes(self, kind: str, hashes: TensorHashes) -> None:
        """Record hashes of single tensors in all steps; ``kind`` is ``weights``, ``gradients`` or ``optimizer``."""
        self._values.tensor_hashes[kind] = hashes

    def overlap(self, capture: Profile) -> None:
        """Record the capture of :func:`~pytest_aorta.worker.capture_overlap`, with its metrics."""
        self._values.capture = capture

    def failure(self, detail: FailureDetail) -> None:
        """Record a wrong value that the script's own checks found."""
        self._values.failures.append(detail)


recording: Recording = Recording()
recorder: Recorder = Recorder(recording)


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
    recording.observe(StepRecording(warmup, hash_weights))
