"""The config of ``llama_simple_fsdp`` as typed values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..common.faults import OPERATOR_INPUT, OPERATOR_OUTPUT
from ..config import GraphSettings, LlamaSettings
from ..distributed.pipeline import ZERO_BUBBLE


def _refuse(reason: str, keys: Mapping[str, bool]) -> None:
    if given := [key for key, is_given in keys.items() if is_given]:
        raise ValueError(f"{reason}; it does not run with {', '.join(given)}")


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
        if self.graph.traces_step:
            self._check_step()

    def _check_step(self) -> None:
        """Raise ValueError for keys that need forward and backward apart, or that a captured step would ignore."""
        hashing, fault = self.hashing, self.fault.kind
        apart = {
            "pipeline_parallel_degree above 1": self.degrees.pipeline_parallel_degree > 1,
            "compile_loss": self.compile_loss,
            "hash_operators_step": hashing.hash_operators_step is not None,
            f"hash_tensors {', '.join(hashing.boundaries)}": bool(hashing.boundaries),
            "fault drop_gradient": fault == "drop_gradient",
        }
        captured = {
            "gradient_accumulation above 1": self.gradient_accumulation > 1,
            "num_experts": self.model.num_experts > 0,
            f"fault {fault}": fault in (OPERATOR_INPUT, OPERATOR_OUTPUT),
        }
        _refuse("trace is step: forward, loss and backward are one graph", apart)
        if self.graph.cuda_graphs:
            _refuse("cuda_graphs is true: a step replays the kernels of one captured run", captured)

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
