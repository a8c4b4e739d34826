"""Parameters that stay sharded and are gathered where a module reads them, so that a trace sees the collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor


@dataclass(frozen=True)
class MixedPrecision:
    """The dtype parameters are gathered in and gradients are reduced in."""

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype


def shard_parameters(model: nn.Module, mesh: DeviceMesh, precision: MixedPrecision) -> None:
    """Make every parameter a DTensor sharded on its first dim, and reading it from its module a gather.

    The state dict, ``named_parameters()`` and so the optimizer keep seeing the shards.
    """
    classes: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if not own:
            continue
        for name, parameter in own.items():
            # No source rank: the values are filled in later, by every rank.
            sharded = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
        key = type(module), tuple(own)
        if key not in classes:
            classes[key] = _gathering_class(*key, precision)
        module.__class__ = classes[key]


def _gathering_class(base: type[nn.Module], names: tuple[str, ...], precision: MixedPrecision) -> type[nn.Module]:
    members: dict[str, Any] = {name: _gathered(name, precision) for name in names}
    return type(f"SimpleFsdp{base.__name__}", (base,), members)


def _gathered(name: str, precision: MixedPrecision) -> property:
    def read(module: nn.Module) -> torch.Tensor:
        shard = module._parameters[name]
        if not isinstance(shard, DTensor):
            raise TypeError(f"parameter {name!r} of {type(module).__name__} is {type(shard).__name__}, not a DTensor")
        whole = shard.redistribute(
            placements=[Replicate()], forward_dtype=precision.param_dtype, backward_dtype=precision.reduce_dtype
        )
        # Each rank's gradient is a part of the sum: its reduction is a reduce-scatter to the shards.
        return whole.to_local(grad_placements=[Partial("sum")])

    return property(read)
