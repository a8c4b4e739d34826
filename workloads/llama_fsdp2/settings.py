"""The config of ``llama_fsdp2`` as typed values."""

from __future__ import annotations

from dataclasses import dataclass

from ..llama.parallel.mesh import Degrees
from ..llama.settings import LlamaSettings


@dataclass(frozen=True)
class LlamaFsdp2Settings(LlamaSettings):
    """The keys of ``llama_fsdp2``."""

    reshard_after_forward: bool
    forward_prefetch: int
    backward_prefetch: int
    reduce_every_micro_batch: bool
    compile_blocks: bool

    def check_degrees(self, degrees: Degrees) -> None:
        """Raise ValueError if a key of this workload contradicts ``degrees``."""
        if degrees.expert_parallel > 1 and self.compile_blocks:
            raise ValueError(
                f"expert_parallel_degree is {degrees.expert_parallel} and compile_blocks is true: FSDP2 gathers "
                f"distributed experts in calls within their block, which end a graph; use one of the two"
            )
