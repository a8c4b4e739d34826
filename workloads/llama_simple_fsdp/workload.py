"""The ``llama_simple_fsdp`` workload."""

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..distributed import simple_fsdp
from ..distributed.activation_checkpoint import LADDER
from ..distributed.memory import Gathering
from ..distributed.parallel_dims import ParallelMesh
from ..models import build_model
from ..models.common.decoder import Decoder
from ..passes.annotate import Bucket
from ..trainer import LlamaWorkload
from .settings import LlamaSimpleFsdpSettings

try:
    from ..passes.async_tensor import inductor_options
    from ..passes.compile import make_backend
except ImportError as error:
    raise RuntimeError(f"llama_simple_fsdp does not support torch {torch.__version__}: {error}") from error


def shard(model: Decoder, mesh: ParallelMesh, settings: LlamaSimpleFsdpSettings) -> None:
    """Make all parameters DTensors that are gathered where they are read."""
    simple_fsdp.shard_parameters(model, mesh, MixedPrecisionPolicy(settings.param_dtype, settings.reduce_dtype))


def gathering(model: Decoder, mesh: ParallelMesh, settings: LlamaSimpleFsdpSettings) -> Gathering:
    """Return how graphs gather the parameters of blocks.

    Without a graph, autograd keeps the gathered parameters of blocks that are not recomputed.
    """
    is_eager = settings.graph.backend == "eager"
    kept_by = LADDER if not settings.graph.reshard_after_forward else ()
    return Gathering(
        is_compiled=not is_eager,
        blocks_per_unit=max([1, *map(simple_fsdp.num_blocks, _buckets(model, mesh, settings))]),
        kept_by=frozenset(LADDER[:1] if is_eager else kept_by),
    )


def apply_compile(model: Decoder, mesh: ParallelMesh, settings: LlamaSimpleFsdpSettings) -> None:
    """Compile the model as one graph when it first runs."""
    graph = settings.graph
    groups = simple_fsdp.collective_groups(model, mesh)
    buckets = _buckets(model, mesh, settings)
    whole = _whole(model, mesh)
    no_reorder = simple_fsdp.no_reorder_buckets(whole, buckets, graph.overlap_reorder_modules)
    options = inductor_options(settings, mesh.tensor)
    backend = make_backend(graph, dict(model.named_parameters()), buckets, groups, no_reorder, options)
    model.compile(backend=backend, fullgraph=True, dynamic=False)


class LlamaSimpleFsdpWorkload(LlamaWorkload[LlamaSimpleFsdpSettings]):
    """Pre-training steps under SimpleFSDP (arXiv 2411.00284): a parametrization shards, the compiler schedules."""

    name, settings_type = "llama_simple_fsdp", LlamaSimpleFsdpSettings
    shard, gathering, compile = staticmethod(shard), staticmethod(gathering), staticmethod(apply_compile)


def _buckets(model: Decoder, mesh: ParallelMesh, settings: LlamaSimpleFsdpSettings) -> tuple[Bucket, ...]:
    """Return the buckets of ``model``, which is the whole model or this rank's stage of it."""
    graph = settings.graph
    if graph.bucketing == "transformer_block":
        return simple_fsdp.block_buckets(model, settings.blocks_per_bucket)
    if graph.bucketing == "manual":
        manual = simple_fsdp.module_buckets(_whole(model, mesh), graph.bucket_modules)
        return simple_fsdp.buckets_of_stage(model, manual)
    return ()


def _whole(model: Decoder, mesh: ParallelMesh) -> Decoder:
    """Return the whole model, whose modules config keys name; it is on the meta device if ``model`` is a stage."""
    if mesh.pipeline is None:
        return model
    with torch.device("meta"):
        return build_model(model.config)
