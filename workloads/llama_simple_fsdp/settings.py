"""The config of ``llama_simple_fsdp`` as typed values."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import GraphSettings, LlamaSettings


@dataclass(frozen=True)
class LlamaSimpleFsdpSettings(LlamaSettings):
    """The keys of ``llama_simple_fsdp``; ``graph`` groups keys of the config."""

    graph: GraphSettings

    @property
    def returns_loss(self) -> bool:
        """Return whether the model computes its loss, so that nothing outside of it has logits."""
        return super().returns_loss or self.graph.traces_step

    @property
    def fuses_blocks(self) -> bool:
        """Return whether inductor compiles blocks."""
        return self.graph.backend == "inductor"
