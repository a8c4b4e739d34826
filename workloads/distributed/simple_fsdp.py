"""SimpleFSDP (arXiv 2411.00284): parameters that are gathered where a module reads them, in buckets."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..common.torch_private import StridedShard
from ..models.common.data import local_part
from ..models.common.moe import Experts
from ..passes.annotate import Bucket, CollectiveGroups
from .expert import expert_placement
from .parallel_dims import ParallelMesh, ParameterAxes


def shard_parameters(model: nn.Module, mesh: ParallelMesh, precision: MixedPrecisionPolicy) -> None:
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
        if isinstance(module, Experts) and mesh.experts is not None:
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
    return {name: groups[parameter.device_mesh] for name, parameter in model.named_parameters()}  # type: ignore[attr-defined]


def _group_name(axis: DeviceMesh | None) -> str | None:
    return None if axis is None or axis.size() == 1 else axis.get_group().group_name


def _shard(parameter: nn.Parameter, axes: ParameterAxes, along: Shard) -> DTensor:
    """Return this rank's shard of a parameter, with the same placements as under eager FSDP2."""
    local: torch.Tensor = parameter.detach()
    placements: list[Placement] = []
    factor = 1
    if isinstance(local, DTensor):
        placements = list(local.placements)
        factor = math.prod(local.device_mesh.size(axis) for axis, kind in enumerate(placements) if kind == along)
        local = local.to_local()
    placements.insert(0, StridedShard(along.dim, split_factor=factor) if along in placements else along)
    if axes.replicas is not None:
        placements.insert(0, Replicate())
    local = local_part(local, axes.shards, [along])
    return _dtensor(local, axes.whole, placements, parameter.shape)


@dataclass(frozen=True)
class _Gather:
    """A callable that maps the shard of a parameter to the value that its module computes with.

    Each axis has a DTensor of its own, so that gradients are reduced in FSDP2's order. A DTensor of the whole mesh
    would sum over replicas before the reduce-scatter, and can't be reduced to strided shards at all.
    """

    axes: ParameterAxes
    along: Shard
    precision: MixedPrecisionPolicy

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


def _gathered(name: str, gather: _Gather) -> property:
    return property(lambda module: gather(module._parameters[name]))


def _dtensor(
    local: torch.Tensor, mesh: DeviceMesh, placements: list[Placement], shape: torch.Size | list[int]
) -> DTensor:
    """Return a contiguous DTensor of global ``shape``, which can't be inferred from uneven shards."""
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


_RANGE = re.compile(r"\[(\d+)-(\d+)\]")


def block_buckets(model: nn.Module, blocks_per_bucket: int = 1) -> tuple[Bucket, ...]:
    """Return a bucket for each ``blocks_per_bucket`` blocks, and one for each run of parameters before or after blocks.

    Blocks are the elements of the outermost module lists, and the blocks of a bucket follow one another in one list.
    These are also the groups of ``llama_fsdp2``.

    Raises:
        ValueError: The model has no module list.
    """
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    if not outermost:
        raise ValueError(f"bucketing is transformer_block and {type(model).__name__} has no nn.ModuleList of blocks")
    block_of = re.compile(f"({'|'.join(map(re.escape, outermost))})\\.\\d+\\.").match
    names = [name for name, _ in model.named_parameters()]
    found = {name: match for name in names if (match := block_of(name))}
    runs = [tuple(run) for _, run in groupby(names, lambda name: found[name][0] if name in found else "")]
    buckets: list[Bucket] = []
    for container, same in groupby(runs, lambda run: found[run[0]][1] if run[0] in found else ""):
        parts, size = list(same), blocks_per_bucket if container else 1
        buckets += [tuple(chain.from_iterable(parts[first : first + size])) for first in range(0, len(parts), size)]
    return tuple(buckets)


def num_blocks(bucket: Bucket) -> int:
    """Return how many elements of ``layers`` have a parameter in the bucket."""
    return len({name.split(".")[1] for name in bucket if name.startswith("layers.")})


def module_buckets(model: nn.Module, groups: Sequence[str]) -> tuple[Bucket, ...]:
    """Return a bucket for each group of modules; every parameter has to be in exactly one bucket.

    A group is one module's name, or several names joined by ``+``. A range, as in ``layers.[0-5]``, makes a bucket for
    each of its modules; joined by ``+``, all modules of the range are in one bucket.

    Raises:
        ValueError: A name belongs to no module, a module has no parameters, or a parameter is in two groups or in none.
    """
    expanded = [modules for group in groups for modules in _expand(group)]
    grouped, names = list(chain.from_iterable(expanded)), [name for name, _ in model.named_parameters()]
    _check_known("bucket_modules", model, grouped)
    inside = {module: [name for name in names if name.startswith(f"{module}.")] for module in grouped}
    if empty := [module for module, found in inside.items() if not found]:
        raise ValueError(f"bucket_modules: modules {empty} have no parameters")
    buckets = [[name for module in modules for name in inside[module]] for modules in expanded]
    listed = Counter(chain.from_iterable(buckets))
    if twice := [name for name, count in listed.items() if count > 1]:
        raise ValueError(f"bucket_modules: in more than one group are {twice}")
    if absent := [name for name in names if name not in listed]:
        raise ValueError(f"bucket_modules: in no group are {absent}")
    return tuple(map(tuple, buckets))


def no_reorder_buckets(model: nn.Module, buckets: Sequence[Bucket], modules: Sequence[str]) -> tuple[Bucket, ...]:
    """Return the buckets that are not reordered: those without a parameter of ``modules``; none for no modules.

    Raises:
        ValueError: A name belongs to no module, or a bucket has parameters of named modules and of others.
    """
    if not modules:
        return ()
    named = [name for module in modules for name in _expand_range(module)]
    _check_known("overlap_reorder_modules", model, named)
    inside = {name for name, _ in model.named_parameters() if any(name.startswith(f"{module}.") for module in named)}
    for bucket in buckets:
        if inside.intersection(bucket) and (others := [name for name in bucket if name not in inside]):
            raise ValueError(
                f"overlap_reorder_modules: {list(modules)} lack {others}, which are in one of their buckets"
            )
    return tuple(bucket for bucket in buckets if not inside.intersection(bucket))


def buckets_of_stage(stage: nn.Module, buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
    """Return the parts of the whole model's ``buckets`` that a pipeline's ``stage`` has; empty parts are left out."""
    own = {name for name, _ in stage.named_parameters()}
    parts = (tuple(name for name in bucket if name in own) for bucket in buckets)
    return tuple(part for part in parts if part)


def _check_known(key: str, model: nn.Module, modules: Sequence[str]) -> None:
    known = {name for name, _ in model.named_modules() if name}
    if unknown := [module for module in modules if module not in known]:
        top = [name for name, _ in model.named_children()]
        raise ValueError(f"{key}: the model has no modules {unknown}; at its top there are {top}")


def _expand(group: str) -> list[list[str]]:
    """Return the modules of each bucket that ``group`` makes."""
    parts = [_expand_range(part.strip()) for part in group.split("+")]
    if len(parts) == 1:
        return [[module] for module in parts[0]]
    return [[module for part in parts for module in part]]


def _expand_range(name: str) -> list[str]:
    found = _RANGE.search(name)
    if found is None:
        return [name]
    first, last = int(found[1]), int(found[2])
    if first > last:
        raise ValueError(f"{name!r} is an empty range of modules")
    numbered = [f"{name[: found.start()]}{number}{name[found.end() :]}" for number in range(first, last + 1)]
    return [module for one in numbered for module in _expand_range(one)]
