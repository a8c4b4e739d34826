"""FSDP2's units of blocks, in which experts that ranks distribute are sharded over a mesh of their own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard import _fsdp_common as fsdp_common
from torch.distributed.tensor import Shard

from ..llama.model.decoder import Block
from ..llama.model.experts import Experts, MoeFeedForward
from ..llama.parallel.expert import expert_placement
from ..llama.parallel.mesh import ParallelMesh

# A unit of torch 2.11 has one mesh; this constant and what runs where it is false go with torch 2.11.
HAS_PARAMETER_MESHES = hasattr(fsdp_common, "ShardPlacementResult")


def shard_blocks(blocks: Sequence[Block], mesh: ParallelMesh, **options: Any) -> list[FSDPModule]:
    """Apply ``fully_shard`` with ``options`` to ``blocks`` together.

    Returns:
        The modules whose gathers bring the parameters of all blocks.
    """
    apart: list[Any] = []
    placements: dict[nn.Parameter, Any] = {}
    if mesh.experts is not None:
        info = _mesh_info(mesh.expert_data)
        for block in blocks:
            if isinstance(block.feed_forward, MoeFeedForward):
                experts = block.feed_forward.experts
                placement = expert_placement(experts, mesh.expert_data)
                if HAS_PARAMETER_MESHES:
                    result = fsdp_common.ShardPlacementResult(placement, info)
                    placements |= dict.fromkeys(experts.parameters(), result)
                else:
                    _shard_apart(block, experts, placement, mesh=mesh.expert_data, **options)
                    apart.append(experts)
    unit: list[Any] = fully_shard(list(blocks), mesh=mesh.data, shard_placement_fn=placements.get, **options)
    return [unit[0], *apart]


def _mesh_info(mesh: DeviceMesh) -> fsdp_common.FSDPMeshInfo:
    """Return FSDP2's description of ``[shards]`` or ``[replicas, shards]``, which ``fully_shard`` makes of its mesh."""
    if mesh.ndim == 1:
        return fsdp_common.FSDPMeshInfo(mesh, shard_mesh_dim=0)
    return fsdp_common.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def _shard_apart(block: Block, experts: Experts, placement: Shard, **options: Any) -> None:
    """Make experts a unit of their own, which is gathered around the whole block.

    Gathers within the block would be in the region that activation checkpointing recomputes or a compiler traces.
    """
    fully_shard(experts, shard_placement_fn=lambda _: placement, **options)
    register_fsdp_forward_method(experts, "surround")
    block.forward = partial(experts.surround, block.forward)  # type: ignore[method-assign]
