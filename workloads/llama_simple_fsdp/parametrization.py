"""Parameters that stay sharded and are gathered where a module reads them, so that a trace contains the collectives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ..llama.data import local_part
from ..llama.parallel.mesh import ParallelMesh


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes in which parameters are gathered and gradients are reduced."""

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype


def shard_parameters(model: nn.Module, mesh: ParallelMesh, precision: MixedPrecision) -> None:
    """Make every parameter a DTensor of ``mesh`` that is gathered when its module reads it.

    Parameters are plain tensors, or DTensors of the tensor-parallel axis; a rank's part of them is sharded on the first
    dim. The state dict, ``named_parameters()`` and the optimizer keep using the shards.
    """
    gather = _Gather(mesh.replicas, mesh.shards, mesh.tensor, precision)
    classes: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if not own:
            continue
        for name, parameter in own.items():
            sharded = nn.Parameter(_shard(parameter, mesh), requires_grad=parameter.requires_grad)
            module.register_parameter(name, sharded)
        key = type(module), tuple(own)
        if key not in classes:
            members: dict[str, Any] = {name: _gathered(name, gather) for name in own}
            classes[key] = type(f"SimpleFsdp{type(module).__name__}", (type(module),), members)
        module.__class__ = classes[key]


def _shard(parameter: nn.Parameter, mesh: ParallelMesh) -> DTensor:
    """Return this rank's shard of a parameter, with the same placements as under eager FSDP2."""
    local: torch.Tensor = parameter.detach()
    placements: list[Placement] = []
    if isinstance(local, DTensor):
        placements, local = list(local.placements), local.to_local()
    is_split = Shard(0) in placements
    placements.insert(0, _StridedShard(0, split_factor=mesh.degrees.tensor_parallel) if is_split else Shard(0))
    if mesh.replicas is not None:
        placements.insert(0, Replicate())
    local = local_part(local, mesh.shards, [Shard(0)])
    return _dtensor(local, mesh.whole, placements, parameter.shape)


def _gathered(name: str, gather: _Gather) -> property:
    def read(module: nn.Module) -> torch.Tensor:
        shard = module._parameters[name]
        if not isinstance(shard, DTensor):
            raise TypeError(f"parameter {name!r} of {type(module).__name__} is {type(shard).__name__}, not a DTensor")
        return gather(shard)

    return property(read)


@dataclass(frozen=True)
class _Gather:
    """A callable that maps the shard of a parameter to the value that its module computes with.

    Each axis has a DTensor of its own, so that gradients are reduced in the order of FSDP2. A DTensor of the whole mesh
    would add up replicas before the reduce-scatter, and can't be reduced to strided shards at all.
    """

    replicas: DeviceMesh | None
    shards: DeviceMesh
    tensor: DeviceMesh | None
    precision: MixedPrecision

    def __call__(self, parameter: DTensor) -> torch.Tensor:
        """Return the whole parameter in the dtype of compute; under tensor parallelism, a DTensor of that axis."""
        shape = list(parameter.shape)
        placement = parameter.placements[-1]
        if self.tensor is not None and isinstance(placement, Shard):
            shape[placement.dim] //= self.tensor.size()
        local = parameter.to_local(grad_placements=parameter.placements)
        whole = self._over_shards(self._over_replicas(local), shape)
        return whole if self.tensor is None else _dtensor(whole, self.tensor, [placement], parameter.shape)

    def _over_replicas(self, local: torch.Tensor) -> torch.Tensor:
        """Return the same value, whose gradient is summed over replicas in the dtype of reductions."""
        if self.replicas is None:
            return local
        replica = _dtensor(local, self.replicas, [Replicate()], local.shape)
        same = replica.redistribute(placements=[Replicate()], backward_dtype=self.precision.reduce_dtype)
        return same.to_local(grad_placements=[Partial("sum")])

    def _over_shards(self, local: torch.Tensor, shape: list[int]) -> torch.Tensor:
        """All-gather the shards; backward reduce-scatters the sum of all ranks' gradients."""
        whole = _dtensor(local, self.shards, [Shard(0)], shape).redistribute(
            placements=[Replicate()],
            forward_dtype=self.precision.param_dtype,
            backward_dtype=self.precision.reduce_dtype,
        )
        return whole.to_local(grad_placements=[Partial("sum")])


def _dtensor(
    local: torch.Tensor, mesh: DeviceMesh, placements: list[Placement], shape: torch.Size | list[int]
) -> DTensor:
    """Return a contiguous DTensor of global ``shape``, which can't be inferred from uneven shards."""
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
