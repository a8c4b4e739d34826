"""The config keys that ``llama_fsdp2`` and ``llama_simple_fsdp`` share, as typed values, and their checks."""

import os
from dataclasses import dataclass, replace
from typing import Self

import torch

from .common.faults import LlamaFault
from .common.settings import HashSettings, TrainingSettings
from .models.common.attention import AUTO
from .models.config import ModelConfig


@dataclass(frozen=True)
class MemorySettings:
    """The memory that ``activation_checkpointing: auto`` may fill on each rank."""

    memory_fraction: float
    memory_budget_bytes: int | None


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


@dataclass(frozen=True)
class AxisDegrees:
    """The config keys of the axes: the number of ranks that share the work of each."""

    data_parallel_replicate_degree: int = 1
    pipeline_parallel_degree: int = 1
    context_parallel_degree: int = 1
    tensor_parallel_degree: int = 1
    expert_parallel_degree: int = 1


@dataclass(frozen=True)
class LlamaSettings(TrainingSettings):
    """The keys that both workloads have; ``model``, ``degrees``, ``hashing`` and ``memory`` group several keys."""

    size: str
    model: ModelConfig
    activation_checkpointing: str
    seq_len: int
    degrees: AxisDegrees
    pipeline_parallel_schedule: str
    blocks_per_bucket: int
    async_tensor_parallel: bool
    param_dtype: torch.dtype
    float8_linear: bool
    float8_recipe: str
    float8_output: bool
    reduce_dtype: torch.dtype
    compile_loss: bool
    loss_chunks: int
    optimizer: str
    fill_uninitialized_memory: bool
    hashing: HashSettings
    memory: MemorySettings
    fault: LlamaFault

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of one step on one data-parallel rank."""
        return self.gradient_accumulation * self.batch_size * self.seq_len

    @property
    def returns_loss(self) -> bool:
        """Return whether the model computes its loss, so that nothing outside of it has logits."""
        return self.loss_chunks > 0

    @property
    def holds_logits(self) -> bool:
        """Return whether the logits that the model returns exist beside the activations of the loss."""
        return False

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
        return self.async_tensor_parallel

    def prepare_environment(self) -> None:
        """Set the variables that libraries read when the process group is made."""
        if self.uses_symmetric_memory:
            os.environ.update(_WITHOUT_MULTICAST)
        elif torch.version.cuda and not any(name in os.environ for name in _ALLOCATOR):
            # Read at the first allocation. Segments that grow fit blocks of every size, so less memory is reserved.
            os.environ[_ALLOCATOR[0]] = "expandable_segments:True"


# NVLink multicast is off wherever symmetric memory is used: a fault in it can take all GPUs of a host out of service.
_WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
# Settings of the allocator of CUDA, and their older name.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
