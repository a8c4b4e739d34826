"""The config of ``llama_simple_fsdp`` as typed values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..llama.faults import OPERATOR_INPUT, OPERATOR_OUTPUT
from ..llama.parallel.mesh import ParallelDims
from ..llama.parallel.pipeline import ZERO_BUBBLE
from ..llama.settings import LlamaSettings


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
        if self.traces_step and self.backend == "eager":
            raise ValueError(
                "trace is step and backend is eager: autograd computes gradients then, and no graph; "
                "allowed are aot_eager and inductor"
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

    def check_device(self, device_type: str) -> None:
        """Raise ValueError for a key that needs GPUs on another device."""
        if self.cuda_graphs and device_type != "cuda":
            raise ValueError(f"cuda_graphs is true and ranks run on {device_type}; allowed are CUDA devices")

    def check_context_parallel(self, degree: int) -> None:
        """Raise ValueError for a schedule by estimated times if ranks have graphs of different shapes."""
        if degree > 1 and self.has_graph_pass and self.bucketing in ("none", "auto"):
            raise ValueError(
                f"context_parallel_degree is {degree}, bucketing is {self.bucketing!r} and overlap_reorder is "
                f"{self.overlap_reorder}: collectives are ordered by estimated times, and ranks that attend to more "
                f"of a sequence would order theirs otherwise; allowed are bucketing transformer_block and manual, and "
                f"none without overlap_reorder"
            )


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

    def check_degrees(self, degrees: ParallelDims) -> None:
        """Raise ValueError if the keys of ``graph`` contradict each other or ``degrees``."""
        if self.pipeline_parallel_schedule == ZERO_BUBBLE:
            raise ValueError(
                f"pipeline_parallel_schedule is {ZERO_BUBBLE!r}, for which autograd divides each backward pass; here "
                f"that is one graph; allowed are 1F1B and Interleaved1F1B"
            )
        self.graph.check()
        self.graph.check_context_parallel(degrees.context_parallel)
        self._check_communication(degrees)
        if self.graph.traces_step:
            self._check_step(degrees)

    def _check_step(self, degrees: ParallelDims) -> None:
        """Raise ValueError for keys that need forward and backward apart, or that a captured step would ignore."""
        hashing, fault = self.hashing, self.fault.kind
        apart = {
            "pipeline_parallel_degree above 1": degrees.pipeline_parallel > 1,
            "compile_loss": self.compile_loss,
            "hash_operators_step": hashing.hash_operators_step is not None,
            f"hash_tensors {', '.join(hashing.boundaries)}": bool(hashing.boundaries),
            "fault drop_gradient": fault == "drop_gradient",
        }
        captured = {
            "more than one rank": degrees.data_parallel * degrees.ranks_per_sequence > 1,
            "gradient_accumulation above 1": self.gradient_accumulation > 1,
            "num_experts": self.model.num_experts > 0,
            f"fault {fault}": fault in (OPERATOR_INPUT, OPERATOR_OUTPUT),
        }
        _refuse("trace is step: forward, loss and backward are one graph", apart)
        if self.graph.cuda_graphs:
            _refuse("cuda_graphs is true: a step replays the kernels of one captured run, on one GPU", captured)

    def _check_communication(self, degrees: ParallelDims) -> None:
        communication, graph = self.communication, self.graph
        communication.check_resharding(reshard_after_forward=graph.reshard_after_forward)
        communication.check_async_tensor_parallel(
            degrees.tensor_parallel, compiler="backend inductor", is_compiled=self.fuses_blocks
        )
        if graph.bucketing != "transformer_block" and communication.blocks_per_bucket > 1:
            raise ValueError(
                f"blocks_per_bucket is {communication.blocks_per_bucket} and bucketing is {graph.bucketing!r}: buckets "
                f"of blocks are those of transformer_block; allowed is blocks_per_bucket 1"
            )
