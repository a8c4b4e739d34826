"""The config of ``llama_fsdp2`` as typed values."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import LlamaSettings
from ..distributed.fsdp2 import COPY_ENGINE, DEFAULT, use_copy_engines


@dataclass(frozen=True)
class LlamaFsdp2Settings(LlamaSettings):
    """The keys of ``llama_fsdp2``."""

    reshard_after_forward: bool
    all_gather: str
    forward_prefetch: int
    backward_prefetch: int
    reduce_every_micro_batch: bool
    compile_blocks: bool

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
