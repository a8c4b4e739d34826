"""FSDP2: units of blocks, experts on a mesh of their own, and all-gathers into symmetric memory."""

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard

from ..common.collectives import all_gather, reduce_scatter
from ..common.fsdp2 import CustomCollective
from ..common.torch_private import fsdp_common, symmetric_memory
from ..models.common.decoder import Block
from ..models.common.moe import Experts, MoeFeedForward
from .expert import expert_placement
from .parallel_dims import ParallelMesh

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


def _mesh_info(mesh: DeviceMesh) -> Any:
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


DEFAULT, SYMMETRIC, COPY_ENGINE = "default", "symmetric", "copy_engine"
# The first version of NCCL that has each kind.
_NCCL_VERSIONS = {SYMMETRIC: (2, 27), COPY_ENGINE: (2, 28)}
# NCCL's value for leaving collectives to copy engines where possible.
_ZERO_CTA_POLICY = "2"


def use_copy_engines() -> None:
    """Have NCCL use copy engines where buffers allow; call before the process group is made."""
    os.environ["NCCL_CTA_POLICY"] = _ZERO_CTA_POLICY


def check_all_gather(kind: str, num_shards: int) -> None:
    """Raise ValueError if all-gathers of this kind can't run here; the message names the key and the cause."""
    asked = f"all_gather is {kind!r}"
    if num_shards == 1:
        raise ValueError(f"{asked} and parameters are on one rank, which gathers nothing; use more ranks")
    version, needed = torch.cuda.nccl.version(), _NCCL_VERSIONS[kind]
    if version < needed:
        raise ValueError(
            f"{asked} and NCCL is {'.'.join(map(str, version))}; all-gathers of this kind came with "
            f"NCCL {'.'.join(map(str, needed))}"
        )


def gather_symmetrically(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Have all groups of FSDP2 in ``model``, whose parameters are sharded over ``group``, gather symmetrically."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    # Torch 2.11 lacks this method; the rest of this function goes with the support of 2.11.
    if hasattr(FSDPModule, "set_symm_mem_for_comm"):
        for unit in units:
            unit.set_symm_mem_for_comm()
        return
    symmetric_memory.set_backend("NCCL")
    # Windows can only be registered with a communicator that exists.
    dist.barrier(group)
    pool = symmetric_memory.get_mem_pool(torch.device("cuda", torch.cuda.current_device()))

    def gather(output: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup, **options: Any) -> dist.Work | None:
        # Torch registers memory with NCCL once, however often the pool hands the memory out.
        symmetric_memory.rendezvous(output, group=group.group_name)
        return all_gather(output, own, group, **options)

    # Ranks allocate in the same order, so offsets in the pool are equal.
    custom: Any = CustomCollective(gather, memory=lambda: torch.cuda.use_mem_pool(pool))
    for unit in units:
        unit.set_custom_all_gather(custom)


def reduce_into_memory_of_compute(model: nn.Module) -> None:
    """Have FSDP2's reduce-scatters write into memory of the stream that computes.

    By default gradients are memory of the stream of reductions, where activations of the next forward pass can't be.
    The stream of reductions waits for that of compute before it asks for memory, so nothing that was in this memory
    before is still read. The stream of compute waits for reductions before the optimizer frees the gradients.
    """
    compute = torch.cuda.current_stream()
    custom: Any = CustomCollective(reduce_scatter, memory=lambda: torch.cuda.stream(compute))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(custom)
