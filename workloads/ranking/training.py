"""Training of the ranking model, which is distributed in different ways."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F

from ..common.streams import DeviceStream, InlineStream
from ..training import TrainingWorkload
from .data import Batch, InputFeed, make_batch
from .model import RankingModel, initialize
from .settings import ClickSettings

_Settings = TypeVar("_Settings", bound=ClickSettings)


@dataclass(frozen=True)
class Distributed:
    """A model on several ranks.

    Attributes:
        forward: maps dense features and rows of tables to logits.
        micro_batch: returns the context of one micro-batch, given whether it is a step's last; gradients are summed
            over ranks in the last one's backward pass.
        finish_gradients: makes every gradient the sum over ranks; called after a step's last backward pass.
        metrics: returns metrics of the last step.
    """

    forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    micro_batch: Callable[[bool], AbstractContextManager[None]]
    finish_gradients: Callable[[], None]
    metrics: Callable[[], dict[str, float]] = dict


class RankingTraining(TrainingWorkload[_Settings]):
    """Trains the ranking model on synthetic clicks."""

    @staticmethod
    @abstractmethod
    def parallelize(model: RankingModel, settings: _Settings, device: torch.device) -> Distributed:
        """Distribute ``model``, a whole and equal copy on each rank."""

    def build(self) -> RankingModel:
        """Return the distributed model."""
        settings = self.settings
        with torch.device(self.device):
            model = RankingModel(settings.model)
        initialize(model, settings.seed)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self._global_batch = settings.samples_per_step * self.env.world_size
        settings.compile.apply(model.blocks)
        self.distributed = self.parallelize(model, settings, self.device)
        return model

    @property
    def is_same_on_any_cpu(self) -> bool:
        """True unless inductor compiles blocks."""
        return not self.settings.compile.enabled

    def samples_of(self, batch: Batch) -> list[torch.Tensor]:
        """Return the tensors without the axis of micro-batches."""
        return [part.flatten(0, 1) for part in batch]

    def make_batches(self, trained_steps: int) -> Iterator[Batch]:
        """Make the host's batches, and copy them to the device ahead of their use."""
        settings, env = self.settings, self.env
        # The first batch is the one that follows those of the loaded checkpoint.
        numbers = range(trained_steps, trained_steps + settings.host_batches)
        batches = [make_batch(settings, number % settings.host_batches, env.rank, env.world_size) for number in numbers]
        self.bytes_per_step = sum(tensor.nbytes for tensor in batches[0])
        beside = settings.h2d_prefetch and settings.overlaps
        on_stream = beside and self.device.type == "cuda"
        stream = DeviceStream(self.device) if on_stream else InlineStream()
        return InputFeed(batches, self.device, stream, int(beside))

    def make_gradients(self, batch: Batch) -> torch.Tensor:
        """Make every gradient the sum over ranks, without the scale of the loss; return this rank's part of the loss.

        The gradients of all micro-batches are added, one after another.
        """
        scale, total = self.settings.loss_scale, torch.zeros((), device=self.device)
        micro_batches = list(zip(*batch, strict=True))
        for number, (dense, rows, clicks) in enumerate(micro_batches, 1):
            with self.distributed.micro_batch(number == len(micro_batches)):
                loss = F.binary_cross_entropy_with_logits(
                    self.distributed.forward(dense, rows), clicks, reduction="sum"
                )
                loss = loss / self._global_batch
                loss.backward(torch.full_like(loss, scale))
            total += loss.detach()
        self.distributed.finish_gradients()
        if scale != 1:
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(1 / scale)
        return total

    def metrics(self, step_time_s: float, grad_norms: list[float]) -> dict[str, float]:
        """Return throughput and copied bytes besides the metrics of every training."""
        samples = self.settings.samples_per_step * self.settings.steps
        return super().metrics(step_time_s, grad_norms) | {
            "samples_per_s": samples / step_time_s,
            "h2d_bytes_per_step": float(self.bytes_per_step),
            **self.distributed.metrics(),
        }
