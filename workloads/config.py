"""The config keys that ``llama_fsdp2`` and ``llama_simple_fsdp`` share, as typed values, and their checks."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch

from .common.faults import LlamaFault
from .common.rules import Rule
from .common.settings import HashSettings, TrainingSettings
from .models.common.attention import AUTO
from .models.config import MixtureConfig, ModelConfig


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
    def reduces_every_micro_batch(self) -> bool:
        """Return whether the backward pass of every micro-batch reduces gradients, not only the last of a step."""
        return True

    @property
    def holds_logits(self) -> bool:
        """Return whether the logits that the model returns exist beside the activations of the loss."""
        return False

    @property
    def fuses_blocks(self) -> bool:
        """Return whether inductor compiles blocks."""
        return False

    @property
    def is_zero_bubble(self) -> bool:
        """Return whether gradients of weights are computed where a rank would wait."""
        return self.pipeline_parallel_schedule == "ZBVZeroBubble"

    def rules(self, device: str, ranks: int) -> Iterator[Rule]:
        """Yield the combinations of keys that a launch of ``ranks`` on ``device`` refuses."""
        model, degrees = self.model, self.degrees
        num_stages = degrees.pipeline_parallel_degree * (1 if self.pipeline_parallel_schedule == "1F1B" else 2)
        yield (
            "n_heads n_kv_heads",
            model.n_heads % model.n_kv_heads,
            "equal groups of query heads share heads of keys",
        )
        yield (
            "dim n_heads",
            model.dim % (2 * model.n_heads),
            "rotary positions turn pairs; use a multiple of 2 x n_heads",
        )
        yield (
            "kv_lora_rank q_lora_rank qk_rope_head_dim",
            not model.latent.kv_lora_rank and (model.latent.q_lora_rank or model.latent.qk_rope_head_dim),
            "grouped-query attention has neither",
        )
        yield (
            "kv_lora_rank qk_rope_head_dim",
            model.latent.kv_lora_rank and (model.latent.qk_rope_head_dim % 2 or not model.latent.qk_rope_head_dim),
            "latent attention rotates pairs; allowed are multiples of 2, from 2 on",
        )
        yield (
            "kv_lora_rank float8_linear",
            model.latent.kv_lora_rank and self.float8_linear,
            "its projections are not converted",
        )
        # Axes
        yield (
            "context_parallel_degree seq_len",
            degrees.context_parallel_degree > 1 and self.seq_len % (2 * degrees.context_parallel_degree),
            "each rank takes two chunks; seq_len is a multiple of 2 x context_parallel_degree",
        )
        parts = {
            "n_heads": model.n_heads,
            "n_kv_heads": model.n_kv_heads,
            "ffn_hidden": model.ffn_hidden,
            "moe_inter_dim": model.mixture.moe_inter_dim or 0,
            "vocab_size": model.vocab_size,
        }
        evenly = "ranks of tensor parallelism split it evenly; use a multiple"
        for key, size in parts.items():
            yield f"tensor_parallel_degree {key}", size % degrees.tensor_parallel_degree, evenly
        yield (
            "tensor_parallel_degree context_parallel_degree seq_len",
            self.seq_len // degrees.context_parallel_degree % degrees.tensor_parallel_degree,
            "ranks of tensor parallelism split a rank's positions evenly; use a multiple",
        )
        yield (
            "async_tensor_parallel tensor_parallel_degree",
            self.async_tensor_parallel and degrees.tensor_parallel_degree == 1,
            "no activations are exchanged; use a degree of 2 or more",
        )
        yield (
            "async_tensor_parallel device",
            self.async_tensor_parallel and device != "cuda",
            "divided products write into memory of other GPUs",
        )
        # Pipelines
        yield (
            "pipeline_parallel_schedule pipeline_parallel_degree",
            self.pipeline_parallel_schedule != "1F1B" and degrees.pipeline_parallel_degree == 1,
            "there are no stages; use a degree of 2 or more",
        )
        yield (
            "pipeline_parallel_degree pipeline_parallel_schedule n_layers",
            degrees.pipeline_parallel_degree > 1 and num_stages > model.n_layers,
            "each stage holds at least one block; 1F1B has a stage per rank, the others have two",
        )
        yield (
            "pipeline_parallel_degree gradient_accumulation",
            self.gradient_accumulation < degrees.pipeline_parallel_degree,
            "a schedule takes at least as many micro-batches as ranks",
        )
        yield (
            "pipeline_parallel_schedule pipeline_parallel_degree gradient_accumulation",
            (
                self.pipeline_parallel_schedule == "Interleaved1F1B"
                and self.gradient_accumulation % (self.gradient_accumulation // degrees.pipeline_parallel_degree)
            ),
            "micro-batches // ranks is the number of rounds, which have equally many micro-batches",
        )
        yield (
            "pipeline_parallel_schedule activation_checkpointing",
            self.is_zero_bubble and self.activation_checkpointing in ("elementwise", "selective"),
            "a saved tensor would be read twice, which torch does not allow; use none or full",
        )
        yield (
            "pipeline_parallel_schedule activation_checkpointing",
            self.pipeline_parallel_schedule != "1F1B" and self.activation_checkpointing == "auto",
            "memory is estimated for 1F1B only; name a kind",
        )
        yield (
            "pipeline_parallel_degree fault",
            degrees.pipeline_parallel_degree > 1 and self.fault.kind == "drop_gradient",
            "gradients are dropped at the loss, and only the last stage has a loss",
        )
        # Experts
        yield (
            "expert_parallel_degree num_experts",
            degrees.expert_parallel_degree > 1 and not model.num_experts,
            "there are no experts to distribute",
        )
        yield (
            f"num_experts {' '.join(vars(MixtureConfig()))}",
            not model.num_experts and model.mixture != MixtureConfig(),
            "there are no experts for the other keys",
        )
        yield (
            "top_k num_experts",
            model.num_experts and model.top_k > model.num_experts,
            "a token goes to different experts",
        )
        yield (
            "num_experts expert_parallel_degree",
            model.num_experts % degrees.expert_parallel_degree,
            "ranks hold equally many experts; use a multiple",
        )
        yield (
            "num_experts float8_linear",
            model.num_experts and self.float8_linear,
            "experts are not linear layers, and a rounded router would choose others; use one of the two",
        )
        yield (
            "moe_force_load_balance load_balance_coeff",
            model.mixture.moe_force_load_balance and model.mixture.load_balance_coeff is not None,
            "tokens go to experts in turn, whatever the bias; use one of the two",
        )
        yield (
            "n_dense_layers n_layers",
            model.num_experts and model.mixture.n_dense_layers >= model.n_layers,
            "no block has experts; use fewer, or num_experts 0",
        )
        yield (
            "n_dense_layers activation_checkpointing",
            model.num_experts and model.mixture.n_dense_layers and self.activation_checkpointing == "auto",
            "memory is estimated for equal blocks; name a kind",
        )
        yield (
            "param_dtype tensor_parallel_degree dim ffn_hidden moe_inter_dim",
            self._is_odd_for_experts,
            "dim, and each rank's part of an expert's width, are multiples of 16 bytes",
        )
        # Numbers
        yield (
            "float8_recipe float8_linear",
            self.float8_recipe != "tensorwise" and not self.float8_linear,
            "nothing is computed in float8; set float8_linear",
        )
        yield (
            "float8_output float8_linear loss_chunks",
            self.float8_output and (not self.float8_linear or self.loss_chunks),
            "float8 layers return whole logits; set float8_linear, and loss_chunks 0",
        )
        yield "float8_output vocab_size", self.float8_output and model.vocab_size % 16, "use a multiple of 16"
        yield (
            "float8_linear tensor_parallel_degree",
            self.float8_linear and degrees.tensor_parallel_degree > 1,
            "torchao splits float8 layers with styles of its own; use one of the two",
        )
        yield (
            "float8_linear dim n_heads n_kv_heads ffn_hidden batch_size seq_len context_parallel_degree",
            self.float8_linear and self._is_odd_for_float8,
            "dim, n_kv_heads x dim / n_heads, ffn_hidden and a rank's tokens of a micro-batch are multiples of 16",
        )
        yield (
            "fill_uninitialized_memory deterministic",
            self.fill_uninitialized_memory and not self.deterministic,
            "torch fills new tensors only under deterministic algorithms; use both or neither",
        )
        yield (
            "loss_chunks pipeline_parallel_degree",
            self.loss_chunks and degrees.pipeline_parallel_degree > 1,
            "torch computes the loss from the logits of the last stage; use loss_chunks 0",
        )
        yield (
            "memory_budget_bytes activation_checkpointing",
            self.memory.memory_budget_bytes is not None and self.activation_checkpointing != "auto",
            "only auto keeps to a budget",
        )
        # Hashes
        yield (
            "hash_tensors_step steps",
            (self.hashing.hash_tensors_step or 0) > self.steps,
            "this step is not measured",
        )
        yield (
            "hash_tensors_step hash_tensors",
            self.hashing.hash_tensors_step and not self.hashing.hash_tensors,
            "name the kinds to hash in that step",
        )
        yield from super().rules(device, ranks)

    @property
    def _is_odd_for_float8(self) -> bool:
        model = self.model
        positions = self.batch_size * self.seq_len // self.degrees.context_parallel_degree
        sizes = model.dim, model.n_kv_heads * model.head_dim, model.ffn_hidden, positions
        return any(size % 16 for size in sizes)

    @property
    def _is_odd_for_experts(self) -> bool:
        """Return whether a stride is no multiple of 16 bytes, which torch's grouped matrix products need."""
        model, multiple = self.model, 16 // self.param_dtype.itemsize
        width = (model.mixture.moe_inter_dim or model.ffn_hidden) // self.degrees.tensor_parallel_degree
        return bool(model.num_experts and (model.dim % multiple or width % multiple))

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
