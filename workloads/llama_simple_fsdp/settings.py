"""The config of ``llama_simple_fsdp`` as typed values."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import GraphSettings, LlamaSettings
from ..distributed.pipeline import ZERO_BUBBLE


@dataclass(frozen=True)
class LlamaSimpleFsdpSettings(LlamaSettings):
    """The keys of ``llama_simple_fsdp``; ``graph`` groups keys of the config."""

    graph: GraphSettings

    @property
    def fuses_blocks(self) -> bool:
        """Return whether inductor compiles blocks."""
        return self.graph.backend == "inductor"

    def check_own(self) -> None:
        """Raise ValueError if the keys of ``graph`` contradict each other or other keys."""
        if self.pipeline_parallel_schedule == ZERO_BUBBLE:
            raise ValueError(
                f"pipeline_parallel_schedule is {ZERO_BUBBLE!r}, for which autograd divides each backward pass; here "
                f"that is one graph; allowed are 1F1B and Interleaved1F1B"
            )
        self.graph.check()
        self.graph.check_context_parallel(self.degrees.context_parallel_degree)
        self._check_communication()

    def _check_communication(self) -> None:
        communication, graph = self.communication, self.graph
        communication.check_resharding(reshard_after_forward=graph.reshard_after_forward)
        communication.check_async_tensor_parallel(
            self.degrees.tensor_parallel_degree, compiler="backend inductor", is_compiled=self.fuses_blocks
        )
        if graph.bucketing != "transformer_block" and communication.blocks_per_bucket > 1:
            raise ValueError(
                f"blocks_per_bucket is {communication.blocks_per_bucket} and bucketing is {graph.bucketing!r}: buckets "
                f"of blocks are those of transformer_block; allowed is blocks_per_bucket 1"
            )
