"""The lifecycle and training loop of workloads that train the ranking model; a subclass distributes the model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import ClassVar, Generic, TypeAlias, TypeVar

import torch
import torch.nn.functional as F

from pytest_aorta.worker import RankEnv, RankResult, StepTimer, Telemetry, Workload, hash_parameters, profiled

from .. import checkpoint
from ..common.capturing import StepCapture
from ..common.determinism import use_deterministic_algorithms
from ..common.gradients import clip_gradients, total_norm
from ..common.learning_rate import LearningRate
from ..common.rules import CHECKPOINT_RULES, check_rules
from ..common.streams import DeviceStream, InlineStream
from ..common.training import is_hashed, leave_process_group, make_adamw, measure_training, peak_memory_metrics
from .data import Batch, InputFeed, make_batch
from .model import RankingModel, initialize
from .settings import TrainingSettings

# Maps dense features and rows of tables to logits.
Forward: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_Settings = TypeVar("_Settings", bound=TrainingSettings)


class RankingTraining(Workload, Generic[_Settings]):
    """Trains the ranking model with AdamW on synthetic clicks; gradients are summed over ranks."""

    name: ClassVar[str]
    min_world_size = 2

    @abstractmethod
    def read_settings(self) -> _Settings:
        """Return the config as typed values."""

    @abstractmethod
    def distribute(self, model: RankingModel) -> Forward:
        """Distribute ``model``, a whole and equal copy on each rank, and return the callable that runs forward."""

    @abstractmethod
    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Return the context of one micro-batch; gradients are summed over ranks in the last one's backward pass."""

    @abstractmethod
    def finish_gradients(self) -> None:
        """Make every gradient the sum over ranks; called after a step's last backward pass."""

    @property
    @abstractmethod
    def overlaps(self) -> bool:
        """Return whether the config allows inputs to be copied beside compute."""

    def own_metrics(self) -> dict[str, float]:
        """Return metrics of the subclass."""
        return {}

    def setup(self) -> None:
        """Join the process group; build model, optimizer and batches.

        Raises:
            RuntimeError: The world has fewer than two ranks, or cuBLAS is not configured for ``deterministic``.
            ValueError: Config keys contradict each other.
        """
        env = RankEnv.read()
        self._device = env.join(self.name, min_world_size=self.min_world_size)
        settings = self._settings = self.read_settings()
        settings.check()
        check_rules(CHECKPOINT_RULES, self.config)
        settings.fault.check(steps=settings.steps, world_size=env.world_size)
        if settings.deterministic:
            use_deterministic_algorithms(self._device)
        with torch.device(self._device):
            self._model = RankingModel(settings.model)
        initialize(self._model, settings.seed)
        self._num_parameters = sum(parameter.numel() for parameter in self._model.parameters())
        settings.compile.apply(self._model.blocks)
        self._forward = self.distribute(self._model)
        self._optimizer = make_adamw(self._model, settings.lr, settings.betas, settings.weight_decay)
        self._capture = StepCapture(
            self._model, self._optimizer, settings.hash_operators_step, settings.fault, env.rank
        )
        self._global_batch = settings.samples_per_step * env.world_size
        given = settings.load_checkpoint
        self._trained_steps = 0 if given is None else checkpoint.load(given, self._model, self._optimizer)
        self._feed = self._make_feed(env, self._trained_steps)
        self._step = 0
        last = self._trained_steps + settings.warmup + settings.steps
        self._learning_rate = LearningRate(settings.lr, settings.lr_schedule, self._trained_steps, last)

    def run(self) -> RankResult:
        """Warm up, train the measured steps, read their results from the device, then profile further steps."""
        for _ in range(self._settings.warmup):
            self._train_step()
        settings, self._weight_hashes = self._settings, dict[str, str]()
        any_cpu = not settings.compile.enabled
        result = measure_training(self._measured_step, settings.steps, self._device, any_cpu=any_cpu)
        if (folder := settings.save_checkpoint) is not None:
            checkpoint.save(folder, self._model, self._optimizer)
        metrics = self._metrics(sum(result.step_times_ms) / 1e3)
        result = result.replace(metrics=metrics, weight_hashes=self._weight_hashes)
        return profiled(result, self._train_step, settings.profile_steps, self._device)

    def telemetry(self) -> Telemetry:
        """Return the learning rate of each measured step."""
        first = self._trained_steps + self._settings.warmup
        return Telemetry({"lr": self._learning_rate.rates(range(first, first + self._settings.steps))})

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the model's parameters by name; this rank holds its shards of them."""
        return self._model.named_parameters()

    def cleanup(self) -> None:
        """Leave the process group and free model, optimizer and batches."""
        leave_process_group(self, "_capture", "_optimizer", "_forward", "_model", "_feed")

    def _make_feed(self, env: RankEnv, first_step: int) -> InputFeed:
        settings = self._settings
        # The first batch is the one that follows those of the loaded checkpoint.
        numbers = range(first_step, first_step + settings.host_batches)
        batches = [make_batch(settings, number % settings.host_batches, env.rank, env.world_size) for number in numbers]
        self._bytes_per_step = batches[0].num_bytes
        beside = settings.h2d_prefetch and self.overlaps
        on_stream = beside and self._device.type == "cuda"
        stream = DeviceStream(self._device) if on_stream else InlineStream()
        return InputFeed(batches, self._device, stream, int(beside))

    def _train_step(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run one optimizer step; return this rank's part of the loss, and the gradient norm if clipping needs it."""
        batch = self._feed.take(self._step)
        self._step += 1
        self._optimizer.zero_grad()
        loss = self._accumulate(batch)
        self.finish_gradients()
        norm = self._scale_gradients()
        self._learning_rate.apply(self._optimizer)
        self._optimizer.step()
        return loss, norm

    def _scale_gradients(self) -> torch.Tensor | None:
        """Undo the scale of the loss and clip gradients; return the norm before clipping if it was computed."""
        settings = self._settings
        if settings.loss_scale != 1:
            for parameter in self._model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(1 / settings.loss_scale)
        if settings.max_grad_norm is None:
            return None
        norm = total_norm(self._model)
        clip_gradients(self._model, settings.max_grad_norm, norm)
        return norm

    def _accumulate(self, batch: Batch) -> torch.Tensor:
        """Add the gradients of all micro-batches, one after another, and return the sum of their losses."""
        total = torch.zeros((), device=self._device)
        micro_batches = list(zip(*batch.tensors, strict=True))
        for number, (dense, rows, clicks) in enumerate(micro_batches, 1):
            with self.micro_batch(is_last=number == len(micro_batches)):
                loss = F.binary_cross_entropy_with_logits(self._forward(dense, rows), clicks, reduction="sum")
                loss = loss / self._global_batch
                loss.backward(torch.full_like(loss, self._settings.loss_scale))
            total += loss.detach()
        return total

    def _measured_step(self, step: int, timer: StepTimer) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one measured step, counted from 1, and return this rank's part of the loss and the gradient norm."""
        with self._capture.around(step), timer.step():
            loss, norm = self._train_step()
        norm = total_norm(self._model) if norm is None else norm
        if is_hashed(step, self._settings.steps, self._settings.hash_every):
            self._weight_hashes[str(step)] = hash_parameters(self._model.named_parameters()).hex
        return loss, norm

    def _metrics(self, step_time_s: float) -> dict[str, float]:
        metrics = {
            "samples_per_s": self._settings.samples_per_step * self._settings.steps / step_time_s,
            "num_parameters": float(self._num_parameters),
            "h2d_bytes_per_step": float(self._bytes_per_step),
        }
        return metrics | peak_memory_metrics(self._device) | self.own_metrics()
