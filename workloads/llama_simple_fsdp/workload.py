"""The ``llama_simple_fsdp`` workload."""

from __future__ import annotations

import torch

from ..common.settings import read_settings
from ..distributed.parallel_dims import ParallelMesh
from ..distributed.simple_fsdp import (
    MixedPrecision,
    block_buckets,
    buckets_of_stage,
    collective_groups,
    module_buckets,
    no_reorder_buckets,
    shard_parameters,
)
from ..models import build_model
from ..models.common.decoder import Decoder
from ..passes.annotate import Bucket
from ..trainer import LlamaWorkload
from .settings import LlamaSimpleFsdpSettings

try:
    from ..passes.async_tensor import micro_pipeline_options
    from ..passes.compile import make_backend
except ImportError as error:
    raise RuntimeError(f"llama_simple_fsdp does not support torch {torch.__version__}: {error}") from error


class LlamaSimpleFsdpWorkload(LlamaWorkload[LlamaSimpleFsdpSettings]):
    """Pre-training steps under SimpleFSDP (arXiv 2411.00284): a parametrization shards, the compiler schedules."""

    name = "llama_simple_fsdp"

    def read_settings(self) -> LlamaSimpleFsdpSettings:
        """Return the config as typed values."""
        return read_settings(LlamaSimpleFsdpSettings, self.config)

    def shard(self, model: Decoder, mesh: ParallelMesh) -> None:
        """Make all parameters DTensors that are gathered where they are read."""
        shard_parameters(model, mesh, MixedPrecision(self._settings.param_dtype, self._settings.reduce_dtype))

    def prepare(self, model: Decoder) -> None:
        """Compile the model as one graph when it first runs."""
        graph = self._settings.graph
        groups = collective_groups(model, self._mesh)
        buckets = self._buckets(model)
        no_reorder = no_reorder_buckets(self._whole(model), buckets, graph.overlap_reorder_modules)
        parameters, no_reshard = dict(model.named_parameters()), _no_reshard(self._settings, model)
        tensor, is_divided = self._mesh.tensor, self._settings.communication.async_tensor_parallel
        options = micro_pipeline_options(tensor) if tensor is not None and is_divided else None
        backend = make_backend(graph, parameters, buckets, groups, no_reorder, no_reshard, options)
        model.compile(backend=backend, fullgraph=True, dynamic=False)

    def _buckets(self, model: Decoder) -> tuple[Bucket, ...]:
        """Return the buckets of ``model``, which is the whole model or this rank's stage of it."""
        graph = self._settings.graph
        if graph.bucketing == "transformer_block":
            return block_buckets(model, self._settings.communication.blocks_per_bucket)
        if graph.bucketing == "manual":
            return buckets_of_stage(model, module_buckets(self._whole(model), graph.bucket_modules))
        return ()

    def _whole(self, model: Decoder) -> Decoder:
        """Return the whole model, whose modules config keys name; it is on the meta device if ``model`` is a stage."""
        if self._mesh.pipeline is None:
            return model
        with torch.device("meta"):
            return build_model(self._settings.model)


def _no_reshard(settings: LlamaSimpleFsdpSettings, model: Decoder) -> set[str]:
    """Return the parameters of the blocks that keep their gathered values between forward and backward."""
    # A stage of a pipeline holds some of the model's blocks, under the model's names.
    blocks = [f"layers.{name}." for name, _ in model.layers.named_children()]
    buckets = settings.communication.buckets(len(blocks), reshard_after_forward=settings.graph.reshard_after_forward)
    unsharded = [bucket.blocks for bucket in buckets if not bucket.reshard_after_forward]
    prefixes = tuple(blocks[number] for numbers in unsharded for number in numbers)
    return {name for name, _ in model.named_parameters() if name.startswith(prefixes)}
