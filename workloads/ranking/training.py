"""Training of the ranking model; a subclass distributes the model."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TypeAlias, TypeVar

import torch
import torch.nn.functional as F

from ..common.streams import DeviceStream, InlineStream
from ..training import TrainingWorkload
from .data import Batch, InputFeed, make_batch
from .model import RankingModel, initialize
from .settings import ClickSettings

# Maps dense features and rows of tables to logits.
Forward: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_Settings = TypeVar("_Settings", bound=ClickSettings)


class RankingTraining(TrainingWorkload[_Settings]):
    """Trains the ranking model on synthetic clicks."""

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

    def build(self) -> RankingModel:
        """Return the distributed model."""
        settings = self._settings
        with torch.device(self._device):
            model = RankingModel(settings.model)
        initialize(model, settings.seed)
        self._num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self._global_batch = settings.samples_per_step * self._env.world_size
        settings.compile.apply(model.blocks)
        self._forward = self.distribute(model)
        return model

    @property
    def is_same_on_any_cpu(self) -> bool:
        """True unless inductor compiles blocks."""
        return not self._settings.compile.enabled

    def samples_of(self, batch: Batch) -> list[torch.Tensor]:
        """Return the tensors without the axis of micro-batches."""
        return [part.flatten(0, 1) for part in batch]

    def make_batches(self, trained_steps: int) -> Iterator[Batch]:
        """Make the host's batches, and copy them to the device ahead of their use."""
        settings, env = self._settings, self._env
        # The first batch is the one that follows those of the loaded checkpoint.
        numbers = range(trained_steps, trained_steps + settings.host_batches)
        batches = [make_batch(settings, number % settings.host_batches, env.rank, env.world_size) for number in numbers]
        self._bytes_per_step = sum(tensor.nbytes for tensor in batches[0])
        beside = settings.h2d_prefetch and self.overlaps
        on_stream = beside and self._device.type == "cuda"
        stream = DeviceStream(self._device) if on_stream else InlineStream()
        return InputFeed(batches, self._device, stream, int(beside))

    def make_gradients(self, step: int, batch: Batch) -> torch.Tensor:  # noqa: ARG002
        """Make every gradient the sum over ranks, without the scale of the loss; return this rank's part of the loss.

        The gradients of all micro-batches are added, one after another.
        """
        scale, total = self._settings.loss_scale, torch.zeros((), device=self._device)
        micro_batches = list(zip(*batch, strict=True))
        for number, (dense, rows, clicks) in enumerate(micro_batches, 1):
            with self.micro_batch(is_last=number == len(micro_batches)):
                loss = F.binary_cross_entropy_with_logits(self._forward(dense, rows), clicks, reduction="sum")
                loss = loss / self._global_batch
                loss.backward(torch.full_like(loss, scale))
            total += loss.detach()
        self.finish_gradients()
        if scale != 1:
            for parameter in self._model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(1 / scale)
        return total

    def _metrics(self, step_time_s: float, grad_norms: list[float]) -> dict[str, float]:
        samples = self._settings.samples_per_step * self._settings.steps
        return super()._metrics(step_time_s, grad_norms) | {
            "samples_per_s": samples / step_time_s,
            "h2d_bytes_per_step": float(self._bytes_per_step),
        }
