"""The axes along which a Llama workload is parallel: how many ranks each has, and the device mesh they make."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# The names of the mesh's dimensions, outermost first.
REPLICATE, SHARD, TENSOR = "dp_replicate", "fsdp", "tp"


@dataclass(frozen=True)
class Degrees:
    """How many ways each axis splits the work; parameters are sharded over what the others leave of the world."""

    data_parallel_replicate: int
    data_parallel_shard: int
    tensor_parallel: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any], world_size: int) -> Degrees:
        """Read the ``*_degree`` keys.

        Raises:
            ValueError: the world is no multiple of their product.
        """
        given = {name: int(config[f"{name}_degree"]) for name in ("data_parallel_replicate", "tensor_parallel")}
        product = math.prod(given.values())
        if world_size % product:
            factors = " x ".join(f"{name}_degree {degree}" for name, degree in given.items())
            raise ValueError(f"the world has {world_size} ranks, no multiple of {factors} = {product}")
        return cls(data_parallel_shard=world_size // product, **given)

    @property
    def data_parallel(self) -> int:
        """How many groups of ranks read sequences of their own."""
        return self.data_parallel_replicate * self.data_parallel_shard


@dataclass(frozen=True)
class ParallelMesh:
    """The device mesh, outermost axis first: ``dp_replicate``, ``fsdp``, ``tp``; one of a single rank is left out.

    ``fsdp`` is always there, so that a workload has parameters to shard.
    """

    degrees: Degrees
    whole: DeviceMesh

    @classmethod
    def build(cls, degrees: Degrees, device_type: str) -> ParallelMesh:
        """Make the process groups; collective over the world."""
        sizes = {
            REPLICATE: degrees.data_parallel_replicate,
            SHARD: degrees.data_parallel_shard,
            TENSOR: degrees.tensor_parallel,
        }
        kept = {name: size for name, size in sizes.items() if size > 1 or name == SHARD}
        return cls(degrees, init_device_mesh(device_type, tuple(kept.values()), mesh_dim_names=tuple(kept)))

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
    def data_rank(self) -> int:
        """Which share of a global batch this rank reads: ranks of one tensor-parallel group read the same."""
        return self._position(REPLICATE) * self.degrees.data_parallel_shard + self._position(SHARD)

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's loss is part of the global sum: one rank of those that compute the same one."""
        return self._position(TENSOR) == 0

    @property
    def _names(self) -> tuple[str, ...]:
        return self.whole.mesh_dim_names or ()

    def _position(self, name: str) -> int:
        return self.whole.get_local_rank(name) if name in self._names else 0
