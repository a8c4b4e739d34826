"""The ``llama_simple_fsdp`` workload."""

from __future__ import annotations

from ..llama.mesh import ParallelMesh
from ..llama.model import Llama
from ..llama.training import DTYPES, LlamaWorkload
from .buckets import Bucket, block_buckets, module_buckets
from .parametrization import MixedPrecision, shard_parameters
from .passes import check_checkpointing, make_backend
from .settings import CompileSettings


class LlamaSimpleFsdpWorkload(LlamaWorkload):
    """Pre-training steps under SimpleFSDP (arXiv 2411.00284): sharding is parametrization, the compiler schedules."""

    name = "llama_simple_fsdp"

    def shard(self, model: Llama, mesh: ParallelMesh) -> None:
        """Make all parameters DTensors that are gathered where they are read.

        Raises:
            ValueError: experts are to be shared out.
        """
        if mesh.experts is not None:
            raise ValueError(
                f"expert_parallel_degree is {self._degrees.expert_parallel}, and llama_simple_fsdp takes 1 alone: how "
                f"many tokens ranks exchange is read on the host, which no full graph can hold"
            )
        precision = MixedPrecision(DTYPES[self.config["param_dtype"]], DTYPES[self.config["reduce_dtype"]])
        shard_parameters(model, mesh, precision)

    def prepare(self, model: Llama) -> None:
        """Have the model compiled as one graph when it is first run."""
        settings = CompileSettings.from_config(self.config)
        settings.check_context_parallel(self._degrees.context_parallel)
        settings.check_pipeline_parallel(self._degrees.pipeline_parallel)
        check_checkpointing(settings, self.config["activation_checkpointing"])
        shards = self._mesh.shards
        group = shards.get_group().group_name if shards.size() > 1 else None
        backend = make_backend(settings, dict(model.named_parameters()), _buckets(settings, model), group)
        model.compile(backend=backend, fullgraph=True, dynamic=False)


def _buckets(settings: CompileSettings, model: Llama) -> tuple[Bucket, ...]:
    if settings.bucketing == "transformer_block":
        return block_buckets(model)
    return module_buckets(model, settings.bucket_modules) if settings.bucketing == "manual" else ()
