"""Parameters that stay sharded and are gathered where a module reads them, so that a trace contains the collectives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ..llama.data import local_part
from ..llama.model.experts import Experts
from ..llama.parallel.expert import expert_placement
from ..llama.parallel.mesh import ParallelMesh, ParameterAxes


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes in which parameters are gathered and gradients are reduced."""

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype


@dataclass(frozen=True)
class CollectiveGroups:
    """The names of the process groups that gather a parameter's shards and sum its gradient over replicas.

    None stands for a group of a single rank, which needs no collective.
    """

    shards: str | None
    replicas: str | None


def shard_parameters(model: nn.Module, mesh: ParallelMesh, precision: MixedPrecision) -> None:
    """Make every parameter a DTensor that is gathered when its module reads it.

    Parameters are plain tensors, or DTensors of the axis that splits matrices or distributes experts. Data parallelism
    shards this rank's part of them. The state dict, ``named_parameters()`` and the optimizer keep using the shards.
    """
    classes: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if not own:
            continue
        axes, along = mesh.dense_axes, Shard(0)
        if _is_distributed(module, mesh):
            axes, along = mesh.expert_axes, expert_placement(module, mesh.expert_data)
        for name, parameter in own.items():
            sharded = nn.Parameter(_shard(parameter, axes, along), requires_grad=parameter.requires_grad)
            module.register_parameter(name, sharded)
        key = type(module), tuple(own)
        if key not in classes:
            gather = _Gather(axes, along, precision)
            members: dict[str, Any] = {name: _gathered(name, gather) for name in own}
            classes[key] = type(f"SimpleFsdp{type(module).__name__}", (type(module),), members)
        module.__class__ = classes[key]


def collective_groups(model: nn.Module, mesh: ParallelMesh) -> dict[str, CollectiveGroups]:
    """Return the process groups of each parameter's collectives."""
    groups = {
        axes.whole: CollectiveGroups(_group_name(axes.shards), _group_name(axes.replicas))
        for axes in (mesh.dense_axes, mesh.expert_axes)
    }
    return {name: groups[_sharded(name, parameter).device_mesh] for name, parameter in model.named_parameters()}


def _group_name(axis: DeviceMesh | None) -> str | None:
    return None if axis is None or axis.size() == 1 else axis.get_group().group_name


def _is_distributed(module: nn.Module, mesh: ParallelMesh) -> TypeGuard[Experts]:
    return isinstance(module, Experts) and mesh.experts is not None


def _shard(parameter: nn.Parameter, axes: ParameterAxes, along: Shard) -> DTensor:
    """Return this rank's shard of a parameter, with the same placements as under eager FSDP2."""
    local: torch.Tensor = parameter.detach()
    placements: list[Placement] = []
    factor = 1
    if isinstance(local, DTensor):
        placements = list(local.placements)
        factor = math.prod(local.device_mesh.size(axis) for axis, kind in enumerate(placements) if kind == along)
        local = local.to_local()
    placements.insert(0, _StridedShard(along.dim, split_factor=factor) if along in placements else along)
    if axes.replicas is not None:
        placements.insert(0, Replicate())
    local = local_part(local, axes.shards, [along])
    return _dtensor(local, axes.whole, placements, parameter.shape)


def _gathered(name: str, gather: _Gather) -> property:
    return property(lambda module: gather(_sharded(name, module._parameters[name])))


def _sharded(name: str, parameter: object) -> DTensor:
    if not isinstance(parameter, DTensor):
        raise TypeError(f"parameter {name!r} is {type(parameter).__name__}, not a DTensor")
    return parameter


@dataclass(frozen=True)
class _Gather:
    """A callable that maps the shard of a parameter to the value that its module computes with.

    Each axis has a DTensor of its own, so that gradients are reduced in FSDP2's order. A DTensor of the whole mesh
    would sum over replicas before the reduce-scatter, and can't be reduced to strided shards at all.
    """

    axes: ParameterAxes
    along: Shard
    precision: MixedPrecision

    def __call__(self, parameter: DTensor) -> torch.Tensor:
        """Return this rank's whole part of the parameter in the dtype of compute; a DTensor if an axis splits it."""
        shape, mesh = list(parameter.shape), self.axes.non_dp_mesh
        placements = [] if mesh is None else list(parameter.placements[-mesh.ndim :])
        for axis, placement in enumerate(placements):
            if mesh is not None and isinstance(placement, Shard):
                shape[placement.dim] //= mesh.size(axis)
        local = parameter.to_local(grad_placements=parameter.placements)
        whole = self._over_shards(self._over_replicas(local), shape)
        return whole if mesh is None else _dtensor(whole, mesh, placements, parameter.shape)

    def _over_replicas(self, local: torch.Tensor) -> torch.Tensor:
        """Return the same value, whose gradient is summed over replicas in the dtype of reductions."""
        if self.axes.replicas is None:
            return local
        replica = _dtensor(local, self.axes.replicas, [Replicate()], local.shape)
        same = replica.redistribute(placements=[Replicate()], backward_dtype=self.precision.reduce_dtype)
        return same.to_local(grad_placements=[Partial("sum")])

    def _over_shards(self, local: torch.Tensor, shape: list[int]) -> torch.Tensor:
        """All-gather the shards; backward reduce-scatters the sum of all ranks' gradients."""
        # Torch merges collectives along the first dimension.
        dim = self.along.dim
        moved = [shape[dim], *shape[:dim], *shape[dim + 1 :]]
        whole = _dtensor(local.movedim(dim, 0).contiguous(), self.axes.shards, [Shard(0)], moved).redistribute(
            placements=[Replicate()],
            forward_dtype=self.precision.param_dtype,
            backward_dtype=self.precision.reduce_dtype,
        )
        return whole.to_local(grad_placements=[Partial("sum")]).movedim(0, dim).contiguous()


def _dtensor(
    local: torch.Tensor, mesh: DeviceMesh, placements: list[Placement], shape: torch.Size | list[int]
) -> DTensor:
    """Return a contiguous DTensor of global ``shape``, which can't be inferred from uneven shards."""
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
