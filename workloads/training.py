"""The lifecycle and the training loop of the workloads that train a model; a subclass makes model and gradients."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from pytest_aorta.worker import (
    OperatorCapture,
    RankEnv,
    RankResult,
    StepTimer,
    Telemetry,
    TrainingNotes,
    environment_facts,
    is_simulated,
    measure,
    profiled,
)

from . import checkpoint
from .common.adamw import CompiledAdamW, make_adamw
from .common.collectives import all_gather
from .common.determinism import use_deterministic_algorithms
from .common.gradients import clip_factor, clip_gradients, total_norm, whole_norm
from .common.learning_rate import LearningRate
from .common.result import GroupWorkload, peak_memory_metrics, timed_result
from .common.rules import check_rules
from .common.settings import TrainingSettings, read_settings
from .hashing import StepHashes

_Settings = TypeVar("_Settings", bound=TrainingSettings)


class TrainingWorkload(GroupWorkload, Generic[_Settings]):
    """Trains a model with AdamW; gradients are summed over ranks.

    Attributes:
        name: the name of the workload.
        settings_type: the config as typed values.
    """

    name: ClassVar[str]
    settings_type: type[_Settings]
    _num_parameters: int
    # Ranks with the same loss add it once.
    _counts_loss = True

    def read_settings(self) -> _Settings:
        """Return the config as typed values."""
        return read_settings(self.settings_type, self.config)

    def check(self) -> None:
        """Raise an error for what this world or device can't run, in the process group; nothing by default."""

    @abstractmethod
    def build(self) -> nn.Module:
        """Return the model, distributed over ranks, and set ``_num_parameters`` to those of the whole model."""

    @abstractmethod
    def make_batches(self, trained_steps: int) -> Iterator[Any]:
        """Make the batches after the first ``trained_steps``; a batch may be valid only until the next one is taken."""

    @abstractmethod
    def make_gradients(self, step: int, batch: Any) -> torch.Tensor:
        """Make every gradient the sum over ranks, and return this rank's part of the loss; ``step`` is 0 unmeasured."""

    @abstractmethod
    def samples_of(self, batch: Any) -> Any:
        """Return the tensors of a batch, whose first axis counts samples."""

    @property
    @abstractmethod
    def is_same_on_any_cpu(self) -> bool:
        """True if CPU ranks compute the same bits on CPUs of every vendor."""

    def make_hashes(self) -> StepHashes:
        """Return the hashes that the config asks for; of weights by default."""
        return StepHashes(self._settings, self._model, self._optimizer)

    def facts(self) -> dict[str, Any]:
        """Return facts for the result's environment; none by default."""
        return {}

    def setup(self) -> None:
        """Join the process group; build model, optimizer and batches.

        Raises:
            RuntimeError: cuBLAS is not configured for ``deterministic``, or a device or a package lacks what the config
                asks for.
            ValueError: Config keys contradict each other.
        """
        env = RankEnv.read()
        settings = self._settings = self.read_settings()
        settings.prepare_environment()
        self._env, self._device = env, env.join(self.name)
        given = {**self.config, "device": self._device.type, "ranks": env.world_size}
        check_rules(settings.rules(self._device.type, env.world_size), given)
        self.check()
        settings.lr_schedule.check()
        settings.fault.check(steps=settings.steps, world_size=env.world_size)
        if settings.deterministic:
            filled = self.config.get("fill_uninitialized_memory", False)
            use_deterministic_algorithms(self._device, fill_uninitialized_memory=filled)
        self._model = self.build()
        kind = self.config.get("optimizer", "fused")
        self._optimizer = make_adamw(self._model, settings.lr, settings.betas, settings.weight_decay, kind)
        loaded = settings.load_checkpoint
        first = 0 if loaded is None else checkpoint.load(loaded, self._state())
        last = first + settings.warmup + settings.steps
        self._learning_rate = LearningRate(settings.lr, settings.lr_schedule, first, last)
        self._hashes = self.make_hashes()
        self._notes = TrainingNotes(self._optimizer, self._model)
        self._capture = OperatorCapture(self._model)
        self._given = settings.fault.given(self.make_batches(first), env.rank, warmup=settings.warmup)

    def run(self) -> RankResult:
        """Warm up, train the measured steps, read their results from the device, then profile further steps."""
        settings, found = self._settings, list[tuple[torch.Tensor, torch.Tensor]]()
        for _ in range(settings.warmup):
            self._train_step(0, next(self._given))
        timer, elapsed_sec = measure(
            lambda number, timer: found.append(self._measure_step(number + 1, timer)), settings.steps, self._device
        )
        result = timed_result(timer, elapsed_sec, settings.steps)
        losses, norms = ([], []) if is_simulated() else map(list, zip(*found, strict=True))
        result = result.replace(
            loss=_sum_over_ranks(losses if self._counts_loss else list(map(torch.zeros_like, losses))),
            grad_norm=[float(whole_norm(norm)) for norm in norms],
            environment=environment_facts(self._device, any_cpu=self.is_same_on_any_cpu) | self.facts(),
            weight_hashes=self._hashes.weight_hashes,
            tensor_hashes=self._hashes.tensor_hashes,
            boundary_hashes=self._hashes.boundary_hashes,
            series=self._notes.series(),
        )
        result = result.replace(metrics=self._metrics(sum(result.step_times_ms) / 1e3, result.grad_norm))
        # The weights of profiled steps are neither hashed nor saved.
        with checkpoint.saving(settings.save_checkpoint, self._state, is_async=settings.async_save):
            return profiled(
                result, lambda: self._train_step(0, next(self._given)), settings.profile_steps, self._device
            )

    def telemetry(self) -> Telemetry:
        """Return the learning rate of each measured step."""
        last = self._learning_rate.num_steps
        rates = [self._learning_rate.rate(step) for step in range(last - self._settings.steps, last)]
        return Telemetry(series={"lr": rates})

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the model's parameters by name; this rank holds its shards of them."""
        return self._model.named_parameters()

    def _state(self) -> dict[str, torch.Tensor]:
        return checkpoint.state_of(self._model, self._optimizer)

    def _train_step(self, step: int, batch: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run one optimizer step; return this rank's part of the loss, and the gradient norm if clipping needs it.

        ``step`` is 0 in warm-up and in profiled steps.
        """
        self._optimizer.zero_grad()
        loss = self.make_gradients(step, batch)
        self._hashes.gradients("gradients", step)
        norm = None
        if (max_norm := self._settings.max_grad_norm) is not None:
            norm = self._total_norm()
            if isinstance(self._optimizer, CompiledAdamW):
                self._optimizer.gradient_factor = clip_factor(max_norm, norm)
            else:
                clip_gradients(self._model, max_norm, norm)
        self._hashes.gradients("clipped", step)
        self._learning_rate.apply(self._optimizer)
        self._optimizer.step()
        return loss, norm

    def _measure_step(self, step: int, timer: StepTimer) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one measured step, counted from 1, and return this rank's part of the loss and the gradient norm."""
        self._hashes.begin(step)
        capture = self._capture if step == self._settings.hash_operators_step else None
        with self._settings.fault.planted(step, self._env.rank, self._model, self._optimizer, capture), timer.step():
            loss, norm = self._train_step(step, batch := next(self._given))
        # A step without clipping does not need the norm, so the norm is computed outside the timed step.
        norm = self._total_norm() if norm is None else norm
        self._hashes.end(step)
        self._notes.end_step(self.samples_of(batch), clipped_to=self._settings.max_grad_norm)
        return loss, norm

    def _total_norm(self) -> torch.Tensor:
        return total_norm(self._model)

    def _metrics(self, step_time_s: float, grad_norms: list[float]) -> dict[str, float]:  # noqa: ARG002
        return {"num_parameters": float(self._num_parameters)} | peak_memory_metrics(self._device)


def _sum_over_ranks(losses: list[torch.Tensor]) -> list[float]:
    """Return the sums, added in the order of ranks: an all-reduce's order depends on how many losses there are."""
    if not losses:
        return []
    own = torch.stack(losses)
    gathered = own.new_empty(dist.get_world_size() * len(own))
    all_gather(gathered, own)
    first, *others = gathered.view(-1, len(own))
    return [float(loss) for loss in sum(others, start=first).tolist()]
