"""The lifecycle and training loop of workloads that train the ranking model; a subclass says how ranks share it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F

from pytest_aorta.worker import (
    RankEnv,
    RankResult,
    StepTimer,
    StreamSpans,
    Telemetry,
    Workload,
    environment_facts,
    hash_parameters,
    measure,
    profiled,
)

from ..common.compiling import CompileSettings
from ..common.determinism import use_deterministic_algorithms
from ..fsdp.lanes import InlineLane, StreamLane
from ..llama.gradients import by_mesh, total_norm, whole_norm
from .data import Batch, InputFeed, make_batch
from .model import RankingConfig, RankingModel, initialize

# From dense features and rows of tables to logits.
Forward: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _Measured:
    """What the measured steps leave; tensors stay on the device until all steps are done."""

    timer: StepTimer
    elapsed_sec: float
    losses: list[torch.Tensor]
    grad_norms: list[torch.Tensor]
    weight_hashes: dict[str, str]


class RankingTraining(Workload):
    """Trains the ranking model with AdamW on synthetic clicks; gradients are summed over ranks."""

    name: ClassVar[str]
    min_world_size = 2

    @abstractmethod
    def distribute(self, model: RankingModel) -> Forward:
        """Have all ranks share ``model``, which each holds whole and with equal values; returns what is called."""

    @abstractmethod
    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """The context of one micro-batch of a step: gradients are summed over ranks in the last one's backward."""

    @abstractmethod
    def finish_gradients(self) -> None:
        """After a step's last backward pass: see that every gradient is the sum over ranks."""

    @property
    @abstractmethod
    def overlaps(self) -> bool:
        """Whether inputs are copied beside compute where the config asks for it."""

    def own_metrics(self) -> dict[str, float]:
        """Facts of the subclass."""
        return {}

    def setup(self) -> None:
        """Join the process group; build model, optimizer and batches.

        Raises:
            RuntimeError: fewer than two ranks, or deterministic cuBLAS is asked for and not configured.
            ValueError: config keys that contradict each other.
        """
        env = RankEnv.read()
        self._device = env.join(self.name, min_world_size=self.min_world_size)
        if self.config["deterministic"]:
            use_deterministic_algorithms(self._device)
        compiling = CompileSettings.read(self.config)
        self._spans = StreamSpans(self._device, self.config["span_every"])
        with torch.device(self._device):
            self._model = RankingModel(RankingConfig.from_config(self.config))
        initialize(self._model, self.config["seed"])
        self._num_parameters = sum(parameter.numel() for parameter in self._model.parameters())
        compiling.apply(self._model.blocks)
        self._forward = self.distribute(self._model)
        self._optimizer = torch.optim.AdamW(
            # Plain parameters and sharded ones apart: one kernel for many tensors takes one kind.
            [{"params": parameters} for parameters in by_mesh(self._model)],
            lr=self.config["lr"],
            fused=self._device.type == "cuda",
            foreach=False,
        )
        self._global_batch = self.config["batch_size"] * self.config["gradient_accumulation"] * env.world_size
        self._feed = self._make_feed(env)
        self._step = 0

    def run(self) -> RankResult:
        """Warm up, train the measured steps, read what they left on the device, and at last profile further steps."""
        for _ in range(self.config["warmup"]):
            self._train_step()
        measured = self._measure()
        step_times_ms, wait_ms = measured.timer.step_times_ms(), measured.timer.wait_ms()
        result = RankResult(
            passed=True,
            failure_count=0,
            configured_iterations=self.config["steps"],
            total_iterations=len(step_times_ms),
            step_times_ms=step_times_ms,
            elapsed_sec=measured.elapsed_sec,
            metrics=self._metrics(sum(step_times_ms) / 1e3),
            weight_hashes=measured.weight_hashes,
            loss=_sum_over_ranks(measured.losses),
            grad_norm=[float(whole_norm(norm)) for norm in measured.grad_norms],
            environment=environment_facts(self._device),
            wait_ms=wait_ms,
            memory_bytes=measured.timer.memory_bytes(),
        )
        return profiled(result, self._train_step, self.config["profile_steps"], self._device)

    def telemetry(self) -> Telemetry:
        """The learning rate, which is constant, and what streams did in every so many-th measured step."""
        series = {"lr": [self.config["lr"]] * self.config["steps"]}
        return Telemetry(series, self._spans.captures())

    def cleanup(self) -> None:
        """Leave the process group and free model, optimizer and batches."""
        if dist.is_initialized():
            dist.destroy_process_group()
        for name in ("_optimizer", "_forward", "_model", "_feed", "_spans"):
            self.__dict__.pop(name, None)

    def _make_feed(self, env: RankEnv) -> InputFeed:
        config = self.config
        batches = [make_batch(config, number, env.rank, env.world_size) for number in range(config["host_batches"])]
        self._bytes_per_step = batches[0].num_bytes
        beside = config["h2d_prefetch"] and self.overlaps
        on_stream = beside and self._device.type == "cuda"
        lane = StreamLane(self._device) if on_stream else InlineLane()
        return InputFeed(batches, self._device, lane, int(beside), self._spans)

    def _train_step(self) -> torch.Tensor:
        """One optimizer step: this rank's part of the global batch's loss."""
        batch = self._feed.take(self._step)
        self._step += 1
        with self._spans.span("compute"):
            self._optimizer.zero_grad()
            loss = self._accumulate(batch)
        self.finish_gradients()
        with self._spans.span("compute"):
            self._optimizer.step()
        return loss

    def _accumulate(self, batch: Batch) -> torch.Tensor:
        """Add the gradients of all micro-batches, one after another."""
        total = torch.zeros((), device=self._device)
        micro_batches = list(zip(*batch.tensors, strict=True))
        for number, (dense, rows, clicks) in enumerate(micro_batches, 1):
            with self.micro_batch(is_last=number == len(micro_batches)):
                loss = F.binary_cross_entropy_with_logits(self._forward(dense, rows), clicks, reduction="sum")
                loss = loss / self._global_batch
                loss.backward()
                # What holds backward's last compute knows nothing of its end.
                self._spans.resume()
            total += loss.detach()
        return total

    def _measure(self) -> _Measured:
        losses: list[torch.Tensor] = []
        grad_norms: list[torch.Tensor] = []
        weight_hashes: dict[str, str] = {}

        def run_step(number: int, timer: StepTimer) -> None:
            with timer.step(), self._spans.step(number):
                loss = self._train_step()
            losses.append(loss)
            grad_norms.append(total_norm(self._model))
            if self._is_hashed(number + 1):
                weight_hashes[str(number + 1)] = hash_parameters(self._model.named_parameters()).hex

        timer, elapsed_sec = measure(run_step, self.config["steps"], self._device)
        return _Measured(timer, elapsed_sec, losses, grad_norms, weight_hashes)

    def _is_hashed(self, step: int) -> bool:
        steps, every = int(self.config["steps"]), int(self.config["hash_every"])
        return step == steps or (every > 0 and step % every == 0)

    def _metrics(self, step_time_s: float) -> dict[str, float]:
        config = self.config
        samples = config["batch_size"] * config["gradient_accumulation"] * config["steps"]
        metrics = {
            "samples_per_s": samples / step_time_s,
            "num_parameters": float(self._num_parameters),
            "h2d_bytes_per_step": float(self._bytes_per_step),
        }
        if self._device.type == "cuda":
            metrics["peak_memory_bytes"] = float(torch.cuda.max_memory_allocated(self._device))
        return metrics | self.own_metrics()


def _sum_over_ranks(losses: list[torch.Tensor]) -> list[float]:
    """Each step's global loss, from every rank's part of it."""
    summed = torch.stack(losses)
    dist.all_reduce(summed)
    return [float(loss) for loss in summed.tolist()]
