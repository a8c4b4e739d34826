"""The config of ``llama_fsdp2`` as typed values."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import LlamaSettings
from ..distributed.fsdp2 import COPY_ENGINE, DEFAULT, use_copy_engines
from ..distributed.pipeline import ZERO_BUBBLE


@dataclass(frozen=True)
class LlamaFsdp2Settings(LlamaSettings):
    """The keys of ``llama_fsdp2``."""

    reshard_after_forward: bool
    all_gather: str
    forward_prefetch: int
    backward_prefetch: int
    reduce_every_micro_batch: bool
    compile_blocks: bool

    def check_own(self) -> None:
        """Raise ValueError if a key of this workload contradicts another key."""
        tensor_parallel, experts = self.degrees.tensor_parallel_degree, self.degrees.expert_parallel_degree
        self.communication.check_resharding(reshard_after_forward=self.reshard_after_forward)
        if self.pipeline_parallel_schedule == ZERO_BUBBLE:
            self._check_zero_bubble()
        self.communication.check_async_tensor_parallel(
            tensor_parallel, compiler="compile_blocks true", is_compiled=self.fuses_blocks
        )
        if self.communication.async_tensor_parallel and self.all_gather != DEFAULT:
            raise ValueError(
                f"async_tensor_parallel is true and all_gather is {self.all_gather!r}: a process has one backend of "
                f"symmetric memory, and the two keys need different ones; use one of the two"
            )
        if experts > 1 and self.all_gather != DEFAULT:
            raise ValueError(
                f"expert_parallel_degree is {experts} and all_gather is {self.all_gather!r}: experts "
                f"are gathered over ranks of their own, which have no symmetric memory; allowed is {DEFAULT!r}"
            )

    def _check_zero_bubble(self) -> None:
        """Raise ValueError if gradients of weights can't be computed apart from those of activations."""
        keys = ("reshard_after_forward", "reduce_every_micro_batch", "compile_blocks")
        if given := [key for key in keys if getattr(self, key)]:
            raise ValueError(
                f"pipeline_parallel_schedule is {ZERO_BUBBLE!r} and these are true: {', '.join(given)}; torch divides "
                f"each backward pass in autograd, with parameters that stay gathered until the last; allowed is false"
            )

    @property
    def fuses_blocks(self) -> bool:
        """Return whether inductor compiles blocks."""
        return self.compile_blocks

    @property
    def uses_symmetric_memory(self) -> bool:
        """Return whether ranks map memory of each other's GPUs."""
        return super().uses_symmetric_memory or self.all_gather != DEFAULT

    def prepare_environment(self) -> None:
        """Set the variables that libraries read when the process group is made."""
        super().prepare_environment()
        if self.all_gather == COPY_ENGINE:
            use_copy_engines()
