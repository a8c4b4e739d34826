"""Training of the Llama workloads, which shard the model in different ways."""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import chain, repeat
from typing import Any, TypeVar

import torch
from torch.distributed.fsdp import FSDPModule

from pytest_aorta.worker import RankResult, drop_data

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
    """Trains a Llama-3 shaped model on synthetic tokens; an implementation has three functions."""

    @staticmethod
    @abstractmethod
    def shard(model: Decoder, mesh: ParallelMesh, settings: _Settings) -> None:
        """Shard the parameters of ``model``, which is on the meta device, over the data-parallel axes of ``mesh``."""

    @staticmethod
    @abstractmethod
    def gathering(model: Decoder, mesh: ParallelMesh, settings: _Settings) -> Gathering:
        """Return how blocks are compiled and parameters gathered, for an estimate of memory."""

    @staticmethod
    def compile(model: Decoder, mesh: ParallelMesh, settings: _Settings) -> None:
        """Compile an allocated and initialized model, that of a stage if there are several; nothing by default."""

    def check(self) -> None:
        """Raise ValueError if the degrees do not divide the world, and RuntimeError if float8 can't be computed."""
        self.degrees = ParallelDims.of_world(self.settings.degrees, self.env.world_size)
        if self.settings.float8_linear:
            check_float8(self.device)

    def build(self) -> Decoder:
        """Return this rank's part of the model."""
        self.mesh = ParallelMesh(self.degrees, self.device.type)
        self._stages, self.counts_loss = Stages(self.mesh), self.mesh.counts_loss
        settings = self.settings = self.settings.with_kernels(self._choose_attention())
        self.decision = self._decide() if settings.activation_checkpointing == AUTO else None
        self._num_global_tokens = settings.tokens_per_step * self.degrees.data_parallel
        self._loss = make_fused(summed_cross_entropy) if settings.compile_loss else summed_cross_entropy
        config = settings.model
        # Sharded on the meta device; then only this rank's shards are allocated and filled.
        with torch.device("meta"):
            model = build_model(config)
        model.output.num_chunks, model.output.fused = settings.loss_chunks, settings.compile_loss
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self._parts = parallelize(model, self.mesh, settings)
        same = (settings.activation_checkpointing,) * config.n_layers
        checkpoint_blocks(model, same if self.decision is None else self.decision.kinds)
        for part in self._parts:
            self.shard(part, self.mesh, settings)
        drop_data()
        model.to_empty(device=self.device)
        initialize(model, config.n_layers, settings.seed)
        for part in self._parts:
            self.compile(part, self.mesh, settings)
        return model

    def run(self) -> RankResult:
        """Train; graphs hold as symbols how many tokens ranks exchange, which they read on the host."""
        symbols = dynamo_config.patch(capture_scalar_outputs=True) if self.mesh.experts is not None else nullcontext()
        with symbols:
            return super().run()

    def make_hashes(self) -> StepHashes:
        """Return the hashes of the whole model, whose stages are on several ranks."""
        self._forward = self.fault.around(self.model)
        return StepHashes(self.settings, self.model, self.optimizer, self.settings.hashing, self._stages)

    def samples_of(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the inputs and labels of each sequence."""
        return batch.transpose(1, 2).flatten(0, 1)

    def make_batches(self, trained_steps: int) -> Iterator[torch.Tensor]:
        """Make every step's tokens ``[micro-batch, inputs or labels, sequence, token]``, and the pipeline."""
        settings = self.settings
        positions = own_positions(settings.seq_len, self.degrees.context_parallel, self.mesh.context_rank)
        steps = range(trained_steps, trained_steps + settings.warmup + settings.steps)
        batches = [self._batch(step, positions).to(self.device) for step in steps]
        self._freqs_cis = settings.model.freqs_cis(positions.to(self.device))
        self._pipeline = None
        if self.mesh.pipeline is not None:
            given = self._parts, self.mesh, settings, self._freqs_cis, self._global_loss
            self._pipeline = Pipeline(*given, reduce_every_micro_batch=settings.reduces_every_micro_batch)
        # Profiled steps train on the last batch again.
        return chain(batches, repeat(batches[-1]))

    @property
    def is_same_on_any_cpu(self) -> bool:
        """True if CPU ranks compute the same bits on CPUs of every vendor."""
        # Unfused AdamW takes square roots from MKL, which rounds them differently on another vendor's CPU.
        settings = self.settings
        return settings.optimizer == "fused" and not (settings.fuses_blocks or settings.compile_loss)

    def facts(self) -> dict[str, Any]:
        """Return the kernel of attention, and the chosen activation checkpointing."""
        chosen = {} if self.decision is None else {"activation_checkpointing": describe(self.decision.kinds)}
        return {"attention": self.settings.model.attention} | chosen

    def _decide(self) -> Decision:
        """Choose the activation checkpointing by the memory that a step needs; collective."""
        settings = self.settings
        budget = own_budget(settings.memory, self.device)
        with torch.device("meta"):
            gathering = self.gathering(build_model(settings.model), self.mesh, settings)
        step = estimate(settings, self.mesh, self.device, gathering)
        decision = decide(step, settings.model.n_layers, budget, self.device)
        if self.env.rank == 0:
            print(decision, flush=True)
        return decision

    def _choose_attention(self) -> str:
        """Return the kernel of attention for the heads and positions that this rank computes."""
        settings, model, degrees = self.settings, self.settings.model, self.degrees
        num_keys = key_lengths(settings.seq_len, degrees.context_parallel, self.mesh.context_rank)
        inputs = AttentionInputs(
            batch_size=settings.batch_size,
            num_heads=model.n_heads // degrees.tensor_parallel,
            num_kv_heads=model.num_key_heads // degrees.tensor_parallel,
            num_queries=settings.seq_len // degrees.context_parallel // len(num_keys),
            num_keys=num_keys,
            head_dim=model.key_dim,
            dtype=settings.param_dtype,
            device=self.device,
        )
        return choose_kernel(model.attention, inputs, deterministic=settings.deterministic)

    def _batch(self, step: int, positions: torch.Tensor) -> torch.Tensor:
        settings, num_ranks, rank = self.settings, self.degrees.data_parallel, self.mesh.data_rank
        firsts = [(number * num_ranks + rank) * settings.batch_size for number in range(settings.gradient_accumulation)]
        indices = [index for first in firsts for index in range(first, first + settings.batch_size)]
        tokens = sequences(settings.seed, step, indices, settings.seq_len, settings.model.vocab_size)
        micro_batches = tokens.unflatten(0, (-1, settings.batch_size))
        return torch.stack([micro_batches[..., positions], micro_batches[..., positions + 1]], dim=1)

    def make_gradients(self, batch: torch.Tensor) -> torch.Tensor:
        """Add the gradients of all micro-batches, one after another, and return the sum of their losses."""
        if self._pipeline is not None:
            return self._pipeline.step(batch)
        total = torch.zeros((), device=self.device)
        for number, (inputs, labels) in enumerate(batch, 1):
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(number == len(batch) or self.settings.reduces_every_micro_batch)
            if self.settings.returns_loss:
                loss = self._forward(inputs, self._freqs_cis, labels, self._num_global_tokens)
            else:
                # The logits are not bound to a name, which would keep them in memory through backward.
                loss = self._global_loss(self._forward(inputs, self._freqs_cis), labels)
            loss.backward(torch.full_like(loss, 1.0))
            total += loss.detach()
        return total

    def after_step(self) -> None:
        """Balance the loads of experts."""
        if (coefficient := self.settings.model.mixture.load_balance_coeff) is not None:
            balance_experts(self.model, self.mesh, coefficient)

    def _global_loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return one micro-batch's part of the step's loss: a sum over tokens divided by the global batch's count."""
        return self._loss(logits, labels) / self._num_global_tokens

    def total_norm(self) -> torch.Tensor:
        """Return the 2-norm of the gradients of all stages."""
        return self._stages.norm(super().total_norm())

    def metrics(self, step_time_s: float, grad_norms: list[float]) -> dict[str, float]:
        """Return throughput and memory besides the metrics of every training."""
        settings, metrics = self.settings, super().metrics(step_time_s, grad_norms)
        tokens_per_s = settings.tokens_per_step * settings.steps / self.degrees.ranks_per_sequence / step_time_s
        metrics["tokens_per_s"] = tokens_per_s
        if grad_norms:
            metrics["grad_norm_last"] = grad_norms[-1]
        metrics |= throughput_metrics(settings.model, settings.seq_len, settings.param_dtype, tokens_per_s, self.device)
        if (made := self.decision) is not None:
            metrics |= {"memory_estimate_bytes": float(made.estimate), "memory_budget_bytes": float(made.budget)}
        if self.device.type != "cpu":
            metrics["peak_memory_reserved_bytes"] = float(torch.accelerator.max_memory_reserved(self.device))
        return metrics
