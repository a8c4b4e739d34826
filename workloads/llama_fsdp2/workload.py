"""The ``llama_fsdp2`` workload."""

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ..common.fsdp2 import prefetch, sum_gradients
from ..distributed import fsdp2
from ..distributed.activation_checkpoint import LADDER
from ..distributed.memory import Gathering
from ..distributed.parallel_dims import ParallelMesh
from ..models.common.decoder import Block, Decoder
from ..passes.async_tensor import inductor_options
from ..trainer import LlamaWorkload
from .settings import LlamaFsdp2Settings


def apply_fsdp(model: Decoder, mesh: ParallelMesh, settings: LlamaFsdp2Settings) -> None:
    """Apply ``fully_shard`` to the embedding, buckets of blocks, norm with output, and for its hooks, the model."""
    policy = MixedPrecisionPolicy(
        param_dtype=settings.param_dtype,
        reduce_dtype=settings.reduce_dtype,
        # The model takes token ids and freqs_cis, and neither may be rounded.
        cast_forward_inputs=False,
    )
    reshard = settings.reshard_after_forward
    fully_shard(model.tok_embeddings, mesh=mesh.data, mp_policy=policy, reshard_after_forward=reshard)
    layers: list[Block] = list(model.layers)  # type: ignore[arg-type]
    units: list[list[FSDPModule]] = []
    for first in range(0, len(layers), settings.blocks_per_bucket):
        blocks = layers[first : first + settings.blocks_per_bucket]
        if settings.compile_blocks:
            apply_compile(blocks, mesh, settings)
        units.append(fsdp2.shard_blocks(blocks, mesh, mp_policy=policy, reshard_after_forward=reshard))
    # Backward begins with this group, whose parameters would be gathered again at once.
    fully_shard([model.norm, model.output], mesh=mesh.data, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh.data, mp_policy=policy)
    if settings.all_gather != fsdp2.DEFAULT:
        fsdp2.check_all_gather(settings.all_gather, mesh.shards.size())
        # Of summed gradients, torch would put the reduce-scatters into symmetric memory too.
        fsdp2.gather_symmetrically(model, mesh.shards.get_group())
    elif mesh.data.device_type == "cuda" and _keeps_reductions(mesh, settings):
        fsdp2.reduce_into_memory_of_compute(model)
    sum_gradients(model, mesh.data.size())
    # Experts that are units of their own, which goes with torch 2.11, are gathered ahead in backward only if asked.
    apart = any(len(unit) > 1 for unit in units)
    prefetch(units, settings.forward_prefetch, settings.backward_prefetch or int(apart))


def gathering(model: Decoder, mesh: ParallelMesh, settings: LlamaFsdp2Settings) -> Gathering:  # noqa: ARG001
    """Return how FSDP2 gathers the parameters of blocks."""
    return Gathering(
        is_compiled=settings.fuses_blocks,
        num_ahead=max(1, settings.forward_prefetch, settings.backward_prefetch),
        blocks_per_unit=settings.blocks_per_bucket,
        kept_by=frozenset() if settings.reshard_after_forward else frozenset(LADDER),
        accumulates_unsharded=not settings.reduces_every_micro_batch,
    )


class LlamaFsdp2Workload(LlamaWorkload[LlamaFsdp2Settings]):
    """Pre-training steps under eager FSDP2; groups are the embedding, buckets of blocks, and norm with output."""

    name, settings_type = "llama_fsdp2", LlamaFsdp2Settings
    shard, gathering = staticmethod(apply_fsdp), staticmethod(gathering)


def _keeps_reductions(mesh: ParallelMesh, settings: LlamaFsdp2Settings) -> bool:
    """Return whether what a reduce-scatter writes becomes the gradient that the optimizer reads.

    Otherwise it is cast or added to another gradient, and freed while a stream besides that of compute reads it.
    Experts may be in a unit of two groups, for which FSDP2 takes no other reduce-scatter.
    """
    adds = settings.reduces_every_micro_batch and settings.gradient_accumulation > 1
    return settings.reduce_dtype == torch.float32 and mesh.experts is None and not adds


def apply_compile(blocks: list[Block], mesh: ParallelMesh, settings: LlamaFsdp2Settings) -> None:
    """Compile what blocks compute, but none of the calls around it that gather parameters."""
    options = inductor_options(settings, mesh.tensor)
    if mesh.tensor is not None:
        # Imports a part of inductor, which eager models don't need.
        from ..passes.partition import Partitioner

        # Only under tensor parallelism, graphs have meshes.
        options["custom_partitioner_fn"] = Partitioner()
    for block in blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, options=options or None)  # type: ignore[method-assign]
