"""The lifecycle and the training loop of the workloads that train a model; a subclass makes model and gradients."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from pytest_aorta.worker import (
    OperatorCapture,
    RankEnv,
    RankResult,
    StepTimer,
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
from .common.faults import PlantedFault
from .common.gradients import clip_factor, clip_gradients, total_norm, whole_norm
from .common.learning_rate import LearningRate
from .common.result import GroupWorkload, peak_memory_metrics
from .common.rules import check_rules
from .common.settings import TrainingSettings, read_settings
from .hashing import StepHashes

_Settings = TypeVar("_Settings", bound=TrainingSettings)


class TrainingWorkload(GroupWorkload, Generic[_Settings]):
    """Trains a model with AdamW; gradients are summed over ranks.

    Attributes:
        name: the name of the workload.
        settings_type: the type of ``settings``.
        num_parameters: the parameters of the whole model.
        counts_loss: whether this rank's loss is added to the sum over ranks; ranks with the same loss add it once.
    """

    name: ClassVar[str]
    settings_type: type[_Settings]
    num_parameters: int
    counts_loss = True

    @cached_property
    def settings(self) -> _Settings:
        """Return the config as typed values."""
        return read_settings(self.settings_type, self.config)

    def check(self) -> None:
        """Raise an error for what this world or device can't run, in the process group; nothing by default."""

    @abstractmethod
    def build(self) -> nn.Module:
        """Return the model, distributed over ranks, and set ``num_parameters``."""

    @abstractmethod
    def make_batches(self, trained_steps: int) -> Iterator[Any]:
        """Make the batches after the first ``trained_steps``; a batch may be valid only until the next one is taken."""

    @abstractmethod
    def make_gradients(self, batch: Any) -> torch.Tensor:
        """Make every gradient the sum over ranks, and return this rank's part of the loss."""

    def after_step(self) -> None:
        """Change the model after each step of the optimizer; nothing by default."""

    @abstractmethod
    def samples_of(self, batch: Any) -> Any:
        """Return the tensors of a batch, whose first axis counts samples."""

    @property
    @abstractmethod
    def is_same_on_any_cpu(self) -> bool:
        """True if CPU ranks compute the same bits on CPUs of every vendor."""

    def make_hashes(self) -> StepHashes:
        """Return the hashes that the config asks for; of weights by default."""
        return StepHashes(self.settings, self.model, self.optimizer)

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
        env, settings = RankEnv.read(), self.settings
        settings.prepare_environment()
        self.env, self.device = env, env.join(self.name)
        given = {**self.config, "device": self.device.type, "ranks": env.world_size}
        check_rules(settings.rules(self.device.type, env.world_size), given)
        self.check()
        settings.lr_schedule.check()
        settings.fault.check(steps=settings.steps, world_size=env.world_size)
        if settings.deterministic:
            filled = self.config.get("fill_uninitialized_memory", False)
            use_deterministic_algorithms(self.device, fill_uninitialized_memory=filled)
        self.fault = PlantedFault(settings.fault, env.rank, self.device)
        self.model = self.build()
        kind = self.config.get("optimizer", "fused")
        self.optimizer = make_adamw(self.model, settings.lr, settings.betas, settings.weight_decay, kind)
        loaded = settings.load_checkpoint
        first = 0 if loaded is None else checkpoint.load(loaded, self._state())
        last = first + settings.warmup + settings.steps
        self._learning_rate = LearningRate(settings.lr, settings.lr_schedule, first, last)
        self._hashes = self.make_hashes()
        self._notes = TrainingNotes(self.optimizer, self.model)
        self._capture = OperatorCapture(self.model)
        self.batches = self.fault.batches(self.make_batches(first))

    def run(self) -> RankResult:
        """Warm up, train the measured steps, read their results from the device, then profile further steps."""
        settings, found = self.settings, list[tuple[torch.Tensor, torch.Tensor]]()
        for _ in range(settings.warmup):
            self.train_step(next(self.batches))
        timer, elapsed_sec = measure(
            lambda number, timer: found.append(self._measure_step(number + 1, timer)), settings.steps, self.device
        )
        result = timer.result(elapsed_sec).replace(configured_iterations=settings.steps)
        losses, norms = ([], []) if is_simulated() else map(list, zip(*found, strict=True))
        result = result.replace(
            loss=_sum_over_ranks(losses if self.counts_loss else list(map(torch.zeros_like, losses))),
            grad_norm=[float(whole_norm(norm)) for norm in norms],
            environment=environment_facts(self.device, any_cpu=self.is_same_on_any_cpu) | self.facts(),
            weight_hashes=self._hashes.weight_hashes,
            tensor_hashes=self._hashes.tensor_hashes,
            series=self._notes.series(),
        )
        result = result.replace(metrics=self.metrics(sum(result.step_times_ms) / 1e3, result.grad_norm))
        # The weights of profiled steps are neither hashed nor saved.
        with checkpoint.saving(settings.save_checkpoint, self._state, is_async=settings.async_save):
            return profiled(result, lambda: self.train_step(next(self.batches)), settings.profile_steps, self.device)

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the model's parameters by name; this rank holds its shards of them."""
        return self.model.named_parameters()

    def _state(self) -> dict[str, torch.Tensor]:
        return checkpoint.state_of(self.model, self.optimizer)

    def train_step(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run one optimizer step; return this rank's part of the loss, and the gradient norm if clipping needs it."""
        self.optimizer.zero_grad()
        loss = self.make_gradients(batch)
        self._hashes.gradients("gradients")
        norm = None
        if (max_norm := self.settings.max_grad_norm) is not None:
            norm = self.total_norm()
            if isinstance(self.optimizer, CompiledAdamW):
                self.optimizer.gradient_factor = clip_factor(max_norm, norm)
            else:
                clip_gradients(self.model, max_norm, norm)
        self._hashes.gradients("clipped")
        self._learning_rate.apply(self.optimizer)
        self.optimizer.step()
        self.after_step()
        return loss, norm

    def _measure_step(self, step: int, timer: StepTimer) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one measured step, counted from 1, and return this rank's part of the loss and the gradient norm."""
        self._hashes.begin(step)
        capture = self._capture if step == self.settings.hash_operators_step else None
        with self.fault.in_step(step, self.model, self.optimizer, capture), timer.step():
            loss, norm = self.train_step(batch := next(self.batches))
        # A step without clipping does not need the norm, so the norm is computed outside the timed step.
        norm = self.total_norm() if norm is None else norm
        self._hashes.end(step)
        self._notes.end_step(self.samples_of(batch), clipped_to=self.settings.max_grad_norm)
        return loss, norm

    def total_norm(self) -> torch.Tensor:
        """Return the 2-norm of all gradients."""
        return total_norm(self.model)

    def metrics(self, step_time_s: float, grad_norms: list[float]) -> dict[str, float]:  # noqa: ARG002
        """Return the metrics of all measured steps, which took ``step_time_s`` together."""
        return {"num_parameters": float(self.num_parameters)} | peak_memory_metrics(self.device)


def _sum_over_ranks(losses: list[torch.Tensor]) -> list[float]:
    """Return the sums, added in the order of ranks: an all-reduce's order depends on how many losses there are."""
    if not losses:
        return []
    own = torch.stack(losses)
    gathered = own.new_empty(dist.get_world_size() * len(own))
    all_gather(gathered, own)
    first, *others = gathered.view(-1, len(own))
    return [float(loss) for loss in sum(others, start=first).tolist()]
