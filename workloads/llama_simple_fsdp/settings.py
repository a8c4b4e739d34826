"""The config of ``llama_simple_fsdp`` as typed values."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..common.rules import Rule, absolute
from ..config import GraphSettings, LlamaSettings


@dataclass(frozen=True)
class LlamaSimpleFsdpSettings(LlamaSettings):
    """The keys of ``llama_simple_fsdp``; ``graph`` groups keys of the config."""

    graph: GraphSettings

    @property
    def returns_loss(self) -> bool:
        """Return whether the model computes its loss, so that nothing outside of it has logits."""
        return super().returns_loss or self.graph.trace == "step"

    @property
    def holds_logits(self) -> bool:
        """Return whether a graph without the loss returns the logits."""
        return self.graph.backend != "eager" and not self.returns_loss

    @property
    def fuses_blocks(self) -> bool:
        """Return whether inductor compiles blocks."""
        return self.graph.backend == "inductor"

    def rules(self, device: str, ranks: int) -> Iterator[Rule]:
        """Yield the combinations of keys that a launch of ``ranks`` on ``device`` refuses."""
        yield from super().rules(device, ranks)
        model, degrees, graph = self.model, self.degrees, self.graph
        one_graph = "forward, loss and backward are one graph"
        replayed = "a step replays the kernels of one captured run"
        yield (
            "pipeline_parallel_schedule",
            self.is_zero_bubble,
            "autograd would divide each backward pass, which is one graph; use 1F1B or Interleaved1F1B",
        )
        yield (
            "async_tensor_parallel backend",
            self.async_tensor_parallel and graph.backend != "inductor",
            "inductor divides products and their collectives; use inductor",
        )
        yield (
            "blocks_per_bucket bucketing",
            self.blocks_per_bucket > 1 and graph.bucketing != "transformer_block",
            "buckets of blocks are those of transformer_block",
        )
        yield (
            "backend bucketing overlap_reorder reshard_after_forward",
            (
                graph.backend == "eager"
                and (graph.bucketing != "none" or graph.overlap_reorder or graph.reshard_after_forward)
            ),
            "eager runs no graph passes; use none, false and false",
        )
        yield (
            "bucketing bucket_modules",
            (graph.bucketing == "manual") != bool(graph.bucket_modules),
            "groups are given for manual bucketing, and only for it",
        )
        yield (
            "overlap_reorder_modules overlap_reorder bucketing",
            graph.overlap_reorder_modules and (not graph.overlap_reorder or graph.bucketing in ("none", "auto")),
            "modules choose among buckets that are reordered; use overlap_reorder with transformer_block or manual",
        )
        yield (
            "bucketing bucket_order overlap_reorder",
            graph.bucketing == "auto" and (graph.bucket_order != "graph" or not graph.overlap_reorder),
            "auto reorders, and packs buckets in graph order",
        )
        yield (
            "context_parallel_degree bucketing overlap_reorder",
            degrees.context_parallel_degree > 1 and graph.overlap_reorder and graph.bucketing in ("none", "auto"),
            "collectives are ordered by estimated times, which differ where ranks attend to more of a sequence",
        )
        yield absolute("dump_graphs", graph.dump_graphs)
        yield "trace backend", graph.trace == "step" and graph.backend == "eager", "no graph computes the gradients"
        yield (
            "trace pipeline_parallel_degree",
            graph.trace == "step" and degrees.pipeline_parallel_degree > 1,
            one_graph,
        )
        yield "trace compile_loss", graph.trace == "step" and self.compile_loss, one_graph
        yield "trace hash_operators_step", graph.trace == "step" and self.hash_operators_step, one_graph
        yield "trace fault", graph.trace == "step" and self.fault.kind == "drop_gradient", one_graph
        yield (
            "cuda_graphs trace backend",
            graph.cuda_graphs and (graph.trace, graph.backend) != ("step", "aot_eager"),
            "the graph of a whole step is captured; use trace step and backend aot_eager",
        )
        yield (
            "cuda_graphs device ranks",
            graph.cuda_graphs and (device, ranks) != ("cuda", 1),
            "a captured step has no collectives; use one rank on a CUDA device",
        )
        yield "cuda_graphs gradient_accumulation", graph.cuda_graphs and self.gradient_accumulation > 1, replayed
        yield "cuda_graphs num_experts", graph.cuda_graphs and model.num_experts, replayed
        yield (
            "cuda_graphs fault",
            graph.cuda_graphs and self.fault.kind in ("operator_output", "operator_input"),
            replayed,
        )
