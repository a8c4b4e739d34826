"""The config keys that ``llama_fsdp2`` and ``llama_simple_fsdp`` share, as typed values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch

from ..common.learning_rate import LearningRateSchedule
from .faults import Fault
from .model.attention import AUTO
from .model.decoder import LlamaConfig
from .parallel.communication import CommunicationSettings, turn_off_multicast
from .parallel.mesh import AxisDegrees, ParallelDims


@dataclass(frozen=True)
class HashSettings:
    """The keys that choose the hashed tensors and the steps in which they are hashed."""

    hash_every: int
    hash_tensors: tuple[str, ...]
    hash_tensors_step: int | None
    hash_operators_step: int | None

    @property
    def boundaries(self) -> list[str]:
        """Return the kinds that modules' inputs and outputs are hashed for, which are passes of a step."""
        return [kind for kind in self.hash_tensors if kind in ("forward", "backward")]


@dataclass(frozen=True)
class CheckpointSettings:
    """The folders that weights and optimizer state are saved to and loaded from."""

    save_checkpoint: str | None
    load_checkpoint: str | None

    def check(self) -> None:
        """Check the folders before anything is trained.

        Raises:
            ValueError: A path is relative, the folder to save to holds files, or there is nothing to load.
        """
        save, load = self.save_checkpoint, self.load_checkpoint
        for key, given in (("save_checkpoint", save), ("load_checkpoint", load)):
            if given is not None and not Path(given).is_absolute():
                raise ValueError(
                    f"{key} is {given!r}, a relative path; ranks may run in any folder, so allowed are absolute"
                )
        if save is not None and Path(save).exists() and (not Path(save).is_dir() or any(Path(save).iterdir())):
            raise ValueError(f"save_checkpoint is {save!r}, which exists already; allowed is a new or an empty folder")
        if load is not None and not (Path(load) / ".metadata").is_file():
            raise ValueError(
                f"load_checkpoint is {load!r}, which holds no complete checkpoint: the file .metadata is missing"
            )


@dataclass(frozen=True)
class MemorySettings:
    """The memory that ``activation_checkpointing: auto`` may fill on each rank."""

    memory_fraction: float
    memory_budget_bytes: int | None


@dataclass(frozen=True)
class LlamaSettings:
    """The keys that both workloads have.

    ``model``, ``degrees``, ``communication``, ``hashing``, ``checkpoint`` and ``memory`` group keys of the config;
    ``lr_schedule`` and ``fault`` are blocks.
    """

    size: str
    steps: int
    warmup: int
    profile_steps: int
    model: LlamaConfig
    seq_len: int
    batch_size: int
    gradient_accumulation: int
    degrees: AxisDegrees
    pipeline_parallel_schedule: str
    communication: CommunicationSettings
    param_dtype: torch.dtype
    float8_linear: bool
    float8_recipe: str
    reduce_dtype: torch.dtype
    compile_loss: bool
    loss_chunks: int
    max_grad_norm: float | None
    lr: float
    betas: tuple[float, float]
    weight_decay: float
    lr_schedule: LearningRateSchedule
    optimizer_fused: bool | None
    deterministic: bool
    fill_uninitialized_memory: bool
    seed: int
    hashing: HashSettings
    checkpoint: CheckpointSettings
    memory: MemorySettings
    fault: Fault

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of one step on one data-parallel rank."""
        return self.gradient_accumulation * self.batch_size * self.seq_len

    @property
    def returns_loss(self) -> bool:
        """Return whether the model computes its loss, so that nothing outside of it has logits."""
        return self.loss_chunks > 0

    @property
    def chooses_checkpointing(self) -> bool:
        """Return whether activation checkpointing is chosen in setup, by the memory that steps need."""
        return self.model.activation_checkpointing == AUTO

    @property
    def has_memory_choices(self) -> bool:
        """Return whether setup makes a choice by the memory that steps need."""
        return self.chooses_checkpointing or self.communication.unsharded_blocks is None

    def check(self) -> None:
        """Raise ValueError if a key contradicts another one, whatever the world's size."""
        if self.fill_uninitialized_memory and not self.deterministic:
            raise ValueError(
                "fill_uninitialized_memory is true and deterministic is false: torch fills new tensors only under "
                "deterministic algorithms; use both or neither"
            )
        if self.float8_recipe != "tensorwise" and not self.float8_linear:
            raise ValueError(
                f"float8_recipe is {self.float8_recipe!r} and float8_linear is false: nothing is computed in float8; "
                f"set float8_linear"
            )
        if self.loss_chunks and (degree := self.degrees.pipeline_parallel_degree) > 1:
            raise ValueError(
                f"loss_chunks is {self.loss_chunks} and pipeline_parallel_degree is {degree}: torch computes the loss "
                f"from the logits of the last stage; allowed is loss_chunks 0"
            )
        if (budget := self.memory.memory_budget_bytes) is not None and not self.has_memory_choices:
            raise ValueError(
                f"memory_budget_bytes is {budget}, activation_checkpointing is "
                f"{self.model.activation_checkpointing!r} and unsharded_blocks is "
                f"{self.communication.unsharded_blocks}: only auto and null keep to a budget"
            )
        if self.communication.unsharded_blocks is None and self.degrees.pipeline_parallel_degree > 1:
            raise ValueError(
                f"unsharded_blocks is null and pipeline_parallel_degree is {self.degrees.pipeline_parallel_degree}: "
                f"stages may have different numbers of blocks; give a number"
            )
        self.checkpoint.check()
        self.lr_schedule.check()

    def with_unsharded_blocks(self, number: int) -> Self:
        """Return the same settings with the number of blocks that keep gathered parameters."""
        return replace(self, communication=replace(self.communication, unsharded_blocks=number))

    @property
    def fuses_blocks(self) -> bool:
        """Return whether inductor compiles blocks."""
        return False

    def with_kernels(self, attention: str) -> Self:
        """Return the same settings with a kernel of attention, and a form of rotary positions in place of ``auto``."""
        rotary = self.model.rotary
        if rotary == AUTO:
            rotary = "real" if self.fuses_blocks else "complex"
        return replace(self, model=replace(self.model, attention=attention, rotary=rotary))

    def check_degrees(self, degrees: ParallelDims) -> None:
        """Raise ValueError if keys that only one workload has contradict ``degrees``."""

    @property
    def uses_symmetric_memory(self) -> bool:
        """Return whether ranks map memory of each other's GPUs."""
        return self.communication.async_tensor_parallel

    def prepare_environment(self) -> None:
        """Set the variables that libraries read when the process group is made."""
        if self.uses_symmetric_memory:
            turn_off_multicast()
