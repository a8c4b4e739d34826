"""Training of the Llama workloads; a subclass shards the model."""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import chain, repeat
from typing import Any, TypeVar

import torch

from pytest_aorta.worker import Delay, RankResult, drop_data

from .common.torch_private import dynamo_config
from .config import LlamaSettings
from .distributed.activation_checkpoint import checkpoint_blocks, describe
from .distributed.context import key_lengths, own_positions
from .distributed.expert import balance_experts
from .distributed.memory import Decision, Gathering, decide, estimate, own_budget
from .distributed.parallel_dims import ParallelDims, ParallelMesh
from .distributed.parallelize import parallelize
from .distributed.pipeline import Pipeline, Stages
from .hashing import StepHashes
from .models import build_model
from .models.common.attention import AUTO, AttentionInputs, choose_kernel
from .models.common.chunked_loss import make_fused, summed_cross_entropy
from .models.common.data import initialize, sequences
from .models.common.decoder import Decoder
from .models.common.float8 import check_float8
from .models.flops import throughput_metrics
from .training import TrainingWorkload

_Settings = TypeVar("_Settings", bound=LlamaSettings)


class LlamaWorkload(TrainingWorkload[_Settings]):
    """Trains a Llama-3 shaped model on synthetic tokens."""

    @abstractmethod
    def shard(self, model: Decoder, mesh: ParallelMesh) -> None:
        """Shard the parameters of ``model``, which is on the meta device, over the data-parallel axes of ``mesh``."""

    @abstractmethod
    def gathering(self, model: Decoder) -> Gathering:
        """Return how blocks are compiled and parameters gathered, for an estimate of memory."""

    def prepare(self, model: Decoder) -> None:
        """Change an allocated and initialized model, that of a stage if there are several; nothing by default."""

    def before_micro_batch(self, *, is_last: bool) -> None:
        """Prepare the backward pass of one micro-batch of a step; nothing by default."""

    @property
    def reduces_every_micro_batch(self) -> bool:
        """True if the backward pass of every micro-batch reduces gradients, not only the last of a step."""
        return True

    def check(self) -> None:
        """Raise ValueError if the degrees do not divide the world, and RuntimeError if float8 can't be computed."""
        self._degrees = ParallelDims.of_world(self._settings.degrees, self._env.world_size)
        if self._settings.float8_linear:
            check_float8(self._device)

    def build(self) -> Decoder:
        """Return this rank's part of the model."""
        self._delay = Delay(self._device, self._settings.fault.delay_ms)
        self._mesh = ParallelMesh(self._degrees, self._device.type)
        self._stages, self._counts_loss = Stages(self._mesh), self._mesh.counts_loss
        settings = self._settings = self._settings.with_kernels(self._choose_attention())
        self._decision = self._decide() if settings.activation_checkpointing == AUTO else None
        self._num_global_tokens = settings.tokens_per_step * self._degrees.data_parallel
        self._loss = make_fused(summed_cross_entropy) if settings.compile_loss else summed_cross_entropy
        config = settings.model
        # Sharded on the meta device; then only this rank's shards are allocated and filled.
        with torch.device("meta"):
            model = build_model(config)
        model.output.num_chunks, model.output.fused = settings.loss_chunks, settings.compile_loss
        self._num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self._parts = parallelize(model, self._mesh, settings)
        same = (settings.activation_checkpointing,) * config.n_layers
        checkpoint_blocks(model, same if self._decision is None else self._decision.kinds)
        for part in self._parts:
            self.shard(part, self._mesh)
        drop_data()
        model.to_empty(device=self._device)
        initialize(model, config.n_layers, settings.seed)
        for part in self._parts:
            self.prepare(part)
        return model

    def run(self) -> RankResult:
        """Train; graphs hold as symbols how many tokens ranks exchange, which they read on the host."""
        symbols = dynamo_config.patch(capture_scalar_outputs=True) if self._mesh.experts is not None else nullcontext()
        with symbols:
            return super().run()

    def make_hashes(self) -> StepHashes:
        """Return the hashes of the whole model, whose stages are on several ranks."""
        return StepHashes(self._settings, self._model, self._optimizer, self._settings.hashing, self._stages)

    def samples_of(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the inputs and labels of each sequence."""
        return batch.transpose(1, 2).flatten(0, 1)

    def make_batches(self, trained_steps: int) -> Iterator[torch.Tensor]:
        """Make every step's tokens ``[micro-batch, inputs or labels, sequence, token]``, and the pipeline."""
        settings = self._settings
        positions = own_positions(settings.seq_len, self._degrees.context_parallel, self._mesh.context_rank)
        steps = range(trained_steps, trained_steps + settings.warmup + settings.steps)
        self._batches = [self._batch(step, positions).to(self._device) for step in steps]
        self._freqs_cis = settings.model.freqs_cis(positions.to(self._device))
        self._pipeline = None
        if self._mesh.pipeline is not None:
            given = self._parts, self._mesh, settings, self._freqs_cis, self._global_loss
            self._pipeline = Pipeline(*given, reduce_every_micro_batch=self.reduces_every_micro_batch)
        # Profiled steps train on the last batch again.
        return chain(self._batches, repeat(self._batches[-1]))

    @property
    def is_same_on_any_cpu(self) -> bool:
        """True if CPU ranks compute the same bits on CPUs of every vendor."""
        # Unfused AdamW takes square roots from MKL, which rounds them differently on another vendor's CPU.
        settings = self._settings
        return settings.optimizer == "fused" and not (settings.fuses_blocks or settings.compile_loss)

    def facts(self) -> dict[str, Any]:
        """Return the kernel of attention, and the chosen activation checkpointing."""
        chosen = {} if self._decision is None else {"activation_checkpointing": describe(self._decision.kinds)}
        return {"attention": self._settings.model.attention} | chosen

    def _decide(self) -> Decision:
        """Choose the activation checkpointing by the memory that a step needs; collective."""
        settings = self._settings
        budget = own_budget(settings.memory, self._device)
        with torch.device("meta"):
            gathering = self.gathering(build_model(settings.model))
        step = estimate(settings, self._mesh, self._device, gathering)
        decision = decide(step, settings.model.n_layers, budget, self._device)
        if self._env.rank == 0:
            print(decision, flush=True)
        return decision

    def _choose_attention(self) -> str:
        """Return the kernel of attention for the heads and positions that this rank computes."""
        settings, model, degrees = self._settings, self._settings.model, self._degrees
        num_keys = key_lengths(settings.seq_len, degrees.context_parallel, self._mesh.context_rank)
        inputs = AttentionInputs(
            batch_size=settings.batch_size,
            num_heads=model.n_heads // degrees.tensor_parallel,
            num_kv_heads=model.num_key_heads // degrees.tensor_parallel,
            num_queries=settings.seq_len // degrees.context_parallel // len(num_keys),
            num_keys=num_keys,
            head_dim=model.key_dim,
            dtype=settings.param_dtype,
            device=self._device,
        )
        return choose_kernel(model.attention, inputs, deterministic=settings.deterministic)

    def _batch(self, step: int, positions: torch.Tensor) -> torch.Tensor:
        settings, num_ranks, rank = self._settings, self._degrees.data_parallel, self._mesh.data_rank
        firsts = [(number * num_ranks + rank) * settings.batch_size for number in range(settings.gradient_accumulation)]
        indices = [index for first in firsts for index in range(first, first + settings.batch_size)]
        tokens = sequences(settings.seed, step, indices, settings.seq_len, settings.model.vocab_size)
        micro_batches = tokens.unflatten(0, (-1, settings.batch_size))
        return torch.stack([micro_batches[..., positions], micro_batches[..., positions + 1]], dim=1)

    def make_gradients(self, step: int, batch: torch.Tensor) -> torch.Tensor:
        """Add the gradients of all micro-batches, one after another, and return the sum of their losses."""
        if self._settings.fault.slows(step, self._env.rank):
            self._delay()
        if self._pipeline is not None:
            return self._pipeline.step(batch)
        gradient_scale = self._settings.fault.gradient_scale(step, self._env.rank)
        loss = torch.zeros((), device=self._device)
        for number, tokens in enumerate(batch, 1):
            self.before_micro_batch(is_last=number == len(batch))
            loss += self._backward(tokens, gradient_scale)
        return loss

    def _train_step(self, step: int, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run one optimizer step, and balance the loads of experts."""
        found = super()._train_step(step, batch)
        if (coefficient := self._settings.model.mixture.load_balance_coeff) is not None:
            balance_experts(self._model, self._mesh, coefficient)
        return found

    def _backward(self, tokens: torch.Tensor, gradient_scale: float) -> torch.Tensor:
        """Add one micro-batch's gradients and return its loss."""
        inputs, labels = tokens
        if self._settings.returns_loss:
            loss: torch.Tensor = self._hashes.forward(inputs, self._freqs_cis, labels, self._num_global_tokens)
        else:
            # The logits are not bound to a name, which would keep them in memory through backward.
            loss = self._global_loss(self._hashes.forward(inputs, self._freqs_cis), labels)
        loss.backward(torch.full_like(loss, gradient_scale))
        return loss.detach()

    def _global_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return one micro-batch's part of the step's loss: a sum over tokens divided by the global batch's count."""
        return self._loss(logits, labels) / self._num_global_tokens

    def _total_norm(self) -> torch.Tensor:
        return self._stages.norm(super()._total_norm())

    def _metrics(self, step_time_s: float, grad_norms: list[float]) -> dict[str, float]:
        settings, metrics = self._settings, super()._metrics(step_time_s, grad_norms)
        tokens_per_s = settings.tokens_per_step * settings.steps / self._degrees.ranks_per_sequence / step_time_s
        metrics["tokens_per_s"] = tokens_per_s
        if grad_norms:
            metrics["grad_norm_last"] = grad_norms[-1]
        metrics |= throughput_metrics(
            settings.model, settings.seq_len, settings.param_dtype, tokens_per_s, self._device
        )
        if (made := self._decision) is not None:
            metrics |= {"memory_estimate_bytes": float(made.estimate), "memory_budget_bytes": float(made.budget)}
        if self._device.type != "cpu":
            metrics["peak_memory_reserved_bytes"] = float(torch.accelerator.max_memory_reserved(self._device))
        return metrics
