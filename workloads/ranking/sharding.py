"""FSDP2 over the tables and each encoder block, and the streams of its collectives."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ..common.collectives import Collective, all_gather, reduce_scatter
from ..common.fsdp2 import CustomCollective, prefetch, sum_gradients
from .model import RankingModel
from .settings import RankingSettings


def shard(model: RankingModel, settings: RankingSettings, device: torch.device) -> FSDPModule:
    """Shard the tables and each block over all ranks; the tower and the head stay replicated."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(
        param_dtype=settings.param_dtype,
        reduce_dtype=settings.reduce_dtype,
        # Inputs have the right dtype already, and rounding would corrupt row numbers.
        cast_forward_inputs=False,
    )
    reshard = settings.reshard_after_forward
    units = [
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        for module in (model.tables, *model.blocks)
    ]
    replicated = {*model.dense_tower.parameters(), *model.head.parameters()}
    root: FSDPModule = fully_shard(model, mesh=mesh, ignored_params=replicated)
    sum_gradients(model, mesh.size())
    prefetch([[unit] for unit in units], settings.forward_prefetch, settings.backward_prefetch)
    _place_collectives(units, device, one_stream=settings.one_stream)
    return root


def _place_collectives(units: Sequence[FSDPModule], device: torch.device, *, one_stream: bool) -> None:
    """Move FSDP2's collectives to the compute stream if ``one_stream``.

    On CPU ranks FSDP2 waits for each collective at once. An all-gather that returns its work is instead waited for
    where its parameters are used, so that it overlaps.
    """
    if one_stream == (device.type == "cpu"):
        return
    collectives: tuple[Collective, Collective] = _gather_in_threads, partial(reduce_scatter, async_op=False)
    if one_stream:
        compute = torch.cuda.current_stream(device)
        collectives = partial(_run_in_line, compute, all_gather), partial(_run_in_line, compute, reduce_scatter)
    gather, scatter = map(CustomCollective, collectives)
    for unit in units:
        unit.set_custom_all_gather(gather)  # type: ignore[arg-type]
        unit.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]


def _gather_in_threads(*tensors: torch.Tensor, **given: Any) -> dist.Work | None:
    """Gather in gloo's threads, whatever FSDP2 asks for, and return the work."""
    return all_gather(*tensors, **given | {"async_op": True})


def _run_in_line(compute: torch.cuda.Stream, collective: Collective, *tensors: torch.Tensor, **given: Any) -> None:
    """Run a collective on the compute stream, ahead of later work there and on FSDP2's stream."""
    own = torch.cuda.current_stream()
    compute.wait_stream(own)
    with torch.cuda.stream(compute):
        collective(*tensors, **given)
    own.wait_stream(compute)
