"""The lifecycle and the training loop of a Llama workload; a subclass shards the model its own way."""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.distributed as dist

from pytest_aorta.worker import (
    Delay,
    RankEnv,
    RankResult,
    StepTimer,
    Telemetry,
    Workload,
    environment_facts,
    profiled,
)

from . import saved_state
from .context_parallel import own_positions
from .data import initialize, sequences
from .faults import Fault
from .gradients import by_mesh, clip_gradients, total_norm, whole_norm
from .hashing import StepHashes
from .loss import make_loss
from .mesh import ParallelMesh
from .model import Llama, LlamaConfig
from .parallelize import check_parallelism, parallelize
from .pipeline import Pipeline, Stages

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_BETAS = (0.9, 0.95)
_WEIGHT_DECAY = 0.1
# The only settings under which cuBLAS is deterministic: docs.nvidia.com/cuda/cublas, "Results reproducibility".
_DETERMINISTIC_CUBLAS = (":4096:8", ":16:8")


@dataclass
class _Measured:
    """What the measured steps leave; tensors stay on the device until all steps are done."""

    timer: StepTimer
    losses: list[torch.Tensor] = field(default_factory=list)
    grad_norms: list[torch.Tensor] = field(default_factory=list)
    elapsed_sec: float = 0.0


class LlamaWorkload(Workload):
    """Trains a Llama-3 shaped model with AdamW on synthetic tokens; gradients are summed over ranks."""

    name: ClassVar[str]
    min_world_size = 2

    @abstractmethod
    def shard(self, model: Llama, mesh: ParallelMesh) -> None:
        """Shard the parameters of ``model``, which is on the meta device, over the data-parallel axes of ``mesh``."""

    def prepare(self, model: Llama) -> None:
        """Do what needs the allocated and initialised model; nothing by default."""

    def before_micro_batch(self, *, is_last: bool) -> None:
        """Prepare the backward pass of one micro-batch of a step; nothing by default."""

    def setup(self) -> None:
        """Join the process group and build the sharded model, its optimizer and all batches.

        Raises:
            RuntimeError: fewer than two ranks, or deterministic cuBLAS is asked for and not configured.
            ValueError: config keys that contradict each other.
        """
        env = RankEnv.read()
        self._device = env.join(self.name, min_world_size=self.min_world_size)
        self._rank = env.rank
        self._degrees = check_parallelism(self.config, env.world_size, self._device)
        saved_state.check_folders(self.config)
        self._fault = Fault(**self.config["fault"])
        self._fault.check(steps=self.config["steps"], world_size=env.world_size)
        if self.config["deterministic"]:
            _use_deterministic_algorithms(self._device)
        self._delay = Delay(self._device, self._fault.delay_ms)
        self._mesh = ParallelMesh.build(self._degrees, self._device.type)
        self._stages = Stages(self._mesh)
        positions = own_positions(self.config["seq_len"], self._degrees.context_parallel, self._mesh.context_rank)
        self._model = self._build_model()
        self._loss = make_loss(self.config["compile_loss"])
        self._optimizer = self._build_optimizer()
        given = self.config["load_checkpoint"]
        trained_steps = 0 if given is None else saved_state.load(given, self._model, self._optimizer)
        self._hashes = StepHashes(self.config, self._model, self._optimizer, self._stages)
        self._batches = self._make_batches(positions, trained_steps)
        self._rotations = self._model.config.rotations(positions.to(self._device))
        self._pipeline = None if self._mesh.pipeline is None else self._build_pipeline()

    def run(self) -> RankResult:
        """Warm up, train the measured steps, read what they left on the device, and at last profile further steps."""
        for batch in self._batches[: self.config["warmup"]]:
            self._train_step(0, batch)
        measured = self._measure()
        if (folder := self.config["save_checkpoint"]) is not None:
            saved_state.save(folder, self._model, self._optimizer)
        step_times_ms, wait_ms = measured.timer.step_times_ms(), measured.timer.wait_ms()
        grad_norm = [float(whole_norm(norm)) for norm in measured.grad_norms]
        result = RankResult(
            passed=True,
            failure_count=0,
            configured_iterations=self.config["steps"],
            total_iterations=len(step_times_ms),
            step_times_ms=step_times_ms,
            elapsed_sec=measured.elapsed_sec,
            metrics=self._metrics(sum(step_times_ms) / 1e3, grad_norm[-1]),
            weight_hashes=self._hashes.weight_hashes,
            loss=_sum_over_ranks(measured.losses),
            grad_norm=grad_norm,
            environment=environment_facts(self._device),
            wait_ms=wait_ms,
            memory_bytes=measured.timer.memory_bytes(),
            tensor_hashes=self._hashes.tensor_hashes,
            boundary_hashes=self._hashes.boundary_hashes,
        )
        # On the last batch again; what they train is neither hashed nor saved.
        batch = self._batches[-1]
        return profiled(result, lambda: self._train_step(0, batch), self.config["profile_steps"], self._device)

    def telemetry(self) -> Telemetry:
        """The learning rate, which is constant."""
        return Telemetry(series={"lr": [self.config["lr"]] * self.config["steps"]})

    def cleanup(self) -> None:
        """Leave the process group and free model, optimizer and batches."""
        if dist.is_initialized():
            dist.destroy_process_group()
        for name in ("_hashes", "_pipeline", "_optimizer", "_model", "_batches", "_stages", "_mesh"):
            self.__dict__.pop(name, None)

    def _build_model(self) -> Llama:
        """Shard on the meta device, then allocate the shards alone and fill them."""
        config = LlamaConfig.from_config(self.config)
        with torch.device("meta"):
            model = Llama(config)
        self._num_parameters = sum(parameter.numel() for parameter in model.parameters())
        parallelize(model, self._mesh, self.config)
        self.shard(model, self._mesh)
        model.to_empty(device=self._device)
        initialize(model, config.n_layers, self.config["seed"])
        self.prepare(model)
        return model

    def _build_pipeline(self) -> Pipeline:
        dtype = DTYPES[self.config["param_dtype"]]
        return Pipeline(self._model, self._mesh, self.config, self._rotations, dtype, self._global_loss)

    def _build_optimizer(self) -> torch.optim.AdamW:
        on_cuda = self._device.type == "cuda"
        asked = self.config["optimizer_fused"]
        fused = on_cuda if asked is None else asked
        return torch.optim.AdamW(
            # Of each mesh on its own: one kernel for many tensors takes no others.
            [{"params": parameters} for parameters in by_mesh(self._model)],
            lr=self.config["lr"],
            betas=_BETAS,
            weight_decay=_WEIGHT_DECAY,
            fused=fused,
            foreach=None if on_cuda and not fused else False,
        )

    def _make_batches(self, positions: torch.Tensor, first_step: int) -> list[torch.Tensor]:
        """Every step's ``[micro-batch, inputs or labels, sequence, token]``, there before any step is timed."""
        num_steps = self.config["warmup"] + self.config["steps"]
        return [self._batch(step, positions).to(self._device) for step in range(first_step, first_step + num_steps)]

    def _batch(self, step: int, positions: torch.Tensor) -> torch.Tensor:
        config, batch_size = self.config, self.config["batch_size"]
        micro_batches = []
        for micro_batch in range(config["gradient_accumulation"]):
            first = (micro_batch * self._degrees.data_parallel + self._mesh.data_rank) * batch_size
            indices = range(first, first + batch_size)
            tokens = sequences(config["seed"], step, indices, config["seq_len"], config["vocab_size"])
            micro_batches.append(torch.stack([tokens[:, positions], tokens[:, positions + 1]]))
        return torch.stack(micro_batches)

    def _train_step(self, step: int, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One optimizer step, 0 in warm-up: this rank's part of the global loss, and the gradient norm if needed."""
        self._optimizer.zero_grad()
        if self._pipeline is None:
            loss = self._accumulate(batch, self._fault.gradient_scale(step, self._rank))
        else:
            loss = self._pipeline.step(batch)
        self._hashes.after_backward(step)
        norm = None
        if (max_norm := self.config["max_grad_norm"]) is not None:
            norm = self._total_norm()
            clip_gradients(self._model, max_norm, norm)
        self._optimizer.step()
        return loss, norm

    def _accumulate(self, batch: torch.Tensor, gradient_scale: float) -> torch.Tensor:
        """Add the gradients of all micro-batches, one after another."""
        loss = torch.zeros((), device=self._device)
        for number, tokens in enumerate(batch, 1):
            self.before_micro_batch(is_last=number == len(batch))
            loss += self._backward(tokens, gradient_scale)
        return loss

    def _backward(self, tokens: torch.Tensor, gradient_scale: float) -> torch.Tensor:
        """Add one micro-batch's gradients."""
        inputs, labels = tokens
        # The logits have no name here: one would keep them through backward.
        loss = self._global_loss(self._hashes.forward(inputs, self._rotations), labels)
        loss.backward(torch.full_like(loss, gradient_scale))
        return loss.detach()

    def _global_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """One micro-batch's part of the step's loss: a sum over tokens divided by the global batch's count."""
        return self._loss(logits, labels) / (self._tokens_per_step * self._degrees.data_parallel)

    @property
    def _tokens_per_step(self) -> int:
        """Of one data-parallel rank."""
        config = self.config
        return int(config["gradient_accumulation"] * config["batch_size"] * config["seq_len"])

    def _measure(self) -> _Measured:
        measured = _Measured(StepTimer(self._device))
        # Ranks enter together and with nothing enqueued, or the first step would include what came before.
        self._synchronize()
        dist.barrier()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        began_s = time.perf_counter()
        for step, batch in enumerate(self._batches[self.config["warmup"] :], 1):
            self._measure_step(step, batch, measured)
        self._synchronize()
        measured.elapsed_sec = time.perf_counter() - began_s
        return measured

    def _measure_step(self, step: int, batch: torch.Tensor, measured: _Measured) -> None:
        self._hashes.begin(step)
        with measured.timer.step():
            if self._fault.slows(step, self._rank):
                self._delay()
            loss, norm = self._train_step(step, batch)
        measured.losses.append(loss if self._mesh.counts_loss else torch.zeros_like(loss))
        # Without clipping the step needs no norm, so it is not timed.
        measured.grad_norms.append(self._total_norm() if norm is None else norm)
        self._fault.after_step(step, self._rank, self._model)
        self._hashes.end(step)

    def _total_norm(self) -> torch.Tensor:
        return self._stages.norm(total_norm(self._model))

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _metrics(self, step_time_s: float, grad_norm_last: float) -> dict[str, float]:
        metrics = {
            "tokens_per_s": self._tokens_per_step
            * self.config["steps"]
            / self._degrees.ranks_per_sequence
            / step_time_s,
            "num_parameters": float(self._num_parameters),
            "grad_norm_last": grad_norm_last,
        }
        if self._device.type == "cuda":
            metrics["peak_memory_bytes"] = float(torch.cuda.max_memory_allocated(self._device))
            metrics["peak_memory_reserved_bytes"] = float(torch.cuda.max_memory_reserved(self._device))
        return metrics


def _sum_over_ranks(losses: list[torch.Tensor]) -> list[float]:
    """Each step's global loss, from every rank's part of it."""
    summed = torch.stack(losses)
    dist.all_reduce(summed)
    return [float(loss) for loss in summed.tolist()]


def _use_deterministic_algorithms(device: torch.device) -> None:
    # Read when the first cuBLAS handle is made, which is after setup().
    given = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _DETERMINISTIC_CUBLAS[0])
    if device.type == "cuda" and torch.version.cuda and given not in _DETERMINISTIC_CUBLAS:
        raise RuntimeError(
            f"deterministic is true and CUBLAS_WORKSPACE_CONFIG is {given!r}: cuBLAS is deterministic only with "
            f"one of {_DETERMINISTIC_CUBLAS}; unset it or set one of them"
        )
    torch.use_deterministic_algorithms(True)
