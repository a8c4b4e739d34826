"""The axes along which a Llama workload is parallel: how many ranks each has, and the device mesh they make."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# The names of the mesh's dimensions, outermost first.
PIPELINE, REPLICATE, SHARD, TENSOR = "pp", "dp_replicate", "fsdp", "tp"
_CONTEXT = "cp"
# What SHARD falls into for the parameters of experts.
_EXPERT_SHARD, _EXPERT = "expert_fsdp", "ep"
_GIVEN = ("data_parallel_replicate", "pipeline_parallel", "context_parallel", "tensor_parallel")


@dataclass(frozen=True)
class Degrees:
    """How many ways each axis splits the work; ``data_parallel_shard`` is what the others leave of the world."""

    data_parallel_replicate: int
    data_parallel_shard: int
    context_parallel: int
    tensor_parallel: int
    pipeline_parallel: int = 1
    expert_parallel: int = 1

    @classmethod
    def from_config(cls, config: Mapping[str, Any], world_size: int) -> Degrees:
        """Read the ``*_degree`` keys.

        Raises:
            ValueError: the world is no multiple of their product, or the ranks that parameters are sharded over
                are none of ``expert_parallel_degree``, which takes no ranks of its own.
        """
        given = {name: int(config[f"{name}_degree"]) for name in _GIVEN}
        product = math.prod(given.values())
        if world_size % product:
            factors = " x ".join(f"{name}_degree {degree}" for name, degree in given.items())
            raise ValueError(f"the world has {world_size} ranks, no multiple of {factors} = {product}")
        expert_parallel, num_shards = int(config["expert_parallel_degree"]), world_size // product
        num_ranks = num_shards * given["context_parallel"]
        if num_ranks % expert_parallel:
            raise ValueError(
                f"expert_parallel_degree is {expert_parallel}, and parameters are sharded over {num_ranks} ranks, no "
                f"multiple of it"
            )
        return cls(data_parallel_shard=num_shards, expert_parallel=expert_parallel, **given)

    @property
    def data_parallel(self) -> int:
        """How many groups of ranks read sequences of their own."""
        return self.data_parallel_replicate * self.data_parallel_shard

    @property
    def ranks_per_sequence(self) -> int:
        """How many ranks share the work of one sequence."""
        return self.pipeline_parallel * self.context_parallel * self.tensor_parallel


@dataclass(frozen=True)
class ParallelMesh:
    """The device mesh of a pipeline's stage, outermost axis first: ``dp_replicate``, ``fsdp``, ``tp``.

    An axis of a single rank is left out. Outside of all is ``pp``, the axis of stages, so that a stage's ranks are
    neighbours; without pipeline parallelism the world is one stage.

    ``fsdp`` is always there. It holds the ranks of context parallelism too, since what they compute of one sequence
    takes whole parameters: they are sharded over these as over any others.
    """

    degrees: Degrees
    pipeline: DeviceMesh | None
    whole: DeviceMesh
    context: DeviceMesh | None
    _experts: DeviceMesh | None = None

    @classmethod
    def build(cls, degrees: Degrees, device_type: str) -> ParallelMesh:
        """Make the process groups; collective over the world."""
        sizes = {
            PIPELINE: degrees.pipeline_parallel,
            REPLICATE: degrees.data_parallel_replicate,
            SHARD: degrees.data_parallel_shard * degrees.context_parallel,
            TENSOR: degrees.tensor_parallel,
        }
        kept = {name: size for name, size in sizes.items() if size > 1 or name == SHARD}
        world = init_device_mesh(device_type, tuple(kept.values()), mesh_dim_names=tuple(kept))
        context = _context_mesh(degrees, device_type)
        experts = _expert_mesh(kept, degrees.expert_parallel, device_type)
        if PIPELINE not in kept:
            return cls(degrees, None, world, context, experts)
        stage = world[tuple(name for name in kept if name != PIPELINE)]
        return cls(degrees, world[PIPELINE], stage, context, experts)

    @property
    def replicas(self) -> DeviceMesh | None:
        """The axis along which parameters are the same."""
        return self.whole[REPLICATE] if REPLICATE in self._names else None

    @property
    def shards(self) -> DeviceMesh:
        """The axis along which parameters are sharded for data parallelism."""
        return self.whole[SHARD]

    @property
    def tensor(self) -> DeviceMesh | None:
        """The axis along which matrices are split."""
        return self.whole[TENSOR] if TENSOR in self._names else None

    @property
    def data(self) -> DeviceMesh:
        """The mesh gradients are reduced over: ``[fsdp]``, or ``[dp_replicate, fsdp]`` with replicas."""
        return self.shards if self.replicas is None else self.whole[REPLICATE, SHARD]

    @property
    def experts(self) -> DeviceMesh | None:
        """The axis along which experts are shared out: neighbours within ``fsdp``."""
        return None if self._experts is None else self._experts[_EXPERT]

    @property
    def expert_data(self) -> DeviceMesh:
        """As :attr:`data`, for the gradients of experts: what their own axis leaves of ``fsdp``."""
        if self._experts is None:
            return self.data
        return self._experts[_EXPERT_SHARD] if self.replicas is None else self._experts[REPLICATE, _EXPERT_SHARD]

    @property
    def data_rank(self) -> int:
        """Which share of a global batch this rank reads; those that share a sequence read the same."""
        shard = self._position(SHARD) // self.degrees.context_parallel
        return self._position(REPLICATE) * self.degrees.data_parallel_shard + shard

    @property
    def context_rank(self) -> int:
        """Which part of each sequence this rank computes."""
        return 0 if self.context is None else self.context.get_local_rank()

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's loss is part of the global sum: one rank of those that compute the same one."""
        return self._position(TENSOR) == 0

    @property
    def _names(self) -> tuple[str, ...]:
        return self.whole.mesh_dim_names or ()

    def _position(self, name: str) -> int:
        return self.whole.get_local_rank(name) if name in self._names else 0


def _context_mesh(degrees: Degrees, device_type: str) -> DeviceMesh | None:
    """Neighbours within ``fsdp``, in a process group of their own even where it is the world.

    So collectives of activations are told from those of parameters.
    """
    if degrees.context_parallel == 1:
        return None
    return init_device_mesh(
        device_type,
        (degrees.pipeline_parallel, degrees.data_parallel, degrees.context_parallel, degrees.tensor_parallel),
        mesh_dim_names=(PIPELINE, "data", _CONTEXT, TENSOR),
        backend_override={_CONTEXT: dist.get_backend()},
    )[_CONTEXT]


def _expert_mesh(sizes: Mapping[str, int], degree: int, device_type: str) -> DeviceMesh | None:
    """The mesh of ``sizes`` with ``fsdp`` split, so that experts are shared out within it."""
    if degree == 1:
        return None
    split: dict[str, int] = {}
    for name, size in sizes.items():
        split |= {_EXPERT_SHARD: size // degree, _EXPERT: degree} if name == SHARD else {name: size}
    return init_device_mesh(
        device_type,
        tuple(split.values()),
        mesh_dim_names=tuple(split),
        backend_override={_EXPERT: dist.get_backend()},
    )
