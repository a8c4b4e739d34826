"""FSDP2 over the tables and each encoder block, and the streams of its collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from pytest_aorta.worker import Handle, Transfer

from ..common.collectives import all_gather, reduce_scatter
from ..common.fsdp2 import prefetch, sum_gradients
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
    # In gloo's threads, or at once: a transfer's argument says whether it returns its work.
    on_cpu: tuple[_Run, _Run] = (lambda transfer: transfer(True), lambda transfer: transfer(False))
    gather, scatter = (_InLine(torch.cuda.current_stream(device)),) * 2 if one_stream else on_cpu
    for unit in units:
        unit.set_custom_all_gather(_Collective(all_gather, gather))  # type: ignore[arg-type]
        unit.set_custom_reduce_scatter(_Collective(reduce_scatter, scatter))  # type: ignore[arg-type]


# Runs a collective, whose argument says whether it is asynchronous.
_Run: TypeAlias = Callable[[Transfer], Handle | None]


class _InLine:
    """Runs a collective on the compute stream, ahead of later work there and on FSDP2's stream."""

    def __init__(self, compute: torch.cuda.Stream) -> None:
        self._compute = compute

    def __call__(self, collective: Transfer) -> None:
        own = torch.cuda.current_stream()
        self._compute.wait_stream(own)
        with torch.cuda.stream(self._compute):
            collective(False)
        own.wait_stream(self._compute)


class _Collective:
    """A replacement for a collective of FSDP2; FSDP2's own base class for replacements is in a private module."""

    def __init__(self, collective: Callable[..., Handle | None], run: _Run) -> None:
        self._collective, self._run = collective, run

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialized buffer to send from or receive into."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *, async_op: bool = False, **given: Any
    ) -> Handle | None:
        def start(asynchronous: bool) -> Handle | None:
            return self._collective(output_tensor, input_tensor, async_op=async_op or asynchronous, **given)

        return self._run(start)
