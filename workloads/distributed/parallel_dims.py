"""The number of ranks along each axis of parallelism, and the device mesh that the axes form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..common.torch_private import flatten_mesh
from ..config import AxisDegrees

# The names of the dimensions of all meshes, outermost first. Groups of DATA share sequences along CONTEXT, and for the
# parameters of experts, SHARD is split into EXPERT_SHARD and EXPERT.
PIPELINE, REPLICATE, SHARD, EXPERT_SHARD, EXPERT = "pp", "dp_replicate", "fsdp", "expert_fsdp", "ep"
DATA, CONTEXT, TENSOR = "data", "cp", "tp"


@dataclass(frozen=True)
class ParallelDims:
    """The number of ranks along each axis of a world; ``data_parallel_shard`` is what the other axes leave."""

    data_parallel_replicate: int
    data_parallel_shard: int
    context_parallel: int
    tensor_parallel: int
    pipeline_parallel: int = 1
    expert_parallel: int = 1

    @classmethod
    def of_world(cls, given: AxisDegrees, world_size: int) -> ParallelDims:
        """Divide a world by the given degrees.

        Raises:
            ValueError: The world size is not a multiple of the product of the degrees, or the number of ranks that
                share parameters is not a multiple of ``expert_parallel_degree``, which takes no ranks of its own.
        """
        factors = asdict(given)
        expert_parallel = factors.pop("expert_parallel_degree")
        product = math.prod(factors.values())
        if world_size % product:
            named = " x ".join(f"{name} {degree}" for name, degree in factors.items())
            raise ValueError(f"the world has {world_size} ranks, not a multiple of {named} = {product}")
        num_shards = world_size // product
        num_ranks = num_shards * given.context_parallel_degree
        if num_ranks % expert_parallel:
            raise ValueError(
                f"expert_parallel_degree is {expert_parallel}, and parameters are sharded over {num_ranks} ranks, not "
                f"a multiple of {expert_parallel}"
            )
        replicate, pipeline, context, tensor = factors.values()
        return cls(replicate, num_shards, context, tensor, pipeline, expert_parallel)

    @property
    def data_parallel(self) -> int:
        """Return how many groups of ranks read sequences of their own."""
        return self.data_parallel_replicate * self.data_parallel_shard

    @property
    def ranks_per_sequence(self) -> int:
        """Return how many ranks share the work of one sequence."""
        return self.pipeline_parallel * self.context_parallel * self.tensor_parallel


@dataclass(frozen=True)
class ParameterAxes:
    """The mesh that some parameters are DTensors of, and its dimensions.

    Attributes:
        whole: all dimensions.
        replicas: the dimension along which the parameters are replicated.
        shards: the dimension along which they are sharded for data parallelism, which gathers them.
        non_dp_mesh: the dimensions along which each rank computes with a part of them: of all experts, and of matrices.
    """

    whole: DeviceMesh
    replicas: DeviceMesh | None
    shards: DeviceMesh
    non_dp_mesh: DeviceMesh | None


class ParallelMesh:
    """The device mesh of a pipeline's stage, outermost axis first: ``dp_replicate``, ``fsdp``, ``tp``.

    An axis of a single rank is left out, and its attribute is None. The axis of stages, ``pp``, is outside of all
    others, so that the ranks of a stage are neighbors; without pipeline parallelism the world is one stage.

    ``fsdp`` always exists. This axis includes the ranks of context parallelism: each of these ranks computes with
    whole parameters, so parameters are sharded over them as over any others.

    Attributes:
        degrees: the number of ranks along each axis.
        pipeline: the axis of stages.
        whole: all axes of a stage.
        replicas: the axis along which parameters are replicated.
        shards: the axis along which parameters are sharded for data parallelism.
        tensor: the axis along which matrices are split.
        context: the axis along which sequences are split: neighbors within ``fsdp``.
        experts: the axis along which experts are distributed: neighbors within ``fsdp``.
        data: the mesh that gradients are reduced over: ``[fsdp]``, or ``[dp_replicate, fsdp]`` with replicas.
        expert_data: the mesh that gradients of experts are reduced over: ``data`` without the axis of experts.
        dense_axes: the axes of all parameters except those of distributed experts.
        expert_axes: the axes of the parameters of experts.
        data_rank: the index of this rank's part of a global batch; ranks that share a sequence read the same part.
        context_rank: the index of the part of each sequence that this rank computes.
        counts_loss: whether this rank's loss is added to the global sum; ranks with the same loss add it once.
    """

    def __init__(self, degrees: ParallelDims, device_type: str) -> None:
        """Make the process groups; collective over the world."""
        sizes = {
            PIPELINE: degrees.pipeline_parallel,
            REPLICATE: degrees.data_parallel_replicate,
            SHARD: degrees.data_parallel_shard * degrees.context_parallel,
            TENSOR: degrees.tensor_parallel,
        }
        kept = {name: size for name, size in sizes.items() if size > 1 or name == SHARD}
        world = init_device_mesh(device_type, tuple(kept.values()), mesh_dim_names=tuple(kept))
        if TENSOR in kept:
            # DTensors reduce norms over the group of both dimensions at once.
            flatten_mesh(world[SHARD, TENSOR])
        self.degrees = degrees
        self.context = _context_mesh(degrees, device_type)
        experts = _expert_mesh(kept, degrees.expert_parallel, device_type)
        self.pipeline = world[PIPELINE] if PIPELINE in kept else None
        self.whole = world if self.pipeline is None else world[tuple(name for name in kept if name != PIPELINE)]
        self.replicas = self.whole[REPLICATE] if REPLICATE in kept else None
        self.shards = self.whole[SHARD]
        self.tensor = self.whole[TENSOR] if TENSOR in kept else None
        self.data = self.shards if self.replicas is None else self.whole[REPLICATE, SHARD]
        self.dense_axes = ParameterAxes(self.whole, self.replicas, self.shards, self.tensor)
        self.experts, self.expert_data, self.expert_axes = None, self.data, self.dense_axes
        if experts is not None:
            self.experts, shards = experts[EXPERT], experts[EXPERT_SHARD]
            split = (EXPERT,) if self.tensor is None else (EXPERT, TENSOR)
            outer = (EXPERT_SHARD,) if self.replicas is None else (REPLICATE, EXPERT_SHARD)
            self.expert_data = experts[outer]
            replicas = None if self.replicas is None else experts[REPLICATE]
            self.expert_axes = ParameterAxes(experts[*outer, *split], replicas, shards, experts[split])
        replica = 0 if self.replicas is None else self.replicas.get_local_rank()
        shard = self.shards.get_local_rank() // degrees.context_parallel
        self.data_rank = replica * degrees.data_parallel_shard + shard
        self.context_rank = 0 if self.context is None else self.context.get_local_rank()
        self.counts_loss = self.tensor is None or self.tensor.get_local_rank() == 0


def _context_mesh(degrees: ParallelDims, device_type: str) -> DeviceMesh | None:
    """Return the mesh of neighbors within ``fsdp`` that share sequences.

    Its process group is its own even if the group covers the world, so that graph passes and traces distinguish
    collectives of activations from collectives of parameters.
    """
    if degrees.context_parallel == 1:
        return None
    return init_device_mesh(
        device_type,
        (degrees.pipeline_parallel, degrees.data_parallel, degrees.context_parallel, degrees.tensor_parallel),
        mesh_dim_names=(PIPELINE, DATA, CONTEXT, TENSOR),
        backend_override={CONTEXT: dist.get_backend()},
    )[CONTEXT]


def _expert_mesh(sizes: Mapping[str, int], degree: int, device_type: str) -> DeviceMesh | None:
    """Return the mesh of ``sizes`` with ``fsdp`` split into shards of experts and the axis that distributes experts."""
    if degree == 1:
        return None
    split: dict[str, int] = {}
    for name, size in sizes.items():
        split |= {EXPERT_SHARD: size // degree, EXPERT: degree} if name == SHARD else {name: size}
    mesh = init_device_mesh(
        device_type, tuple(split.values()), mesh_dim_names=tuple(split), backend_override={EXPERT: dist.get_backend()}
    )
    flatten_mesh(mesh[tuple(name for name in split if name not in (PIPELINE, REPLICATE))])
    return mesh
