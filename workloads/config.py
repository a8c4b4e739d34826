"""The config keys that ``llama_fsdp2`` and ``llama_simple_fsdp`` share, as typed values, and their checks."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Self

import torch

from .common.faults import Fault
from .common.learning_rate import LearningRateSchedule
from .models.common.attention import AUTO
from .models.config import ModelConfig


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


@dataclass(frozen=True)
class GraphSettings:
    """The keys that decide how the traced model is compiled."""

    backend: str
    bucketing: str
    bucket_modules: tuple[str, ...]
    bucket_order: str
    reshard_after_forward: bool
    overlap_reorder: bool
    overlap_reorder_modules: tuple[str, ...] = ()
    disable_passes: tuple[str, ...] = ()
    dump_graphs: str | None = None
    trace: str = "model"
    cuda_graphs: bool = False

    @property
    def traces_step(self) -> bool:
        """Return whether forward, loss and backward are one graph."""
        return self.trace == "step"

    @property
    def has_graph_pass(self) -> bool:
        """Return whether collectives of the traced graphs are moved or merged."""
        return self.bucketing != "none" or self.overlap_reorder


@dataclass(frozen=True)
class LlamaSettings:
    """The keys that both workloads have.

    ``model``, ``degrees``, ``communication``, ``hashing`` and ``checkpoint`` group keys of the config; ``lr_schedule``
    and ``fault`` are blocks.
    """

    size: str
    steps: int
    warmup: int
    profile_steps: int
    model: ModelConfig
    activation_checkpointing: str
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
    def fuses_blocks(self) -> bool:
        """Return whether inductor compiles blocks."""
        return False

    def with_kernels(self, attention: str) -> Self:
        """Return the same settings with a kernel of attention, and a form of rotary positions in place of ``auto``."""
        rotary = self.model.rotary
        if rotary == AUTO:
            rotary = "real" if self.fuses_blocks else "complex"
        return replace(self, model=replace(self.model, attention=attention, rotary=rotary))

    @property
    def uses_symmetric_memory(self) -> bool:
        """Return whether ranks map memory of each other's GPUs."""
        return self.communication.async_tensor_parallel

    def prepare_environment(self) -> None:
        """Set the variables that libraries read when the process group is made."""
        if self.uses_symmetric_memory:
            turn_off_multicast()


@dataclass(frozen=True)
class AxisDegrees:
    """The config keys of the axes: the number of ranks that share the work of each."""

    data_parallel_replicate_degree: int = 1
    pipeline_parallel_degree: int = 1
    context_parallel_degree: int = 1
    tensor_parallel_degree: int = 1
    expert_parallel_degree: int = 1


# NVLink multicast is off wherever symmetric memory is used: a fault in it can take all GPUs of a host out of service.
_WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


@dataclass(frozen=True)
class Bucket:
    """Consecutive blocks, by number from 0, whose parameters share a collective.

    Attributes:
        blocks: the numbers of the blocks.
        reshard_after_forward: whether gathered parameters are freed between forward and backward.
    """

    blocks: range
    reshard_after_forward: bool


@dataclass(frozen=True)
class CommunicationSettings:
    """The keys of collectives, which each workload implements in its own way."""

    blocks_per_bucket: int = 1
    no_reshard_blocks: int = 0
    async_tensor_parallel: bool = False

    def buckets(self, num_blocks: int, *, reshard_after_forward: bool) -> list[Bucket]:
        """Divide ``num_blocks`` blocks, those of the model or of this rank's stage; the last bucket may be smaller.

        The last ``no_reshard_blocks`` of them, which backward begins with, keep their gathered parameters.

        Raises:
            ValueError: ``no_reshard_blocks`` is more than all blocks, or not a number of whole buckets.
        """
        size, num_kept = self.blocks_per_bucket, self.no_reshard_blocks
        starts, first_kept = range(0, num_blocks, size), num_blocks - num_kept
        if num_kept not in (allowed := [0, *(num_blocks - start for start in reversed(starts))]):
            raise ValueError(
                f"no_reshard_blocks is {num_kept}, and {num_blocks} blocks are divided into buckets of "
                f"blocks_per_bucket {size}; whole buckets are kept, so allowed are {allowed}"
            )
        return [
            Bucket(range(start, min(start + size, num_blocks)), reshard_after_forward and start < first_kept)
            for start in starts
        ]


def turn_off_multicast() -> None:
    """Turn NVLink multicast off in NCCL and in torch's symmetric memory; call before the process group is made."""
    os.environ.update(_WITHOUT_MULTICAST)
