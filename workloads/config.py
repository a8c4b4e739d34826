"""The config keys that ``llama_fsdp2`` and ``llama_simple_fsdp`` share, as typed values, and their checks."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
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

    def check(self) -> None:
        """Raise ValueError for keys that contradict each other."""
        asked = {
            f"bucketing {self.bucketing}": self.bucketing != "none",
            "overlap_reorder": self.overlap_reorder,
            "reshard_after_forward": self.reshard_after_forward,
        }
        if self.backend == "eager" and (given := [name for name, is_asked in asked.items() if is_asked]):
            raise ValueError(f"backend is eager, which runs no graph passes, and these need one: {', '.join(given)}")
        if self.dump_graphs is not None and not Path(self.dump_graphs).is_absolute():
            raise ValueError(
                f"dump_graphs is {self.dump_graphs!r}, a relative path; ranks may run in any folder, so allowed are "
                f"absolute paths"
            )
        if self.traces_step and self.backend == "eager":
            raise ValueError(
                "trace is step and backend is eager: autograd computes gradients then, and no graph; allowed are "
                "aot_eager and inductor"
            )
        if self.cuda_graphs and not (self.traces_step and self.backend == "aot_eager"):
            raise ValueError(
                f"cuda_graphs is true, trace is {self.trace!r} and backend is {self.backend!r}: the graph of a whole "
                f"step is captured; allowed are trace step and backend aot_eager"
            )
        if (self.bucketing == "manual") != bool(self.bucket_modules):
            raise ValueError(
                f"bucket_modules is {list(self.bucket_modules)} and bucketing is {self.bucketing!r}: "
                f"groups are given for manual bucketing, and only for it"
            )
        if self.overlap_reorder_modules and (not self.overlap_reorder or self.bucketing in ("none", "auto")):
            raise ValueError(
                f"overlap_reorder_modules is {list(self.overlap_reorder_modules)}, overlap_reorder is "
                f"{self.overlap_reorder} and bucketing is {self.bucketing!r}: modules choose among buckets that are "
                f"reordered; allowed are overlap_reorder with bucketing transformer_block and manual"
            )
        if self.bucketing == "auto" and (self.bucket_order != "graph" or not self.overlap_reorder):
            raise ValueError(
                f"bucketing is auto, which reorders and packs buckets in graph order, and bucket_order is "
                f"{self.bucket_order!r}, overlap_reorder is {self.overlap_reorder}"
            )

    def check_devices(self, device_type: str, num_ranks: int) -> None:
        """Raise ValueError for a key that needs one GPU in another world."""
        if self.cuda_graphs and (device_type != "cuda" or num_ranks > 1):
            raise ValueError(
                f"cuda_graphs is true, and {num_ranks} ranks run on {device_type}: a captured step has no collectives; "
                f"allowed is one rank on a CUDA device"
            )

    def check_context_parallel(self, degree: int) -> None:
        """Raise ValueError for a schedule by estimated times if ranks have graphs of different shapes."""
        if degree > 1 and self.has_graph_pass and self.bucketing in ("none", "auto"):
            raise ValueError(
                f"context_parallel_degree is {degree}, bucketing is {self.bucketing!r} and overlap_reorder is "
                f"{self.overlap_reorder}: collectives are ordered by estimated times, and ranks that attend to more "
                f"of a sequence would order theirs otherwise; allowed are bucketing transformer_block and manual, and "
                f"none without overlap_reorder"
            )


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
        self.checkpoint.check()
        self.lr_schedule.check()

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

    def check_own(self) -> None:
        """Raise ValueError if a key that only one workload has contradicts another key."""

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

    def check_resharding(self, *, reshard_after_forward: bool) -> None:
        """Raise ValueError if some blocks are to keep their parameters although all blocks do."""
        if self.no_reshard_blocks and not reshard_after_forward:
            raise ValueError(
                f"no_reshard_blocks is {self.no_reshard_blocks} and reshard_after_forward is false, which keeps the "
                f"parameters of all blocks; use one of the two"
            )

    def check_async_tensor_parallel(self, degree: int, *, compiler: str, is_compiled: bool) -> None:
        """Raise ValueError if blocks have no collectives of activations that inductor could divide.

        Args:
            degree: ``tensor_parallel_degree``.
            compiler: the config key, with the value, that makes inductor compile blocks.
            is_compiled: whether the config has that value.
        """
        if not self.async_tensor_parallel:
            return
        if degree == 1:
            raise ValueError(
                "async_tensor_parallel is true and tensor_parallel_degree is 1: no activations are exchanged; allowed "
                "is a degree of 2 or more"
            )
        if not is_compiled:
            raise ValueError(
                f"async_tensor_parallel is true: inductor divides matrix products and their collectives, and blocks "
                f"are not compiled by inductor; add {compiler}"
            )

    def check_device(self, device_type: str) -> None:
        """Raise ValueError for a key that needs GPUs on another device."""
        if self.async_tensor_parallel and device_type != "cuda":
            raise ValueError(
                f"async_tensor_parallel is true and ranks run on {device_type}: the divided products write into "
                f"memory of other GPUs; allowed are CUDA devices"
            )


def turn_off_multicast() -> None:
    """Turn NVLink multicast off in NCCL and in torch's symmetric memory; call before the process group is made."""
    os.environ.update(_WITHOUT_MULTICAST)
